import json
import os
import stat
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

import rl_async
from rl_async.configs.load import load_config, load_resolved
from rl_async.errors import ConfigError, UserError
from rl_async.insight.view.trajectories import RecordedFile
from rl_async.launcher.handle import _newest, _trained
from rl_async.launcher.plan.artifacts import checkpoints
from rl_async.launcher.run_folder import (
    FUNCTIONS,
    OUTPUT,
    clear_unused,
    continuation,
    create,
    hold,
    new_run,
    resumed_run,
    unfinished,
)
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.transitions import RolledBack, RunFinished, Transition

RESUMED = RolledBack(step=3, lineage=1, fresh=False, next_group=0, max_staleness=1)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"launcher.run_dir={tmp_path}"


def make_run(root: str, *overrides: str, name: str = "", mode: str = "disaggregated", steps: tuple[int, ...] = ()):
    config, folder = new_run("calculator", [root, *overrides], mode=mode, name=name)
    create(config, folder)
    for step in steps:
        state = folder / "checkpoints" / f"step-{step:06d}" / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text("{}")
    return folder


def record(folder: Path, *transitions: Transition) -> None:
    """Write the ledger of a run as its queue does."""
    with closing(Ledger(folder / "ledger.jsonl")) as ledger:
        for transition in transitions:
            ledger.append(transition)
        ledger.flush()


def test_default_names_count_up_per_config_and_mode(root: str) -> None:
    names = [make_run(root).name, make_run(root).name, make_run(root, mode="colocated").name]
    assert names == ["calculator-disaggregated-001", "calculator-disaggregated-002", "calculator-colocated-001"]


def test_finding_a_name_creates_nothing(root: str, tmp_path: Path) -> None:
    new_run("calculator", [root])
    assert list(tmp_path.iterdir()) == []


def test_the_resolved_config_is_in_the_folder(root: str) -> None:
    folder = make_run(root, "trainer.steps=3", name="mine")
    config = load_resolved(folder / "config.yaml")
    assert (config.trainer.steps, config.name, config.mode) == (3, "mine", "disaggregated")


def test_the_name_of_a_run_with_samples_is_refused(root: str) -> None:
    make_run(root, name="more", steps=(2,))
    with pytest.raises(UserError, match=r"--name: .*more .*--resume"):
        new_run("calculator", [root], name="more")
    record(make_run(root, "trainer.steps=2", name="done", steps=(2,)), RunFinished(left=[]))
    with pytest.raises(UserError, match=r"--name: .*done .*trainer\.steps"):
        new_run("calculator", [root], name="done")


@pytest.mark.parametrize("steps", [(2,), (50,)], ids=["unfinished", "finished"])
def test_one_who_does_not_want_to_resume_is_not_told_to(root: str, steps: tuple[int, ...]) -> None:
    record(make_run(root, name="mine", steps=steps), RunFinished(left=[]))
    with pytest.raises(UserError, match="--name") as refused:
        new_run("calculator", [root], name="mine", may_resume=False)
    assert "resume" not in str(refused.value)


def test_a_run_that_made_no_sample_is_started_again_by_the_same_command(root: str) -> None:
    folder = make_run(root, name="mine")
    (folder / "logs" / "engine-0.log").write_text("why it failed")
    (folder / "keys" / "clients").mkdir(parents=True)
    (folder / "ledger.jsonl").write_text('{"event": "admit", "seq": 0, "group": 0}\n')
    (folder / "queue.sqlite").touch()
    (folder / "notes.txt").write_text("my own")
    before = sorted(folder.rglob("*"))
    config, again = new_run("calculator", [root, "trainer.steps=7"], name="mine")
    assert again == folder and sorted(folder.rglob("*")) == before, "choosing a folder changes nothing"
    with hold(again):
        assert clear_unused(again)
        left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        assert left == ["logs", "logs/engine-0.log", "notes.txt"]
        assert not clear_unused(again), "nothing is left"
        create(config, again)
    assert load_resolved(folder / "config.yaml").trainer.steps == 7


@pytest.mark.parametrize("result", ["metrics.jsonl", "evaluations.jsonl", "trajectories/eval-000000.jsonl.gz"])
def test_results_are_not_deleted_though_they_cannot_be_continued(root: str, result: str) -> None:
    folder = make_run(root, name="mine")
    (folder / result).parent.mkdir(exist_ok=True)
    (folder / result).touch()
    with pytest.raises(UserError, match="--name"):
        new_run("calculator", [root], name="mine")
    assert not clear_unused(folder)
    assert (folder / result).exists() and (folder / "config.yaml").exists()


def test_a_folder_without_a_run_is_left_alone(root: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(UserError, match="--name"):
        new_run("calculator", [root], name="mine")


def test_samples_that_came_after_the_folder_was_chosen_are_kept(root: str) -> None:
    folder = new_run("calculator", [root], name="mine")[1]
    make_run(root, name="mine", steps=(1,))
    with pytest.raises(UserError, match="--name"):
        clear_unused(folder)
    assert checkpoints(folder) == [1]


def test_a_continuation_names_its_step_and_the_steps_that_are_trained_again(root: str) -> None:
    folder = make_run(root, "trainer.steps=50", name="mine")
    config = load_resolved(folder / "config.yaml")
    assert "step 0 of 50" in continuation(folder, config)
    folder = make_run(root, name="more", steps=(10, 20))
    assert "step 20 of 50" in continuation(folder, config) and "again" not in continuation(folder, config)
    (folder / "metrics.jsonl").write_text('{"step": 22}\n')
    assert "20 to 22" in continuation(folder, config)


def test_a_run_without_a_checkpoint_continues_with_the_samples_that_it_has(root: str) -> None:
    folder = make_run(root, name="mine")
    assert not unfinished("calculator", [root], "mine")
    (folder / "ledger.jsonl").write_text('{"event": "put", "seq": 0, "group": 0, "sample": 0}\n')
    assert unfinished("calculator", [root], "mine")
    assert resumed_run("calculator", [root], name="mine")[1] == folder
    with pytest.raises(UserError, match="--resume to continue"):
        new_run("calculator", [root], name="mine")


@pytest.mark.parametrize("ledger", [None, b""], ids=["lost", "empty"])
@pytest.mark.parametrize("journal", ["sqlite", "redis", "elsewhere"])
def test_no_run_is_to_be_deleted_whose_ledger_alone_is_lost(root: str, journal: str, ledger: bytes | None) -> None:
    more = {"redis": ["queue.journal=redis"], "elsewhere": ["queue.sqlite.folder=elsewhere"]}.get(journal, [])
    folder = make_run(root, *more, name="mine")
    if ledger is not None:
        (folder / "ledger.jsonl").write_bytes(ledger)
    if journal == "sqlite":
        (folder / "queue.sqlite").touch()
    assert unfinished("calculator", [root], "mine")
    assert resumed_run("calculator", [root], name="mine")[1] == folder
    with pytest.raises(UserError, match="--resume to continue"):
        new_run("calculator", [root], name="mine")


def test_a_run_is_unfinished_from_its_first_checkpoint_to_its_last(root: str) -> None:
    for name, saved, expected in (("none", (), False), ("some", (1, 2), True), ("all", (3,), False)):
        record(make_run(root, "trainer.steps=3", name=name, steps=saved), RunFinished(left=[]))
        assert unfinished("calculator", [root], name) is expected
    assert not unfinished("calculator", [root], "new")


@pytest.mark.parametrize("told", [(), (RunFinished(left=[]), RESUMED)], ids=["never", "before a resume"])
def test_a_run_whose_end_was_not_told_is_resumed_to_tell_it(root: str, told: tuple[Transition, ...]) -> None:
    folder = make_run(root, "trainer.steps=3", name="mine", steps=(3,))
    record(folder, *told)
    with (folder / "ledger.jsonl").open("ab") as file:
        file.write(b'{"event": "finish"')  # torn by the kill
    assert unfinished("calculator", [root], "mine")
    assert resumed_run("calculator", [root], name="mine")[0].trainer.steps == 3
    with pytest.raises(UserError, match=r"trainer\.steps: .* has trained 3 of 2 steps"):
        resumed_run("calculator", [root, "trainer.steps=2"], name="mine")


@pytest.mark.parametrize(
    ("config", "override", "said"),
    [
        ("shop", "trainer.steps=9", "give the config that the run was started with"),
        ("calculator", "seed=9", "seed: .* keeps it"),
        ("calculator", "model.path=other", "model.path: .* keeps it"),
        ("calculator", "name=other", "name: .* keeps it"),
        ("calculator", "trainer.steps=3", "has trained 3 of 3 steps"),
    ],
)
def test_a_run_does_not_become_another_by_being_resumed(root: str, config: str, override: str, said: str) -> None:
    record(make_run(root, name="mine", steps=(3,)), RESUMED, RunFinished(left=[]))
    with pytest.raises(UserError, match=said):
        resumed_run(config, [root, override], name="mine")


@pytest.mark.parametrize(
    ("key", "overrides"),
    [("critic", ["critic={}", "algorithm.advantage=gae"]), ("trainer.lora", ["trainer.lora={rank: 4}"])],
)
def test_a_resumed_run_gets_and_loses_no_model_that_its_checkpoints_lack_or_have(
    root: str, key: str, overrides: list[str]
) -> None:
    record(make_run(root, name="without", steps=(3,)), RESUMED)
    with pytest.raises(UserError, match=rf"{key}: .*without"):
        resumed_run("calculator", [root, *overrides], name="without")
    record(make_run(root, *overrides, name="with", steps=(3,)), RESUMED)
    assert resumed_run("calculator", [root, *overrides], name="with")[0].name == "with"
    with pytest.raises(UserError, match=rf"{key}: .*with it"):
        resumed_run("calculator", [root, f"{key}=null", "algorithm.advantage=grpo"], name="with")


@pytest.mark.parametrize("scheduled", ["trainer.schedule=cosine", "critic.schedule=linear"])
def test_a_resumed_run_makes_as_many_optimizer_steps_as_its_schedule_counts(root: str, scheduled: str) -> None:
    made = ["trainer.schedule=constant", "critic={}", "algorithm.advantage=gae", scheduled]
    record(make_run(root, *made, "trainer.minibatches=4", name="scheduled", steps=(1,)), RESUMED)
    with pytest.raises(UserError, match=r"trainer\.minibatches"):
        resumed_run("calculator", [root, *made, "trainer.minibatches=1"], name="scheduled")
    same = ["trainer.minibatches=2", "trainer.epochs=2"]
    assert resumed_run("calculator", [root, *made, *same], name="scheduled")[0].trainer.epochs == 2
    record(make_run(root, *made[:-1], "trainer.minibatches=4", name="constant", steps=(1,)), RESUMED)
    assert resumed_run("calculator", [root, "trainer.minibatches=1"], name="constant")[0].trainer.minibatches == 1


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(root: str, name: str) -> None:
    with pytest.raises(UserError, match="--name"):
        new_run("calculator", [root], name=name)


def test_resume_takes_the_newest_run_of_the_config(root: str) -> None:
    make_run(root, steps=(2,))
    newest = make_run(root, steps=(2,))
    # It failed before its first sample.
    make_run(root)
    make_run(root, mode="colocated", steps=(2,))
    assert resumed_run("calculator", [root], mode="disaggregated")[1] == newest


def test_resume_puts_overrides_on_top_of_the_runs_own_config_and_says_so(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(root, "trainer.steps=3", "seed=7", name="mine", steps=(3,))
    before = (made / "config.yaml").read_text()
    config, folder = resumed_run("calculator", [root, "trainer.steps=5"], name="mine")
    assert (config.trainer.steps, config.seed, config.name) == (5, 7, "mine")
    assert "mine changes trainer.steps from 3 to 5; config-before.yaml" in capsys.readouterr().err
    create(config, folder)
    assert (folder / "config-before.yaml").read_text() == before
    create(resumed_run("calculator", [root], name="mine")[0], folder)
    assert "changes" not in capsys.readouterr().err and (folder / "config-before.yaml").read_text() == before


def test_resume_says_where_the_given_config_is_not_followed(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: calculator\ntrainer: {steps: 9}\n")
    config, folder = new_run(str(mine), [root], name="mine")
    create(config, folder)
    state = folder / "checkpoints" / "step-000003" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    resumed_run(str(mine), [root], name="mine")
    assert capsys.readouterr().err == ""
    mine.write_text("extends: calculator\ntrainer: {steps: 9, learning_rate: 0.5}\n")
    config, _ = resumed_run(str(mine), [root], name="mine")
    assert config.trainer.learning_rate == 1e-3
    assert f"differs from {mine} in trainer.learning_rate; to change" in capsys.readouterr().err
    config, _ = resumed_run(str(mine), [root, "trainer.learning_rate=0.5"], name="mine")
    told = "mine changes trainer.learning_rate from 0.001 to 0.5; config-before.yaml keeps its config before\n"
    assert config.trainer.learning_rate == 0.5 and capsys.readouterr().err == told


def test_resume_without_samples_or_a_complete_checkpoint_is_refused(root: str) -> None:
    folder = make_run(root, name="mine")
    (folder / "checkpoints" / "step-000004").mkdir(parents=True)  # no state.json: not complete
    with pytest.raises(UserError, match=r"--resume: no sample was made in .*mine"):
        resumed_run("calculator", [root], name="mine")


def test_resume_without_any_run_is_refused(root: str) -> None:
    with pytest.raises(UserError, match=r"--resume: no run .*calculator-disaggregated"):
        resumed_run("calculator", [root])
    with pytest.raises(UserError, match=r"--resume: no run .*other"):
        resumed_run("calculator", [root], name="other")


def test_complete_checkpoints_in_order(root: str) -> None:
    assert checkpoints(make_run(root, steps=(10, 2))) == [2, 10]


def test_only_its_user_may_enter_a_run_folder(root: str, tmp_path: Path) -> None:
    config = load_config("calculator", [root], name="mine")
    create(config, tmp_path / "runs" / "mine")
    assert stat.S_IMODE((tmp_path / "runs" / "mine").stat().st_mode) == 0o700


# A run from Python: names and folders, what is read of a recorded run, and a run that fails at once.


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
