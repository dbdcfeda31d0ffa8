import stat
from contextlib import closing
from pathlib import Path

import pytest

from rl_async.configs.load import load_config, load_resolved
from rl_async.errors import UserError
from rl_async.launcher.plan.artifacts import checkpoints
from rl_async.launcher.run_folder import create, new_run, resumed_run, unfinished
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


def test_an_existing_name_is_refused(root: str) -> None:
    make_run(root, name="mine")
    with pytest.raises(UserError, match=r"--name: the run .*mine "):
        new_run("calculator", [root], name="mine")
    make_run(root, name="more", steps=(2,))
    with pytest.raises(UserError, match=r"--name: the run .*more .*--resume"):
        new_run("calculator", [root], name="more")


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
    make_run(root, mode="colocated", steps=(2,))
    assert resumed_run("calculator", [root], mode="disaggregated")[1] == newest


def test_resume_puts_overrides_on_top_of_the_runs_own_config(root: str) -> None:
    make_run(root, "trainer.steps=3", "seed=7", name="mine", steps=(3,))
    config, _ = resumed_run("calculator", [root, "trainer.steps=5"], name="mine")
    assert (config.trainer.steps, config.seed, config.name) == (5, 7, "mine")


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
    assert config.trainer.learning_rate == 0.5 and capsys.readouterr().err == ""


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
