"""The queue's state machine: no sockets, no clock, no files. Time is passed in, changes come out as transitions.

A verb decides, and changes the state by a transition and by nothing else; ``recover`` applies the same transitions
again. So a store that was recovered is in the state of the lost one.

    tasks --admit--> WAITING --lease--> LEASED --put--> READY --reserve--> RESERVED --commit--> COMMITTED --retire-->
                        ^                  |              ^                   |                    |
                        +-- fail, expiry --+              +------ resume -----+--------------------+

``delivery.py`` is the workers' side, ``batches.py`` the trainer's and the evaluations', ``registry.py`` that of other
readers, engines and payload shards; all work on the one ``book.py``. The rules for staleness are in ``admission.py``.
Listings for people change nothing and cost O(groups). To add a change: declare a transition, emit it from a verb, and
list its effect in the ``effects`` of its part.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec

from rl_async import messages as m
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.batches import Batches, BatchesState, EvalRound, EvalRounds
from rl_async.transfer_queue.book import EVAL_GROUPS, TRAIN, Book, BookState, Grant, Group, State
from rl_async.transfer_queue.delivery import Delivery, Tasks, TaskSource
from rl_async.transfer_queue.registry import Consumers, ConsumersState, Engines, Shards, ShardsState

# A worker that was silent for this long is gone.
HEARD_S = 60.0
# Programs pause for less than this between two episodes.
AWAY_S = 10.0
# The workers that are remembered.
REMEMBERED = 4096


class Attendance:
    """Tracks when workers were heard, and for how long the programs of each gateway have been away."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, float] = OrderedDict()
        # By gateway; None while a program is there.
        self._away_since: dict[str, float | None] = {}

    def hear(self, worker: str, now: float, idle_s: float | None = None) -> None:
        """Note a request of a worker; a gateway says for how many seconds no program has played or asked."""
        self._heard[worker] = now
        self._heard.move_to_end(worker)
        if idle_s is not None:
            self._away_since[worker] = now - idle_s if idle_s > 0 else None
        if len(self._heard) > REMEMBERED:
            self._away_since.pop(self._heard.popitem(last=False)[0], None)

    def unattended_s(self, now: float) -> float:
        """Return for how many seconds no episode was played because all workers are gateways without programs.

        0 while episodes are played, or if no worker is left at all.
        """
        away = list[float]()
        for worker, heard in self._heard.items():
            if now - heard > HEARD_S:
                continue
            since = self._away_since.get(worker)
            if since is None:
                return 0.0
            away.append(now - since)
        shortest = min(away, default=0.0)
        return shortest if shortest >= AWAY_S else 0.0


# Groups, or workers, of one answer.
MOST_LISTED = 1000
WINDOW_S = 60
NAMES = ("groups_ready", "groups_reserved", "rows", "bytes")


def oldest_lease(book: Book, now: float) -> m.LeaseRecord | None:
    """The oldest lease that has not ended."""
    oldest = book.leases.oldest()
    if oldest is None:
        return None
    worker, group = oldest
    return m.LeaseRecord(group_id=group, worker=worker, age_s=book.leases.age(worker, group, now))


def list_workers(book: Book, now: float) -> list[m.WorkerRecord]:
    """The workers heard of with the number of their leases, by name, at most MOST_LISTED."""
    records: list[m.WorkerRecord] = []
    for worker in book.leases.names()[:MOST_LISTED]:
        held = book.leases.held(worker)
        oldest = max((book.leases.age(worker, group, now) for group in held), default=0.0)
        records.append(m.WorkerRecord(worker=worker, samples=sum(held.values()), groups=len(held), oldest_s=oldest))
    return records


def oldest_ages(book: Book, now: float) -> dict[str, float]:
    """The seconds that the oldest training group of each state has been in it; empty states have no entry."""
    oldest: dict[str, float] = {}
    for group in book.groups.values():
        if group.partition == TRAIN:
            age = now - book.since[group.group_id]
            oldest[group.state] = max(age, oldest.get(group.state, 0.0))
    return {state: oldest[state] for state in State if state in oldest}


def group_list(book: Book, after: int, limit: int, state: str, now: float) -> m.GroupList | m.Refused:
    """Groups with an id above ``after``, by id, at most ``limit`` and MOST_LISTED, in ``state`` unless it is empty."""
    if state and state not in list(State):
        return m.Refused(code="unknown_state", reason=f"no state {state!r}; there are: {', '.join(State)}")
    limit = max(1, min(limit, MOST_LISTED))
    ids = (i for i in sorted(book.groups) if i > after and (not state or book.groups[i].state == state))
    found = [_record(book, book.groups[group_id], now) for group_id in islice(ids, limit + 1)]
    return m.GroupList(groups=found[:limit], more=len(found) > limit)


def peek(book: Book, group_id: int, now: float) -> m.Peeked | m.Refused:
    """One group with the headers of its finished rows; Refused if it is not here."""
    group = book.groups.get(group_id)
    if group is not None:
        return m.Peeked(group=_record(book, group, now), task=group.task, headers=group.headers())
    letter = book.dead_letters.get(group_id)
    if letter is not None:
        return m.Refused(code="dead_letter", reason=f"group {group_id} is a dead letter: {letter.error}")
    admitted = 0 <= group_id < book.next_group or EVAL_GROUPS <= group_id < book.next_eval_group
    reason = "was trained and retired, dropped, or its evaluation is over" if admitted else "was never admitted"
    return m.Refused(code="unknown_group", reason=f"group {group_id} is not here: it {reason}")


def _record(book: Book, group: Group, now: float) -> m.GroupRecord:
    return m.GroupRecord(
        group_id=group.group_id,
        partition=group.partition,
        state=group.state,
        task_id=group.task.task_id,
        samples=len(group.samples),
        here=sum(sample.here for sample in group.samples),
        workers=sorted({sample.worker for sample in group.samples if sample.worker is not None}),
        age_s=now - book.since[group.group_id],
        nbytes=sum(sample.nbytes for sample in group.samples),
    )


class Rates:
    """Sums for each second of the window, so that the cost does not depend on the traffic."""

    def __init__(self, now: float) -> None:
        self._began = now
        # Oldest first.
        self._seconds: deque[tuple[int, Counter[str]]] = deque()

    def see(self, transition: t.Transition, now: float) -> None:
        """Count the rows or groups of a transition; training groups only."""
        match transition:
            case t.SamplesStored(samples=samples):
                nbytes = [header.nbytes for rows in samples if rows[0].partition == TRAIN for header in rows]
                counts = self._second(now)
                counts["rows"] += len(nbytes)
                counts["bytes"] += sum(nbytes)
            case t.GroupReady(partition=partition) if partition == TRAIN:
                self._second(now)["groups_ready"] += 1
            case t.BatchReserved(groups=groups):
                self._second(now)["groups_reserved"] += len(groups)

    def _second(self, now: float) -> "Counter[str]":
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append((int(now), Counter()))
            self._trim(now)
        return self._seconds[-1][1]

    def _trim(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()

    def per_second(self, now: float) -> dict[str, float]:
        """Rates by name over the last WINDOW_S, or since the beginning if that is shorter; over a second at least."""
        self._trim(now)
        window = max(1.0, min(now - self._began, float(WINDOW_S)))
        total: Counter[str] = Counter()
        for _, counts in self._seconds:
            total.update(counts)
        return {name: total[name] / window for name in NAMES}


class Feed:
    """Hands every transition to every consumer, in order of subscription, before the store continues."""

    def __init__(self, *consumers: Callable[[t.Transition], None]) -> None:
        self._consumers = list(consumers)

    def subscribe(self, consumer: Callable[[t.Transition], None]) -> None:
        """Add a consumer; it sees only later transitions."""
        self._consumers.append(consumer)

    def __call__(self, transition: t.Transition) -> None:
        for consumer in self._consumers:
            consumer(transition)


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
        eval_tasks: Sequence[m.Task],
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
        """Apply a transition and announce it. The state changes in no other way."""
        self._effects[type(transition)](transition)
        self._emit(transition)

    def _batch_committed(self, event: t.BatchCommitted) -> None:
        self.batches.batch_committed(event)
        self.consumers.committed(self.batches.committed_from(self.consumers.logged))

    def _steps_retired(self, event: t.Retired) -> None:
        # First, while the book has the groups.
        self.consumers.retired(event)
        self.batches.steps_retired(event)

    def _rolled_back(self, event: t.RolledBack) -> None:
        self.batches.rolled_back(event)
        self.consumers.rolled_back(event)
        # Group ids are given again after a fresh start.
        if event.fresh:
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
        """Restore a dump, unless it is empty, and apply the transitions after it. Only a new store can.

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
        """Forget leases, engines and shards, and the end of the run: all other processes were started anew."""
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
        """Take back the leases of silent workers. Its calls are the clock of groups' ages."""
        self.book.now = now
        self.delivery.expire(now)
        self.shards.expire(now)

    def task_of(self, group: int) -> m.Task | None:
        """Return the task of a group that has not ended for the trainer or a consumer."""
        found = self.book.groups.get(group)
        return self.consumers.task_of(group) if found is None else found.task

    # --- trainer ----------------------------------------------------------------------------------------------------

    def publish(self, version: m.Version, engines: Sequence[str]) -> m.Done | m.Refused:
        """Record that these engines serve ``version``: slots are freed, and groups are leased under it."""
        before = self.book.published
        answer = self.batches.publish(version)
        if isinstance(answer, m.Done) and self.book.published != before:
            self.engines.published(engines, version)
        return answer

    def retire(self, step: int) -> m.Done | m.Refused:
        """Forget the steps before ``step``, except for groups that consumers have not read."""
        answer = self.batches.retire(step)
        self.consumers.trim()
        return answer

    def resume(self, step: int, lineage: int, snapshot: bytes) -> m.Resumed | m.Refused:
        """Go back to a checkpoint; evaluations of the lost lineage are forgotten."""
        repeated = self.batches.has_resumed(step, lineage)
        answer = self.book.replaced(lineage) or self.batches.resume(step, lineage, snapshot)
        if isinstance(answer, m.Resumed) and not repeated:
            self.evals.close_all()
            self.engines.unpublished()
        return answer

    def finish(self) -> m.Done:
        """End the run: nothing more is admitted or leased."""
        if not self.book.finished:
            self.evals.close_answered()
            self._change(t.RunFinished(left=sorted(group.group_id for group in self.book.untrained())))
        return m.Done()

    def engine_list(self) -> m.EngineList:
        """The registry. Before the first publication of a lineage, ``published`` has step -1."""
        return self.engines.listed(self._published())

    def status(self, now: float) -> m.StatusReport:
        """Counts of training groups, and counters: journaled ones since the run began, others since the start."""
        book = self.book
        return m.StatusReport(
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

    def inspect(self, now: float, rates: dict[str, float]) -> m.Inspection:
        """The status with lists of dead letters, shards, consumers and workers, and the caller's ``rates``."""
        return m.Inspection(
            status=self.status(now),
            group_size=self.book.settings.group_size,
            draining=self.book.draining,
            submitted=len(self.book.submitted),
            oldest_lease=oldest_lease(self.book, now),
            ages_s=oldest_ages(self.book, now),
            rates=rates,
            dead_letters=list(self.book.dead_letters.values()),
            shards=self.shards.list().shards,
            consumers=self.consumers.records(),
            kept_bytes=self.consumers.kept_bytes,
            workers=list_workers(self.book, now),
        )

    def count(self, counter: str) -> None:
        """Add one to an unjournaled counter of the status report."""
        self.book.unjournaled_counters[counter] += 1

    def _published(self) -> m.Version:
        return self.book.published or m.Version(self.book.lineage, -1)
