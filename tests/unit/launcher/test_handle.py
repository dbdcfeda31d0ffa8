"""A run from Python: names and folders, what is read of a recorded run, and a run that fails at once."""

import json
import os
import tarfile
from pathlib import Path

import pytest

import rl_async
from rl_async.errors import ConfigError, UserError
from rl_async.insight.view.trajectories import RecordedFile
from rl_async.launcher.handle import _newest, _trained
from rl_async.launcher.run_folder import FUNCTIONS, OUTPUT, new_run

KEPT = Path(__file__).parents[2] / "e2e" / "kept_run.tar.xz"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of a run of four steps, with two evaluations."""
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "runs" / "kept"


def test_a_finished_run_is_read(kept: Path) -> None:
    run = rl_async.load(kept)
    assert (run.name, run.status, run.running) == ("kept", "finished", False)
    metrics = run.metrics()
    assert [record["step"] for record in metrics] == [0, 1, 2, 3]
    assert all(type(record["step"]) is int and 0 <= record["reward/mean"] <= 1 for record in metrics)
    assert [record["eval/step"] for record in run.evaluations()] == [2, 4]
    samples = list(run.trajectories())
    assert len(samples) == sum(record["batch/trajectories"] for record in metrics)
    for record in metrics:
        rewards = [sample.reward for sample in run.trajectories(int(record["step"]))]
        assert sum(rewards) / len(rewards) == pytest.approx(record["reward/mean"])
    first = samples[0]
    assert first.turns[0].role == "user" and first.turns[0].text in first.text
    assert len(first.token_ids) == len(first.loss_mask) == len(first.logprobs)
    assert max(sample.staleness or 0 for sample in samples) == max(record["staleness/max"] for record in metrics)
    assert {sample.step for sample in run.trajectories(evaluation=True)} == {2, 4}
    assert run.wait() is run and run.stop() is run


def test_a_step_that_was_not_recorded_is_refused(kept: Path) -> None:
    for step, evaluation in ((9, False), (3, True)):
        with pytest.raises(UserError, match=f"step {step}"):
            rl_async.load(kept).trajectories(step, evaluation=evaluation)


def test_a_run_that_has_steps_left_was_stopped(kept: Path) -> None:
    config = kept / "config.yaml"
    config.write_text(config.read_text().replace("  steps: 4\n", "  steps: 9\n"))
    assert rl_async.load(kept).status == "stopped"


def test_a_folder_without_a_run_is_refused(kept: Path) -> None:
    with pytest.raises(UserError, match="kept"):
        rl_async.load(kept.with_name("kepd"))


def test_a_lock_that_outlived_its_launcher_names_no_process_to_stop(kept: Path) -> None:
    """Its number may be another process's by now: here it is that of this test."""
    kept.with_name(".kept.lock").write_text(f"{os.getpid()}\n")
    run = rl_async.load(kept)
    assert run.running
    assert run._holder() is None


def test_repeated_steps_count_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)]
    path.write_text(
        "".join(json.dumps({"step": step, "lineage": lineage, "x": None}) + "\n" for step, lineage in steps)
    )
    assert [(record["step"], record["lineage"]) for record in _newest(path, "step")] == [(0, 0), (1, 1), (2, 1)]
    assert _newest(tmp_path / "missing", "step") == []


def test_a_resumed_lineage_voids_older_files_from_its_first_step_on() -> None:
    named = [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1)]
    names = [f"step-{step:06d}-lineage{lineage}-rank0.jsonl.gz" for step, lineage in named]
    files = [file for name in reversed(names) if (file := RecordedFile.of(name))]
    assert [(file.step, file.lineage) for file in _trained(files)] == [(0, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("config", "overrides", "named"),
    [
        ("calculater", {}, "calculator"),
        ("missing.yaml", {}, "missing.yaml"),
        ("calculator", {"trainer.stpes": 3}, "trainer.steps"),
        ("calculator", {"trainer.steps": "three"}, "trainer.steps"),
        ({"extends": "calculator", "trainer": {"stpes": 3}}, {}, "trainer.steps"),
        ({"trainer": {"steps": 3}}, {}, "model"),
    ],
)
def test_a_mistake_in_the_config_starts_nothing(
    config: object, overrides: dict[str, object], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=named):
        rl_async.launch(config, overrides)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_prepared_folder_is_not_in_the_way_of_its_run(tmp_path: Path) -> None:
    root = [f"launcher.run_dir={tmp_path}"]
    (tmp_path / "mine" / FUNCTIONS).mkdir(parents=True)
    (tmp_path / "mine" / OUTPUT).parent.mkdir()
    (tmp_path / "mine" / OUTPUT).touch()
    assert new_run("calculator", root, name="mine")[1] == tmp_path / "mine"
    (tmp_path / "mine" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="--name"):
        new_run("calculator", root, name="mine")


def test_a_run_that_fails_at_once_raises_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its name is free for the corrected one. Three short processes: the command twice, and what loads the code."""
    monkeypatch.chdir(tmp_path)

    def unfit(bogus: str) -> float:
        return 1.0

    config = {"extends": "calculator", "trainer": {"steps": 3}}
    run = rl_async.launch(config, {"reward.timeout_s": 5}, reward=unfit, name="mine", mode="colocated")
    assert (run.folder, run.name) == (Path("runs/mine"), "mine")
    assert rl_async.load("runs/mine") is run
    with pytest.raises(UserError, match="bogus"):
        run.wait(quiet=True)
    assert (run.status, run.running, run.metrics(), list(run.trajectories())) == ("failed", False, [], [])
    assert run.stop().status == "failed"
    again = rl_async.launch("calculator", reward="missing.py:reward", name="mine")
    with pytest.raises(UserError, match=r"missing\.py"):
        again.wait(quiet=True)
