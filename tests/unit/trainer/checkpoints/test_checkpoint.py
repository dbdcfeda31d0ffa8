"""When checkpoints are written."""

import logging

import pytest

from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.checkpoints import CheckpointSchedule


def due(steps: int, every: int, batch_bytes: int, max_bytes: int = 1000) -> list[int]:
    """The completed steps after which a run of ``steps`` writes a checkpoint."""
    schedule = CheckpointSchedule(
        RunConfig(
            model=ModelConfig(path="m"),
            data=DataConfig(path="d"),
            queue=QueueConfig(max_bytes=max_bytes),
            trainer=TrainerConfig(steps=steps, checkpoint_every=every),
        )
    )
    return [step for step in range(1, steps + 1) if schedule.is_due(step, batch_bytes)]


def test_checkpoints_are_regular_and_at_the_end() -> None:
    assert due(7, 3, batch_bytes=0) == [3, 6, 7]
    assert due(7, 0, batch_bytes=0) == [7]


def test_trained_payloads_never_fill_more_than_half_of_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert due(7, 0, batch_bytes=200) == [3, 6, 7]
    assert len(caplog.messages) == 2 and all("queue.max_bytes" in message for message in caplog.messages)
    assert due(7, 2, batch_bytes=200) == [2, 4, 6, 7]
    assert due(3, 0, batch_bytes=5000) == [1, 2, 3]
