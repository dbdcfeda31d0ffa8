"""Where batches come from: the transfer queue, or the recorded trajectories of an earlier run."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rl_async.errors import RlAsyncError, RowsChanged, UserError
from rl_async.messages import NotReady, Reply, Reserved, RowKey, Trajectory, TrajectoryHeader
from rl_async.recording import files_of_step, read_trajectories

POLL_S = 2.0
REMIND_S = 1800.0
log = logging.getLogger("rl_async.trainer")


class BatchSource(Protocol):
    """Batches by step. ``reserve`` answers the same for a step however often it is asked; None if ``stopping``."""

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None: ...
    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]: ...
    def commit(self, step: int) -> None: ...
    def checkpointed(self, step: int) -> None: ...
    def snapshot(self) -> bytes: ...
    def tighten(self, max_staleness: int) -> None: ...


class QueueVerbs(Protocol):
    """The verbs of the queue's blocking client that a batch source uses."""

    def reserve(self, step: int, wait_s: float) -> Reserved | NotReady: ...
    def fetch_announced(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]: ...
    def commit(self, step: int) -> Reply: ...
    def retire(self, step: int) -> Reply: ...
    def snapshot(self) -> bytes: ...
    def tighten(self, max_staleness: int) -> Reply: ...


class Absence:
    """Notices that ``what`` waits for agent programs, of which none plays, and logs it: first at once, then rarely."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._logged = -math.inf

    def lasts(self, reply: NotReady) -> bool:
        """Whether the queue says that no program plays."""
        now = self._clock()
        if reply.unattended_s and now - self._logged > REMIND_S:
            self._logged = now
            log.warning(
                "%s waits without a deadline: no agent program has asked a gateway for an episode for %.0f s; start "
                "one (docs/how-to/gateway.md), `rl-async gateway ls RUN` shows who plays",
                self._what,
                reply.unattended_s,
            )
        return reply.unattended_s > 0


class QueueSource:
    """Consumes reserved batches of the transfer queue; waits at most ``timeout_s`` for one, not counting the time for
    which no agent program plays.

    ``refused`` is called with the step and what came in place of rows whose tokens are not those announced.
    """

    def __init__(
        self,
        queue: QueueVerbs,
        timeout_s: float,
        refused: Callable[[int, Mapping[RowKey, str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._timeout_s, self._refused, self._clock = queue, timeout_s, refused, clock
        self._step = 0  # reserved last

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None:
        """Wait for the batch of ``step``, or until ``stopping``, polled every POLL_S.

        Raises RlAsyncError with what is missing when the deadline passes.
        """
        deadline = self._clock() + self._timeout_s
        absence = Absence(f"step {step}", self._clock)
        while True:
            reply = self._queue.reserve(step, POLL_S)
            if isinstance(reply, Reserved):
                self._step = step
                return reply
            if stopping():
                return None
            if absence.lasts(reply):
                deadline = self._clock() + self._timeout_s
            if self._clock() > deadline:
                raise RlAsyncError(
                    f"no batch for step {step} within {self._timeout_s:.0f} s (trainer.batch_timeout_s): {reply.why}"
                )

    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        """Raises RowsLost, and RowsChanged if rows have other tokens than were announced to the queue."""
        try:
            return self._queue.fetch_announced(headers)
        except RowsChanged as error:
            self._refused(self._step, error.tokens_hash)
            raise

    def commit(self, step: int) -> None:
        self._queue.commit(step)

    def checkpointed(self, step: int) -> None:
        """The checkpoint after ``step`` completed steps is durable."""
        self._queue.retire(step)

    def snapshot(self) -> bytes:
        return self._queue.snapshot()

    def tighten(self, max_staleness: int) -> None:
        """Admit no more than keeps staleness within this bound."""
        self._queue.tighten(max_staleness)


class RecordedSource:
    """The batches in a run's ``trajectories/`` again, the newest lineage of each step. Nothing is sent anywhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[RowKey, Trajectory] = {}

    def reserve(self, step: int, stopping: Callable[[], bool]) -> Reserved | None:
        """Read the step's files. Raises UserError if the step was not recorded."""
        paths = files_of_step(self._folder, step)
        if not paths:
            raise UserError(f"{self._folder} has no recorded batch of step {step}")
        rows = [row for path in paths for row in read_trajectories(path)]
        self._rows = {row.key: row for row in rows}
        return Reserved(step=step, headers=[self._rows[key].header() for key in sorted(self._rows)])

    def fetch(self, headers: Sequence[TrajectoryHeader]) -> list[Trajectory]:
        return [self._rows[header.key] for header in headers]

    def commit(self, step: int) -> None:
        """Do nothing: no queue waits for a replayed batch."""

    def checkpointed(self, step: int) -> None:
        """Do nothing: no queue holds a replayed batch."""

    def snapshot(self) -> bytes:
        return b""

    def tighten(self, max_staleness: int) -> None:
        """Do nothing: the staleness of recorded batches is fixed."""
