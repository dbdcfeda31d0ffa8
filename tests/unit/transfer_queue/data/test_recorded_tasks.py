"""The tasks of a replay's queue."""

from pathlib import Path

from rl_async.configs.load.loader import load_config
from rl_async.recording import place_of
from rl_async.trainer.monitoring.records import append_trained
from rl_async.transfer_queue.__main__ import tasks_of
from tests.conftest import make_rows


def test_the_tasks_of_a_replay_do_not_depend_on_how_far_the_recorded_run_has_got(tmp_path: Path) -> None:
    size = ["data.train_batch_groups=2", "trainer.steps=2"]
    config = load_config("calculator", [*size, f"rollout.replay={tmp_path}"], mode="disaggregated")
    for step in range(4):
        append_trained(tmp_path / "trained.jsonl", 0, step, make_rows(step, groups=2))
    source, held_out = tasks_of(config)
    assert [place_of(task) for task in iter(lambda: source.next(0), None) if task] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert held_out == []
