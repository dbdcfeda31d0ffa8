"""A batch has a deadline, but not while its agent programs are away."""

import logging
import time
from collections.abc import Callable, Sequence

import pytest

from rl_async.errors import RlAsyncError
from rl_async.messages import Done, NotReady, Reserved, Trajectory, TrajectoryHeader
from rl_async.trainer.batches import QueueSource


class Queue:
    """Answers what it is given, one after another."""

    def __init__(self, *answers: Reserved | NotReady) -> None:
        self.answers = list(answers)

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady:
        return self.answers.pop(0)

    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        return []

    def commit(self, step: int) -> Done:
        return Done()

    def retire(self, step: int) -> Done:
        return Done()

    def snapshot(self) -> bytes:
        return b""

    def tighten(self, max_staleness: int) -> Done:
        return Done()


AWAY = NotReady(why="none", unattended_s=280.0)
MISSING = NotReady(why="one is missing")
BATCH = Reserved(step=3, headers=[])


def source(
    *answers: Reserved | NotReady, timeout_s: float = 1e-9, clock: Callable[[], float] = time.monotonic
) -> QueueSource:
    return QueueSource(Queue(*answers), timeout_s, lambda step, rows: None, clock)


def test_no_deadline_passes_while_no_program_plays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rl_async.trainer"):
        assert source(*[AWAY] * 5, BATCH, timeout_s=3600.0).reserve(3, lambda: False) is BATCH
    (line,) = [record.getMessage() for record in caplog.records]
    assert "280 s" in line and "step 3" in line


def test_the_deadline_counts_from_when_a_program_was_there_last() -> None:
    clock = map(float, range(0, 10000, 100)).__next__
    assert source(*[AWAY] * 20, BATCH, timeout_s=300.0, clock=clock).reserve(3, lambda: False) is BATCH
    with pytest.raises(RlAsyncError, match=r"trainer\.batch_timeout_s"):
        source(*[AWAY] * 3, *[MISSING] * 9, timeout_s=300.0, clock=clock).reserve(3, lambda: False)


def test_a_request_to_stop_ends_the_wait() -> None:
    assert source(AWAY, AWAY).reserve(3, lambda: True) is None
