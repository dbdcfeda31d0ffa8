"""The queue's state machine: no sockets, no clock, no files. Time is passed in, changes come out as transitions.

A verb decides, and changes the state by a transition and by nothing else; ``recover`` applies the same transitions
again. So a store that was recovered is in the state in which the lost one was.

    tasks --admit--> WAITING --lease--> LEASED --put--> READY --reserve--> RESERVED --commit--> COMMITTED --retire-->
                        ^                  |              ^                   |                    |
                        +-- fail, expiry --+              +------ resume -----+--------------------+

``delivery.py`` is the workers' side, ``batches.py`` the trainer's, ``consumers.py`` other readers', ``evals.py`` the
evaluations', ``registry.py`` that of engines and payload shards; all work on the one ``book.py``. The rules for
staleness are in ``policy/admission.py``.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from rl_async.messages import (
    Done,
    EngineList,
    Inspection,
    Refused,
    Resumed,
    StatusReport,
    Task,
    Version,
)
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.state import observe
from rl_async.transfer_queue.state import transitions as t
from rl_async.transfer_queue.state.attendance import Attendance
from rl_async.transfer_queue.state.batches import Batches, BatchesState
from rl_async.transfer_queue.state.book import Book, BookState
from rl_async.transfer_queue.state.consumers import Consumers, ConsumersState
from rl_async.transfer_queue.state.delivery import Delivery
from rl_async.transfer_queue.state.evals import EvalRound, EvalRounds
from rl_async.transfer_queue.state.groups import Grant, State
from rl_async.transfer_queue.state.registry import Engines, Shards, ShardsState
from rl_async.transfer_queue.state.tasks import Tasks, TaskSource


class StoreState(msgspec.Struct, kw_only=True):
    """The dump of the store: all but the times of leases and the unjournaled counters."""

    book: BookState
    grants: list[Grant]
    batches: BatchesState
    consumers: ConsumersState
    evals: dict[int, EvalRound]
    engines: t.EnginesChanged
    shards: ShardsState


class Store:
    """The parts of the state, and the verbs that concern several of them; all other verbs are methods of one part.

    A verb is answered at once. ``now`` is in seconds and never decreases.
    """

    def __init__(
        self,
        settings: QueueSettings,
        source: TaskSource,
        eval_tasks: Sequence[Task],
        emit: Callable[[t.Transition], None],
    ) -> None:
        self.settings, self._emit, self._source = settings, emit, source
        # Seconds of the slowest flush lately, for the status.
        self.flush_s = 0.0
        book = self.book = Book(settings, source.cursor())
        self.tasks = Tasks(book, self._change, source)
        self.delivery = Delivery(book, self._change, self.tasks)
        self.consumers = Consumers(book, self._change)
        self.batches = Batches(book, self._change, self.delivery, source, self.consumers.divide)
        self.evals = EvalRounds(book, self._change, eval_tasks)
        self.engines = Engines(self._change)
        self.shards = Shards(book, self._change, self.consumers)
        self.attendance = Attendance()
        parts = (self.tasks, self.delivery, self.consumers, self.batches, self.evals, self.engines, self.shards)
        self._effects: t.Effects = {kind: effect for part in parts for kind, effect in part.effects.items()} | {
            t.BatchCommitted: self._batch_committed,
            t.Retired: self._steps_retired,
            t.RolledBack: self._rolled_back,
            t.RunFinished: self._run_finished,
            t.Relaunched: self._relaunched,
        }

    def _change(self, transition: t.Transition) -> None:
        """Apply and announce. The only way in which the state changes."""
        self._effects[type(transition)](transition)
        self._emit(transition)

    def _batch_committed(self, event: t.BatchCommitted) -> None:
        self.batches.batch_committed(event)
        self.consumers.committed(self.batches.committed_from(self.consumers.logged))

    def _steps_retired(self, event: t.Retired) -> None:
        self.consumers.retired(event)  # first, while the book has the groups
        self.batches.steps_retired(event)

    def _rolled_back(self, event: t.RolledBack) -> None:
        self.batches.rolled_back(event)
        self.consumers.rolled_back(event)
        if event.fresh:  # group ids mean something else from now on
            self.shards.clear()

    # --- recovery ---------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """The whole state, for a journal's snapshot; equal for equal stores."""
        state = StoreState(
            book=self.book.dump(),
            grants=self.delivery.grants.dump(),
            batches=self.batches.dump(),
            consumers=self.consumers.dump(),
            evals=self.evals.dump(),
            engines=self.engines.dump(),
            shards=self.shards.dump(),
        )
        return msgspec.msgpack.encode(state)

    def recover(self, dump: bytes, transitions: Iterable[t.Transition], now: float) -> None:
        """Restore a dump, unless it is empty, and apply what came after it. Only a new store can.

        Every worker with leases has a full lease time from ``now``. Nothing is emitted. Raises DataError if the tasks
        are not those that the cursor was taken from.
        """
        self.book.now = now
        if dump:
            state = msgspec.msgpack.decode(dump, type=StoreState)
            self.book.load(state.book)
            self.delivery.grants.load(state.grants)
            self.batches.load(state.batches)
            self.consumers.load(state.consumers)
            self.evals.load(state.evals)
            self.engines.changed(state.engines)
            self.shards.load(state.shards)
        for transition in transitions:
            self._effects[type(transition)](transition)
        self._source.seek(self.book.cursor)
        self.book.leases.revive(now)
        self.shards.revive(now)

    def relaunch(self) -> None:
        """Forget leases, engines and shards, and that the run was over: all other processes were started anew."""
        self.delivery.revoke_all()
        self.engines.forget_all()
        self.shards.forget_all()
        if self.book.published is not None or self.book.finished or self.book.draining:
            self._change(t.Relaunched())

    def _relaunched(self, event: t.Relaunched) -> None:
        self.book.published, self.book.finished, self.book.draining = None, False, False

    def _run_finished(self, event: t.RunFinished) -> None:
        self.book.finished = True

    def expire(self, now: float) -> None:
        """Take back the leases of silent workers. Ages of groups are as exact as this is often."""
        self.book.now = now
        self.delivery.expire(now)
        self.shards.expire(now)

    # --- trainer ----------------------------------------------------------------------------------------------------

    def publish(self, version: Version, engines: Sequence[str]) -> Done | Refused:
        """Record that these engines serve ``version``: slots are freed, and groups are leased under it."""
        before = self.book.published
        answer = self.batches.publish(version)
        if isinstance(answer, Done) and self.book.published != before:
            self.engines.published(engines, version)
        return answer

    def retire(self, step: int) -> Done | Refused:
        """Forget the steps before ``step``, but for what consumers have not read."""
        answer = self.batches.retire(step)
        self.consumers.trim()
        return answer

    def resume(self, step: int, lineage: int, snapshot: bytes) -> Resumed | Refused:
        """Go back to a checkpoint; evaluations of the lost lineage are forgotten."""
        repeated = self.batches.has_resumed(step, lineage)
        answer = self.book.replaced(lineage) or self.batches.resume(step, lineage, snapshot)
        if isinstance(answer, Resumed) and not repeated:
            self.evals.close_all()
            self.engines.unpublished()
        return answer

    def finish(self) -> Done:
        """End the run: nothing more is admitted or leased."""
        if not self.book.finished:
            self.evals.close_answered()
            self._change(t.RunFinished(left=sorted(group.group_id for group in self.book.untrained())))
        return Done()

    def engine_list(self) -> EngineList:
        """The registry. Before the first publication of a lineage, ``published`` has step -1."""
        return self.engines.listed(self._published())

    def status(self, now: float) -> StatusReport:
        """Counts of training groups, and counters: of changes since the run began, others since the start."""
        book = self.book
        return StatusReport(
            published=self._published(),
            waiting=book.count(State.WAITING),
            leased=book.count(State.LEASED),
            ready=book.count(State.READY),
            reserved=book.count(State.RESERVED),
            committed=book.count(State.COMMITTED),
            slots_used=book.alive,
            slots=book.settings.slots_at(book.settings.max_staleness),
            max_staleness=book.max_staleness,
            admitted=book.next_group,
            payload_bytes=book.payload_bytes,
            counters=dict(book.counters + book.unjournaled_counters)
            | {name: n for name, n in book.counters.items() if not n},
            oldest_lease_s=book.leases.oldest_s(now),
            workers=book.leases.workers,
            finished=book.finished,
            unattended_s=self.attendance.unattended_s(now),
            last_failure=book.last_failure,
            scored=book.scored,
            unscored=book.unscored,
            flush_s=self.flush_s,
        )

    def inspect(self, now: float, rates: dict[str, float]) -> Inspection:
        """The status with what is not counted but listed; ``rates`` are the caller's."""
        return Inspection(
            status=self.status(now),
            group_size=self.book.settings.group_size,
            draining=self.book.draining,
            submitted=len(self.book.submitted),
            oldest_lease=observe.oldest_lease(self.book, now),
            ages_s=observe.ages(self.book, now),
            rates=rates,
            dead_letters=list(self.book.dead_letters.values()),
            shards=self.shards.list().shards,
            consumers=self.consumers.records(),
            kept_bytes=self.consumers.kept_bytes,
            workers=observe.workers(self.book, now),
        )

    def count(self, counter: str) -> None:
        """Add one to a counter of the status report that is not recorded."""
        self.book.unjournaled_counters[counter] += 1

    def _published(self) -> Version:
        return self.book.published or Version(self.book.lineage, -1)
