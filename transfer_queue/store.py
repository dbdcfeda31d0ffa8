"""The queue's state machine: no sockets, no clock, no files. Time is passed in, changes come out as transitions.

    tasks --admit--> WAITING --lease--> LEASED --put--> READY --reserve--> RESERVED --commit--> COMMITTED --retire-->
                        ^                  |              ^                   |                    |
                        +-- fail, expiry --+              +------ resume -----+--------------------+

``delivery.py`` is the workers' side, ``batches.py`` the trainer's, ``evals.py`` the evaluations', ``engines.py`` the
registry; all work on the one ``book.py``. The rules for staleness are in ``policy.py``.
"""

from collections.abc import Callable, Sequence

from rl_async.messages import (
    Done,
    EngineList,
    Leased,
    LeasedGroup,
    NotReady,
    Refused,
    Reserved,
    Resumed,
    StatusReport,
    Task,
    TrajectoryHeader,
    Version,
)
from rl_async.transfer_queue.batches import Batches
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.delivery import Delivery
from rl_async.transfer_queue.engines import Engines
from rl_async.transfer_queue.evals import Evaluations
from rl_async.transfer_queue.groups import State
from rl_async.transfer_queue.policy import QueueSettings
from rl_async.transfer_queue.source import TaskSource
from rl_async.transfer_queue.transitions import RunFinished, Transition


class Store:
    """Every verb of the queue, answered at once. ``now`` is in seconds and never decreases."""

    def __init__(
        self,
        settings: QueueSettings,
        source: TaskSource,
        eval_tasks: Sequence[Task],
        emit: Callable[[Transition], None],
    ) -> None:
        self._book = Book(settings, emit)
        self._delivery = Delivery(self._book, source)
        self._batches = Batches(self._book, self._delivery, source)
        self._evals = Evaluations(self._book, self._delivery, eval_tasks)
        self._engines = Engines(self._book)

    # --- workers ----------------------------------------------------------------------------------------------------

    def lease(self, worker: str, max_groups: int, now: float) -> Leased:
        """Groups to generate; none if there are none, or if the worker was not heard of (``renew``) of late.

        Raises DataError for a bad row of the task source.
        """
        return self._delivery.lease(worker, max_groups, now)

    def undelivered(self, worker: str, groups: Sequence[LeasedGroup]) -> None:
        """The answer that gave these leases did not reach the worker."""
        self._delivery.undelivered(worker, groups)

    def renew(self, worker: str, now: float) -> Done:
        """Hear of the worker: it keeps its leases, and may have more."""
        return self._delivery.renew(worker, now)

    def put(self, worker: str, headers: Sequence[TrajectoryHeader], now: float) -> Done | Refused:
        """Take in all rows of one sample; they are announced as SampleStored only if they are new."""
        return self._delivery.put(worker, headers, now)

    def holds(self, group: int) -> bool:
        """Whether the group is known; its last sample may have shown that it is not worth keeping."""
        return group in self._book.groups

    def fail(self, worker: str, group: int, sample: int, attempt: int, error: str, now: float) -> Done | Refused:
        """One attempt at one sample failed."""
        return self._delivery.fail(worker, group, sample, attempt, error, now)

    def expire(self, now: float) -> None:
        """Take back the leases of silent workers."""
        self._delivery.expire(now)

    # --- trainer ----------------------------------------------------------------------------------------------------

    def reserve(self, step: int, now: float) -> Reserved | NotReady | Refused:
        """The batch of a step."""
        return self._batches.reserve(step, now)

    def commit(self, step: int) -> Done | Refused:
        """The batch of a step was trained."""
        return self._batches.commit(step)

    def publish(self, version: Version, engines: Sequence[str]) -> Done | Refused:
        """These engines serve ``version``; slots are freed and work is leased under it."""
        before = self._book.published
        answer = self._batches.publish(version)
        if isinstance(answer, Done) and self._book.published != before:
            self._engines.published(engines, version)
        return answer

    def retire(self, step: int) -> Done | Refused:
        """Forget the steps before ``step``."""
        return self._batches.retire(step)

    def tighten(self, max_staleness: int) -> Done | Refused:
        """Admit for this bound, at most the configured one."""
        return self._batches.tighten(max_staleness)

    def snapshot(self) -> bytes:
        """For a checkpoint."""
        return self._batches.snapshot()

    def resume(self, step: int, lineage: int, snapshot: bytes) -> Resumed | Refused:
        """Go back to a checkpoint; evaluations of the lost lineage are forgotten."""
        before = self._book.lineage, self._book.published
        answer = self._batches.resume(step, lineage, snapshot)
        if isinstance(answer, Resumed) and before != (self._book.lineage, self._book.published):
            self._evals.close_all()
            self._engines.unpublished()
        return answer

    # --- evaluation and the end -------------------------------------------------------------------------------------

    def evaluate(self, eval_id: int) -> Done | Refused:
        """Admit the held-out tasks."""
        return self._evals.open(eval_id)

    def eval_result(self, eval_id: int) -> Reserved | NotReady | Refused:
        """The finished trajectories of an evaluation."""
        return self._evals.result(eval_id)

    def finish(self) -> Done:
        """The run is over."""
        if not self._book.finished:
            self._book.finished = True
            self._evals.close_answered()
            self._book.emit(RunFinished())
        return Done()

    # --- engines ----------------------------------------------------------------------------------------------------

    def register_engine(self, engine_id: str, url: str, kind: str) -> Done | Refused:
        """A new engine."""
        return self._engines.register(engine_id, url, kind)

    def remove_engine(self, engine_id: str) -> Done:
        """An engine is gone."""
        return self._engines.remove(engine_id)

    def confirm(self, engine_id: str, version: Version) -> Done | Refused:
        """An engine caught up."""
        return self._engines.confirm(engine_id, version)

    def engines(self) -> EngineList:
        """The registry. Before the first publication of a lineage, ``published`` has step -1."""
        return EngineList(revision=self._engines.revision, engines=self._engines.records(), published=self._published())

    # --- what there is ----------------------------------------------------------------------------------------------

    def status(self, now: float) -> StatusReport:
        """Counts of training groups, and counters since the start."""
        book = self._book
        return StatusReport(
            published=self._published(),
            waiting=book.count(State.WAITING),
            leased=book.count(State.LEASED),
            ready=book.count(State.READY),
            reserved=book.count(State.RESERVED),
            committed=book.count(State.COMMITTED),
            slots_used=book.alive,
            slots=book.settings.slots,
            max_staleness=book.max_staleness,
            admitted=book.next_group,
            payload_bytes=book.payload_bytes,
            counters=dict(book.counters),
            oldest_lease_s=book.leases.oldest_s(now),
            workers=book.leases.workers,
            finished=book.finished,
        )

    def count(self, counter: str) -> None:
        """Add one to a counter of the status report."""
        self._book.counters[counter] += 1

    def _published(self) -> Version:
        return self._book.published or Version(self._book.lineage, -1)
