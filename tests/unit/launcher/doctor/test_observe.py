import os
from pathlib import Path

from rl_async.launcher.doctor.observe import launcher_of, oldest_groups
from rl_async.launcher.folder.run_folder import hold
from rl_async.messages import GroupRecord


def test_the_launcher_is_who_holds_the_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert launcher_of(run) is None
    with hold(run):
        assert launcher_of(run) == os.getpid()
    run.with_name(".run.lock").write_text("999999999\n")
    assert launcher_of(run) is None


def test_the_oldest_group_of_each_state_is_listed() -> None:
    def group(number: int, state: str, age: float, partition: str = "train") -> GroupRecord:
        return GroupRecord(
            group_id=number,
            partition=partition,
            state=state,
            task_id="t",
            samples=4,
            here=0,
            workers=[],
            age_s=age,
            nbytes=0,
        )

    groups = [
        group(1, "ready", 0.0),
        group(2, "leased", 3.0),
        group(3, "leased", 9.0),
        group(4, "leased", 99.0, "eval"),
    ]
    assert [g.group_id for g in oldest_groups(groups)] == [1, 3]
