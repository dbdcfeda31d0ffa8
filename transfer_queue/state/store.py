"""The queue's state machine: no sockets, no clock, no files. Time is passed in, changes come out as transitions.

A verb decides, and changes the state by a transition and by nothing else; ``recover`` applies the same transitions
again. So a store that was recovered is in the state in which the lost one was.

    tasks --admit--> WAITING --lease--> LEASED --put--> READY --reserve--> RESERVED --commit--> COMMITTED --retire-->
                        ^                  |              ^                   |                    |
                        +-- fail, expiry --+              +------ resume -----+--------------------+

``delivery.py`` is the workers' side, ``batches.py`` the trainer's, ``consumers.py`` other readers', ``evals.py`` the
evaluations', ``engines.py`` the registry; all work on the one ``book.py``. The rules for staleness are in
``policy.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from rl_async.messages import (
    Delivered,
    Done,
    EngineList,
    GroupList,
    Inspection,
    Leased,
    NotReady,
    Peeked,
    Refused,
    Reserved,
    Resumed,
    StatusReport,
    Subscription,
    Task,
    TrajectoryHeader,
    Version,
)
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.state import observe
from rl_async.transfer_queue.state import transitions as t
from rl_async.transfer_queue.state.batches import Batches, BatchesState
from rl_async.transfer_queue.state.book import Book, BookState
from rl_async.transfer_queue.state.consumers import Consumers, ConsumersState
from rl_async.transfer_queue.state.delivery import Delivery
from rl_async.transfer_queue.state.engines import Engines
from rl_async.transfer_queue.state.evals import Evaluation, Evaluations
from rl_async.transfer_queue.state.grants import Grant
from rl_async.transfer_queue.state.groups import State
from rl_async.transfer_queue.state.shards import Shards, ShardsState
from rl_async.transfer_queue.state.source import TaskSource
from rl_async.transfer_queue.state.tasks import Tasks


class StoreState(msgspec.Struct, kw_only=True):
    """The whole state, but for the times of leases and what was counted of requests that changed nothing."""

    book: BookState
    grants: list[Grant]
    batches: BatchesState
    consumers: ConsumersState
    evals: dict[int, Evaluation]
    engines: t.EnginesChanged
    shards: ShardsState


class Store:
    """Every verb of the queue, answered at once. ``now`` is in seconds and never decreases."""

    def __init__(
        self,
        settings: QueueSettings,
        source: TaskSource,
        eval_tasks: Sequence[Task],
        emit: Callable[[t.Transition], None],
    ) -> None:
        self.settings, self._emit, self._source = settings, emit, source
        book = self._book = Book(settings, source.cursor())
        tasks = self._tasks = Tasks(book, self._change, source)
        delivery = self._delivery = Delivery(book, self._change, tasks)
        consumers = self._consumers = Consumers(book, self._change)
        batches = self._batches = Batches(book, self._change, delivery, source, consumers.divide)
        evals = self._evals = Evaluations(book, self._change, eval_tasks)
        self._engines = Engines(self._change)
        self.shards = Shards(book, self._change, consumers)
        self._effects: dict[type[t.Transition], Callable[[Any], None]] = {
            t.Admitted: delivery.admitted,
            t.LeaseGiven: delivery.lease_given,
            t.GrantVoided: delivery.grant_voided,
            t.LeaseLost: delivery.lease_lost,
            t.SampleStored: delivery.sample_stored,
            t.SampleFailed: delivery.sample_failed,
            t.GroupReady: _announced,
            t.SignalWaived: delivery.signal_waived,
            t.GroupDropped: delivery.group_dropped,
            t.DeadLettered: delivery.dead_lettered,
            t.BatchReserved: batches.batch_reserved,
            t.BatchCommitted: self._batch_committed,
            t.Published: batches.version_published,
            t.Retired: self._steps_retired,
            t.Tightened: batches.bound_tightened,
            t.RolledBack: self._rolled_back,
            t.Subscribed: consumers.subscribed,
            t.Acknowledged: consumers.acknowledged,
            t.Unsubscribed: consumers.unsubscribed,
            t.Missed: consumers.missed,
            t.Submitted: tasks.submitted,
            t.Requeued: tasks.requeued,
            t.Drained: tasks.drained,
            t.EvalOpened: evals.opened,
            t.EvalAnswered: evals.answered,
            t.EvalClosed: evals.closed,
            t.EnginesChanged: self._engines.changed,
            t.ShardsChanged: self.shards.changed,
            t.ShardLost: self.shards.shard_lost,
            t.RunFinished: self._run_finished,
            t.Relaunched: self._relaunched,
        }

    def _change(self, transition: t.Transition) -> None:
        """Apply and announce. The only way in which the state changes."""
        self._effects[type(transition)](transition)
        self._emit(transition)

    def _batch_committed(self, event: t.BatchCommitted) -> None:
        self._batches.batch_committed(event)
        self._consumers.committed(self._batches.committed_from(self._consumers.logged))

    def _steps_retired(self, event: t.Retired) -> None:
        self._consumers.retired(event)  # first, while the book has the groups
        self._batches.steps_retired(event)

    def _rolled_back(self, event: t.RolledBack) -> None:
        self._batches.rolled_back(event)
        self._consumers.rolled_back(event)
        if event.fresh:  # group ids mean something else from now on
            self.shards.clear()

    # --- recovery ---------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """The whole state, for a journal's snapshot; equal for equal stores."""
        state = StoreState(
            book=self._book.dump(),
            grants=self._delivery.grants.dump(),
            batches=self._batches.dump(),
            consumers=self._consumers.dump(),
            evals=self._evals.dump(),
            engines=self._engines.dump(),
            shards=self.shards.dump(),
        )
        return msgspec.msgpack.encode(state)

    def recover(self, dump: bytes, transitions: Iterable[t.Transition], now: float) -> None:
        """Take over a dump, unless it is empty, and what came after it. Only a new store can.

        Every worker with leases has a full lease time from ``now``. Nothing is emitted. Raises DataError if the tasks
        are not those that the cursor was taken from.
        """
        self._book.now = now
        if dump:
            state = msgspec.msgpack.decode(dump, type=StoreState)
            self._book.load(state.book)
            self._delivery.grants.load(state.grants)
            self._batches.load(state.batches)
            self._consumers.load(state.consumers)
            self._evals.load(state.evals)
            self._engines.changed(state.engines)
            self.shards.load(state.shards)
        for transition in transitions:
            self._effects[type(transition)](transition)
        self._source.seek(self._book.cursor)
        self._book.leases.revive(now)
        self.shards.revive(now)

    def relaunch(self) -> None:
        """All other processes of the run were started anew: nobody holds a lease, serves, or knows that it was over."""
        self._delivery.revoke_all()
        self._engines.forget_all()
        self.shards.forget_all()
        if self._book.published is not None or self._book.finished or self._book.draining:
            self._change(t.Relaunched())

    def _relaunched(self, event: t.Relaunched) -> None:
        self._book.published, self._book.finished, self._book.draining = None, False, False

    def _run_finished(self, event: t.RunFinished) -> None:
        self._book.finished = True

    # --- workers ----------------------------------------------------------------------------------------------------

    def lease(self, worker: str, max_groups: int, now: float, request: bytes = b"", task: Task | None = None) -> Leased:
        """Groups to generate; none if there are none, or if the worker was not heard of (``renew``) of late.

        The same ``request``, unless it is empty, gets the same groups. Raises DataError for a bad row of the source.
        """
        return self._delivery.lease(worker, max_groups, now, request, task)

    def leasable(self) -> int:
        """How many groups could be leased now; never fewer than ``lease`` finds, more when bytes or tasks are short."""
        load = self._book.load_of_admission()
        return self._book.waiting + max(0, load.slots - load.alive)

    def granted(self, request: bytes) -> bool:
        """Whether this request for leases was answered with groups."""
        return self._delivery.granted(request)

    def undelivered(self, request: bytes) -> None:
        """The answer to this request for leases did not reach the worker."""
        self._delivery.undelivered(request)

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
        """Take back the leases of silent workers. Ages of groups are as exact as this is often."""
        self._book.now = now
        self._delivery.expire(now)
        self.shards.expire(now)

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
        """Forget the steps before ``step``, but for what consumers have not read."""
        answer = self._batches.retire(step)
        self._consumers.trim()
        return answer

    def tighten(self, max_staleness: int) -> Done | Refused:
        """Admit for this bound, at most the configured one."""
        return self._batches.tighten(max_staleness)

    def snapshot(self) -> bytes:
        """For a checkpoint."""
        return self._batches.snapshot()

    def resume(self, step: int, lineage: int, snapshot: bytes) -> Resumed | Refused:
        """Go back to a checkpoint; evaluations of the lost lineage are forgotten."""
        repeated = self._batches.has_resumed(step, lineage)
        answer = self._batches.resume(step, lineage, snapshot)
        if isinstance(answer, Resumed) and not repeated:
            self._evals.close_all()
            self._engines.unpublished()
        return answer

    # --- other readers ----------------------------------------------------------------------------------------------

    def subscribe(self, consumer: str, oldest: bool) -> Subscription | Refused:
        """Make a reader of what is trained."""
        return self._consumers.subscribe(consumer, oldest)

    def read(self, consumer: str, after: int, max_groups: int) -> Delivered | Refused:
        """What a consumer has not read."""
        return self._consumers.read(consumer, after, max_groups)

    def acknowledge(self, consumer: str, position: int) -> Done | Refused:
        """A consumer has read everything up to ``position``."""
        return self._consumers.acknowledge(consumer, position)

    def unsubscribe(self, consumer: str) -> Done:
        """Forget a consumer."""
        return self._consumers.unsubscribe(consumer)

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
            self._evals.close_answered()
            self._change(t.RunFinished())
        return Done()

    # --- tasks ------------------------------------------------------------------------------------------------------

    def submit(self, tasks: Sequence[Task], request: bytes = b"") -> Done | Refused:
        """Tasks to admit before those of the source; the same ``request``, unless it is empty, adds nothing."""
        return self._tasks.submit(tasks, request)

    def requeue(self, group: int, request: bytes = b"") -> Done | Refused:
        """Admit the task of a dead letter once more; the same ``request``, unless it is empty, changes nothing."""
        return self._tasks.requeue(group, request)

    def drain(self, on: bool) -> Done:
        """Stop admission, or go on with it."""
        return self._tasks.drain(on)

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
        """Counts of training groups; counters of changes since the run began, of other requests since the start."""
        book = self._book
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
            counters=dict(book.counters + book.asked) | {name: n for name, n in book.counters.items() if not n},
            oldest_lease_s=book.leases.oldest_s(now),
            workers=book.leases.workers,
            finished=book.finished,
        )

    def inspect(self, now: float, rates: dict[str, float]) -> Inspection:
        """The status with what is not counted but listed; ``rates`` are the caller's."""
        return Inspection(
            status=self.status(now),
            group_size=self._book.settings.group_size,
            draining=self._book.draining,
            submitted=len(self._book.submitted),
            oldest_lease=observe.oldest_lease(self._book, now),
            ages_s=observe.ages(self._book, now),
            rates=rates,
            dead_letters=list(self._book.dead_letters.values()),
            shards=self.shards.list().shards,
            consumers=self._consumers.records(),
            kept_bytes=self._consumers.kept_bytes,
        )

    def group_list(self, after: int, limit: int, state: str, now: float) -> GroupList | Refused:
        """Groups by id, of one state unless it is empty."""
        return observe.group_list(self._book, after, limit, state, now)

    def peek(self, group_id: int, now: float) -> Peeked | Refused:
        """One group with what is here of it."""
        return observe.peek(self._book, group_id, now)

    def count(self, counter: str) -> None:
        """Add one to a counter of the status report that is not recorded."""
        self._book.asked[counter] += 1

    def _published(self) -> Version:
        return self._book.published or Version(self._book.lineage, -1)


def _announced(event: t.GroupReady) -> None:
    """Nothing to do: the sample that completed the group has made it ready."""
