import gzip
import json
import os
from pathlib import Path

import pytest

from rl_async.configs.load import dump, load_config
from rl_async.errors import UserError
from rl_async.insight.doctor import is_evaluated, is_evaluated_in_part, launcher_of, observe, oldest_groups
from rl_async.launcher.run_folder import hold
from rl_async.messages import GroupRecord
from rl_async.recording import evaluation_file, trained_file, write_trajectories


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


def test_a_fine_tuning_is_not_diagnosed_as_a_run(tmp_path: Path) -> None:
    (tmp_path / "processes.json").write_text("[]")
    config = load_config(None, ["model.path=base", "data.path=chats.jsonl", "finetune.out=out"])
    (tmp_path / "config.yaml").write_text(dump(config))
    with pytest.raises(UserError, match="fine-tuning"):
        observe(tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_an_evaluation_is_over_once_all_of_it_is_recorded(tmp_path: Path, whole: bool) -> None:
    roles = ["queue", "engine", "worker"]

    def seen(roles: list[str]) -> tuple[bool, bool]:
        return is_evaluated(tmp_path, roles), is_evaluated_in_part(tmp_path, roles)

    assert seen(roles) == (False, False)
    write_trajectories(evaluation_file(tmp_path, 0, whole=whole), [])
    assert seen(roles) == (whole, not whole)
    assert seen([*roles, "trainer"]) == seen([]) == (False, False)


@pytest.mark.parametrize("slow", ["wait_batch", "sync"])
def test_where_batches_come_late_an_episode_of_a_recorded_step_is_timed(tmp_path: Path, slow: str) -> None:
    (tmp_path / "processes.json").write_text("[]")
    (tmp_path / "config.yaml").write_text(dump(load_config("calculator", [])))
    steps = []
    for step in range(30):
        seconds = dict.fromkeys(("wait_batch", "train", "sync"), 0.1)
        if step >= 20:
            seconds[slow] = 6.0
        times = {f"time/{phase}_s": of_phase for phase, of_phase in seconds.items()}
        steps.append({"step": step, "time/step_s": sum(seconds.values()), "tokens/per_s": 1 / seconds[slow], **times})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    file = trained_file(tmp_path, 28, 0, 0)
    file.parent.mkdir()
    timings = ({"generate": 1.0, "reward": 3.0}, {"generate": 2.0, "tools": 1.0, "reward": 5.0})
    file.write_bytes(gzip.compress("".join(json.dumps({"timings": each}) + "\n" for each in timings).encode()))
    seen = observe(tmp_path)
    assert "6." in seen.slowdown and not seen.trouble
    timed = {"generate": 1.5, "tools": 0.5, "environment": 0.0, "reward": 4.0}
    assert seen.episode_s == (timed if slow == "wait_batch" else {})
    file.write_bytes(file.read_bytes()[:-9])
    assert any(file.name in line for line in observe(tmp_path).trouble) == (slow == "wait_batch")
