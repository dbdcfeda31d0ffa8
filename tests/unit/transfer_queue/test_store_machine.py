"""Random histories of workers, trainer, crashes and resumes, checked after every step and driven to the end."""

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_async.messages import (
    ConsumerRecord,
    Delivered,
    Done,
    LeasedGroup,
    NotReady,
    Refused,
    Reserved,
    Resumed,
    ShardRecord,
    Subscription,
    Task,
    TrajectoryHeader,
    Version,
    VersionRun,
)
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.book import EVAL_GROUPS, OpenCounts, State
from rl_async.transfer_queue.client import chosen
from rl_async.transfer_queue.delivery import NO_SIGNAL, Counted, numbered
from rl_async.transfer_queue.journal import freed_by
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import (
    Admitted,
    DeadLettered,
    GroupDropped,
    SamplesStored,
    ShardLost,
    Transition,
    TransitionType,
)
from tests.simulation.world import simulate
from tests.support.queue import easy_or_hard, stale, twice
from tests.support.seed import examples

# The model for random histories of the queue: sizes and rows, the batch of each step, and other readers.


STEPS, BATCH, GROUP, LEASE_S = 6, 2, 2, 10.0


@st.composite
def queue_settings(draw: st.DrawFn) -> QueueSettings:
    """Of a short run, with any policy."""
    bound = draw(st.sampled_from([0, 1, 4]))
    return QueueSettings(
        steps=STEPS,
        batch_groups=BATCH,
        group_size=GROUP,
        max_staleness=bound,
        on_straggler=draw(st.sampled_from(["wait", "drop"])),
        lease_s=LEASE_S,
        max_attempts=3,
        max_refills=draw(st.sampled_from([0, 1, 3])),
        replicas=draw(st.sampled_from([0, 1, 2])),
        sampling=draw(st.sampled_from(["fifo", "freshest", "priority", "quota"])),
        slack=min(draw(st.sampled_from([0, 1, 2])), bound),
        window=draw(st.sampled_from([0, 0, BATCH, BATCH + 1])),
        consumer_bytes=draw(st.sampled_from([0, 1000, 1 << 20])),
        weights={"easy": ((0, 1.0),), "hard": ((0, 2.0), (STEPS, 0.0))},
    )


def segments(group_id: int, sample: int) -> int:
    """Rows of a sample: one, or two of every third."""
    return 2 if (group_id + sample) % 3 == 0 else 1


def headers(store: Store, group: LeasedGroup, sample: int, version: Version) -> list[TrajectoryHeader]:
    """Of the rows of a sample of this version's tokens, on the shards that are to keep it."""
    registry = store.shards.list()
    shards = [shard.shard_id for shard in chosen(group.group_id, registry.shards, registry.replicas)]
    return [
        TrajectoryHeader(
            group_id=group.group_id,
            sample=sample,
            attempt=group.attempt,
            partition=group.partition,
            episode_id="",
            segment=segment,
            tokens=1,
            sampled=1,
            reward=float(sample) if group.group_id % 3 == 0 else 1.0,  # two groups of three teach nothing
            scored=group.group_id % 3 < 2,
            finish_reason="stop",
            versions=[VersionRun(version, 0, 1)],
            tokens_hash="",
            nbytes=3,
            shards=shards,
        )
        for segment in range(segments(group.group_id, sample))
    ]


class Announced:
    """All transitions of one queue in order, and what follows from them."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []

    def recorded(self, start: int) -> list[Transition]:
        """Those from ``start`` on, as they come back from a journal."""
        encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
        return [decode(encode(transition), type=TransitionType) for transition in self.transitions[start:]]

    def admitted(self) -> list[Admitted]:
        """Training groups."""
        return [event for event in self.transitions if isinstance(event, Admitted) and event.partition == "train"]

    def tasks(self) -> dict[int, Task]:
        """By group, as they were admitted."""
        return {event.group: event.task for event in self.admitted()}

    def given_up(self) -> list[int]:
        """Groups that were dropped or dead-lettered."""
        return [event.group for event in self.transitions if isinstance(event, GroupDropped | DeadLettered)]

    def refilled(self) -> list[int]:
        """Groups that were dropped for want of signal."""
        dropped = [event for event in self.transitions if isinstance(event, GroupDropped)]
        return [event.group for event in dropped if event.reason == NO_SIGNAL]

    def lost(self) -> set[tuple[int, int]]:
        """Samples that went with their shards: (group, sample)."""
        return {sample for event in self.transitions if isinstance(event, ShardLost) for sample in event.samples}

    def groups_with_rows(self) -> set[int]:
        """What a journal holds."""
        here: set[int] = set()
        for event in self.transitions:
            if isinstance(event, SamplesStored):
                here |= {headers[0].group_id for headers in event.samples}
            freed = freed_by(event)
            here = set() if freed is None else here - set(freed)
        return here


class Batches:
    """Members and rows by step."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.members: dict[int, list[int]] = {}
        self.rows: dict[int, list[TrajectoryHeader]] = {}
        self._saved: dict[int, list[int]] = {}
        self._same_rows = True  # batches seen before come with the same trajectories, not only the same members

    def save(self) -> None:
        """A checkpoint has what was reserved so far."""
        self._saved = dict(self.members)

    def start_over(self) -> None:
        """The queue starts from the checkpoint, which has no rows and nothing of what was reserved later."""
        self.members = dict(self._saved)
        self._same_rows = False

    def reserved(self, step: int, batch: Reserved, tasks: dict[int, Task], seen: Announced) -> None:
        """The batch of a step that is not trained yet."""
        members = sorted({header.group_id for header in batch.headers})
        assert len(members) == BATCH and sorted(batch.tasks) == members
        rows = [(g, s, i) for g in members for s in range(GROUP) for i in range(segments(g, s))]
        assert [header.key for header in batch.headers] == rows
        assert all(task == tasks[group] for group, task in batch.tasks.items())
        for header in batch.headers:
            assert not stale(step, min(run.version.step for run in header.versions), self._bound)
        assert twice({**self.members, step: members}) == []
        assert self.members.setdefault(step, members) == members
        if self._same_rows and step in self.rows:
            self._check_rows(step, batch, seen)
        self.rows[step] = batch.headers

    def reserved_again(self, step: int, batch: Reserved, seen: Announced) -> None:
        """The same question once more, by the same trainer, which has not trained the step."""
        self._check_rows(step, batch, seen)
        self.rows[step] = batch.headers

    def trained_before(self, step: int, batch: Reserved, seen: Announced) -> None:
        """What was lost of a batch that was trained is missing, and nobody needs it."""
        kept = {header.key for header in batch.headers}
        assert all(header.key in kept or header.key[:2] in seen.lost() for header in self.rows[step])

    def _check_rows(self, step: int, batch: Reserved, seen: Announced) -> None:
        """Only what went with a shard comes as another attempt."""
        for old, new in zip(self.rows[step], batch.headers, strict=True):
            assert old == new or ((new.group_id, new.sample) in seen.lost() and new.attempt > old.attempt)


def record(store: Store, name: str) -> ConsumerRecord:
    """What the queue says of a consumer."""
    (found,) = [found for found in store.inspect(0.0, {}).consumers if found.name == name]
    return found


def refused(answer: object, code: str) -> bool:
    """Whether the answer says so."""
    return isinstance(answer, Refused) and answer.code == code


class Readers:
    """Consumers of one queue by name."""

    def __init__(self) -> None:
        self._began: dict[str, int] = {}  # positions
        self._groups: dict[str, list[int]] = {}  # acknowledged, in order

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return sorted(self._began)

    def subscribe(self, store: Store, name: str, oldest: bool) -> None:
        """One more, unless it exists."""
        answer = store.consumers.subscribe(name, oldest)
        assert isinstance(answer, Subscription)
        self._began.setdefault(name, answer.position)
        self._groups.setdefault(name, [])
        assert store.consumers.subscribe(name, not oldest) == answer

    def unsubscribe(self, store: Store, name: str) -> None:
        """One less."""
        del self._began[name], self._groups[name]
        assert store.consumers.unsubscribe(name) == store.consumers.unsubscribe(name) == Done()
        assert refused(store.consumers.read(name, -1, 1), "unknown_consumer")

    def read(
        self,
        store: Store,
        name: str,
        seen: Announced,
        batches: Batches,
        tasks: dict[int, Task],
        *,
        count: int,
        acknowledged: int,
        ahead: int,
    ) -> None:
        """Read ``count`` groups from ``ahead`` of its place on, and acknowledge some of them."""
        position, behind = record(store, name).position, record(store, name).behind
        if ahead > behind:
            assert refused(store.consumers.read(name, position + ahead, count), "bad_position")
        after = position + min(ahead, behind)
        reply = store.consumers.read(name, after, count)
        assert isinstance(reply, Delivered) and len(reply.groups) <= count
        here, lost = seen.groups_with_rows(), seen.lost()
        for place, group in enumerate(reply.groups, start=max(after, position) + 1):
            assert group.position == place and group.group_id in here
            kept = [h for h in batches.rows[group.step] if (h.group_id, h.sample) not in lost]
            kept = [h for h in kept if h.group_id == group.group_id]
            assert [h for h in group.headers if (h.group_id, h.sample) not in lost] == kept
            assert group.task == tasks[group.group_id]
        for group in reply.groups[:acknowledged] if ahead <= 0 else []:
            for _ in range(2):
                assert store.consumers.acknowledge(name, group.position) == Done()
            assert group.group_id not in self._groups[name], "every group comes once"
            self._groups[name].append(group.group_id)

    def read_to_the_end(self, store: Store, name: str, seen: Announced, batches: Batches) -> None:
        """Every group that was trained since it subscribed, and was not given up, has come once."""
        self.miss_only_what_is_counted(store)
        groups = self._groups[name]
        reply = store.consumers.read(name, -1, 1 << 20)
        assert isinstance(reply, Delivered) and {group.group_id for group in reply.groups} <= seen.groups_with_rows()
        groups += [group.group_id for group in reply.groups]
        assert len(groups) == len(set(groups))
        end = record(store, name).position + record(store, name).behind
        assert len(groups) + reply.skipped == end - self._began[name]
        trained = [group for step in range(STEPS) for group in batches.members[step]]
        assert set(groups) <= set(trained) and groups == sorted(groups, key=trained.index)
        since = trained[len(trained) - len(groups) :]
        assert reply.skipped or set(since) == set(groups), "only what was given up is missing"
        if reply.groups:
            assert store.consumers.acknowledge(name, reply.groups[-1].position) == Done()
            assert store.consumers.read(name, -1, 1) == Delivered(groups=[], skipped=reply.skipped)
        assert refused(store.consumers.acknowledge(name, STEPS * BATCH + 1), "bad_position")

    def miss_only_what_is_counted(self, store: Store) -> None:
        """What holds at any time."""
        for name in self.names:
            found = record(store, name)
            assert found.position == self._began[name] + len(self._groups[name]) + found.skipped and found.behind >= 0


WORKERS = ["a", "b"]


class Histories(RuleBasedStateMachine):
    """The model: what workers hold and what the trainer did; ``Batches`` and ``Readers`` know what they must get."""

    @initialize(of_run=queue_settings(), logged=st.booleans())
    def start(self, of_run: QueueSettings, logged: bool) -> None:
        self.settings = of_run
        self.now = 0.0
        self.started = 0  # shards
        self.lineage = 0
        self.step = 0  # the next one to train
        self.reserved_until = 0
        self.retired = 0
        self.batches = Batches(of_run.max_staleness)
        self.checkpoint = (0, b"")
        self.seen = Announced()
        self.tasks: dict[int, Task] = {}  # of training groups, as they were admitted
        self.made = 0  # tasks that producers made
        self.open_queue()
        self.publish()
        if logged:
            self.subscribe("logger", True)

    def open_queue(self) -> None:
        self.learn_tasks()
        self.seen = Announced()
        self.dumped = (b"", 0)  # a dump, and how many transitions came before it
        self.requests = 0
        self.refills = 0  # groups given up for want of signal since a batch was complete
        self.held: list[tuple[str, LeasedGroup, int]] = []
        self.readers = Readers()
        self.store = self.new_store()
        self.start_shards()

    def new_store(self) -> Store:
        self.source = Counted(easy_or_hard)
        return Store(self.settings, self.source, [numbered(0)], self.seen.transitions.append)

    @rule(compact=st.booleans())
    def queue_is_killed(self, compact: bool) -> None:
        """Another takes its place, from what was recorded: a dump, if there was one, and what came later."""
        before = self.store.dump()
        if compact:
            self.dumped = (before, len(self.seen.transitions))
        dump, count = self.dumped
        taken = self.source.taken
        self.store = self.new_store()
        self.store.recover(dump, self.seen.recorded(count), self.now)
        assert self.store.dump() == before
        assert self.source.taken == taken

    # --- payload shards ---------------------------------------------------------------------------------------------

    def start_shards(self) -> None:
        """Those that are missing."""
        if self.settings.replicas:
            names = {shard.name for shard in self.store.shards.list().shards}
            for name in sorted({"x", "y", "z"} - names):
                self.start_shard(name)

    def start_shard(self, name: str) -> None:
        self.started += 1
        record = ShardRecord(shard_id=f"{name}{self.started}", name=name, url="")
        for _ in range(2):
            assert self.store.shards.register(record, self.now) == Done()

    @precondition(lambda self: self.settings.replicas)
    @rule(names=st.sets(st.sampled_from("xyz"), min_size=1))
    def shards_are_killed(self, names: set[str]) -> None:
        """They start again with nothing, one after another."""
        for name in sorted(names):
            self.start_shard(name)

    @precondition(lambda self: self.settings.replicas)
    @rule()
    def shards_are_silent(self) -> None:
        """All are given up, and then come back."""
        for worker in WORKERS:
            self.store.delivery.renew(worker, self.now + LEASE_S)
        self.now += LEASE_S
        self.store.expire(self.now)
        assert self.store.shards.list().shards == []
        self.start_shards()

    def publish(self) -> None:
        self.published = Version(self.lineage, self.step)
        assert self.store.publish(self.published, []) == Done()

    def learn_tasks(self) -> None:
        self.tasks |= self.seen.tasks()

    # --- tasks of producers, and people -----------------------------------------------------------------------------

    def make_task(self) -> Task:
        self.made += 1
        return numbered(1000 + self.made)

    @rule(count=st.integers(1, 3))
    def submit(self, count: int) -> None:
        tasks, request = [self.make_task() for _ in range(count)], self.new_request()
        for _ in range(2):
            assert self.store.tasks.submit(tasks, request) == Done()

    @rule(worker=st.sampled_from(WORKERS))
    def bring_a_task(self, worker: str) -> None:
        task = self.make_task()
        self.store.delivery.renew(worker, self.now)
        for group in self.store.delivery.lease(worker, 1, self.now, self.new_request(), task).groups:
            assert group.task == task
            self.held += [(worker, group, sample) for sample in group.samples]

    @rule(last=st.booleans())
    def requeue(self, last: bool) -> None:
        letters = self.store.inspect(self.now, {}).dead_letters
        if letters:
            request, group = self.new_request(), letters[-1 if last else 0].group_id
            answer = self.store.tasks.requeue(group, request)
            if answer == Done():
                assert self.store.tasks.requeue(group, request) == Done()
            else:
                assert isinstance(answer, Refused) and answer.code == "too_late"

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        admitted = self.store.status(self.now).admitted
        assert self.store.tasks.drain(on) == Done()
        self.lease("a", 2)
        assert not on or self.store.status(self.now).admitted == admitted

    # --- workers ----------------------------------------------------------------------------------------------------

    def new_request(self) -> bytes:
        self.requests += 1
        return self.requests.to_bytes(8, "big")

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4), crash=st.booleans())
    def lease(self, worker: str, count: int, crash: bool = False) -> None:
        """Also by a worker that did not get the answer before the queue was killed, and asks again."""
        self.store.delivery.renew(worker, self.now)
        request = self.new_request()
        groups = self.store.delivery.lease(worker, count, self.now, request).groups
        if crash and groups:
            self.queue_is_killed(compact=False)
            assert self.store.delivery.lease(worker, count, self.now, request).groups == groups
        for group in groups:
            assert group.min_version == self.published
            self.held += [(worker, group, sample) for sample in group.samples]

    @rule(count=st.integers(1, 4))
    def lease_that_reaches_nobody(self, count: int) -> None:
        self.store.delivery.renew("gone", self.now)
        request = self.new_request()
        groups = self.store.delivery.lease("gone", count, self.now, request).groups
        assert self.store.delivery.lease("gone", count, self.now, request).groups == groups
        for _ in range(2):
            self.store.delivery.undelivered(request)
        assert not self.store.delivery.grants.get(request)

    def put_sample(self, worker: str, group: LeasedGroup, sample: int, oldest: int) -> Done | Refused:
        # Engines serve what was published last; it is older than the lease promised if training went back since.
        first, last = sorted((group.min_version.step, self.published.step))
        version = Version(self.lineage, min(max(oldest, first), last))
        return self.store.delivery.put(worker, headers(self.store, group, sample, version), self.now)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), oldest=st.integers(0, STEPS), again=st.booleans())
    def put(self, data: st.DataObject, oldest: int, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        worker, group, sample = self.held[index] if again else self.held.pop(index)
        answer = self.put_sample(worker, group, sample, oldest)
        if answer == Done():
            resent = self.put_sample(worker, group, sample, oldest)
            dropped = group.group_id not in self.store.book.groups
            assert resent.code == "fenced" if isinstance(resent, Refused) else not dropped
        else:
            assert isinstance(answer, Refused) and answer.code in {"fenced", "conflict"}

    @rule(stragglers=st.integers(0, 2), newest=st.booleans())
    def a_step_passes(self, stragglers: int, newest: bool) -> None:
        """Everything is generated but the oldest groups, and a step is trained if that is enough."""
        self.lease("a", 100)
        left = sorted({group.group_id for _, group, _ in self.held})[:stragglers]
        for held in [held for held in self.held if held[1].group_id not in left]:
            self.held.remove(held)
            self.put_sample(*held, STEPS if newest else 0)
        self.reserve()
        self.train()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        worker, group, sample = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.store.delivery.fail(worker, group.group_id, sample, group.attempt, "boom", self.now)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]), alive=st.sets(st.sampled_from(WORKERS)))
    def time_passes(self, seconds: float, alive: set[str]) -> None:
        self.now += seconds
        for worker in alive:
            self.store.delivery.renew(worker, self.now)
        for shard in self.store.shards.list().shards:
            self.store.shards.hear(shard.shard_id, self.now)
        self.store.expire(self.now)

    @rule(eval_id=st.integers(0, 3))
    def evaluate(self, eval_id: int) -> None:
        assert self.store.evals.open(eval_id) == Done()
        self.store.evals.result(eval_id)

    # --- trainer ----------------------------------------------------------------------------------------------------

    @rule()
    def reserve(self) -> None:
        if self.reserved_until >= STEPS:
            return
        batch = self.store.batches.reserve(self.reserved_until, self.now)
        if isinstance(batch, Reserved):
            self.learn_tasks()
            self.batches.reserved(self.reserved_until, batch, self.tasks, self.seen)
            self.reserved_until += 1
            self.refills = len(self.seen.refilled())

    @precondition(lambda self: self.retired < self.reserved_until)
    @rule(data=st.data())
    def reserve_again(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.retired, self.reserved_until - 1))
        batch = self.store.batches.reserve(step, self.now)
        if isinstance(batch, NotReady):
            assert any(header.key[:2] in self.seen.lost() for header in self.batches.rows[step])
            return
        assert isinstance(batch, Reserved)
        if step < self.step:
            self.batches.trained_before(step, batch, self.seen)
        else:
            self.batches.reserved_again(step, batch, self.seen)

    @rule()
    def train(self) -> None:
        if self.step < self.reserved_until:
            assert self.store.batches.commit(self.step) == Done()
            self.step += 1
            self.publish()

    @rule(bound=st.integers(0, 4))
    def tighten(self, bound: int) -> None:
        assert self.store.batches.tighten(bound) == Done()

    @rule()
    def save_checkpoint(self) -> None:
        self.checkpoint = (self.step, self.store.batches.snapshot())
        self.batches.save()
        assert self.store.retire(self.step) == Done()
        self.retired = self.step

    @rule()
    def trainer_crashes(self) -> None:
        self.lineage += 1
        self.step, snapshot = self.checkpoint
        self.reserved_until = self.step
        assert isinstance(self.store.resume(self.step, self.lineage, snapshot), Resumed)
        self.store.delivery.renew("a", self.now)
        assert self.store.delivery.lease("a", 9, self.now).groups == []
        self.publish()

    @precondition(lambda self: self.checkpoint[1])
    @rule()
    def trainer_and_queue_crash(self) -> None:
        self.lineage += 1
        self.step, snapshot = self.checkpoint
        self.reserved_until = self.retired = self.step
        self.open_queue()
        answer = self.store.resume(self.step, self.lineage, snapshot)
        assert isinstance(answer, Resumed)
        self.start_shards()  # a queue that starts afresh has none
        self.batches.start_over()
        self.publish()

    # --- other readers ----------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["logger", "evaluator"]), oldest=st.booleans())
    def subscribe(self, name: str, oldest: bool) -> None:
        self.readers.subscribe(self.store, name, oldest)

    @precondition(lambda self: self.readers.names)
    @rule(data=st.data(), count=st.integers(1, 5), acknowledged=st.integers(0, 5), ahead=st.integers(-1, 2))
    def read(self, data: st.DataObject, **how: int) -> None:
        name = data.draw(st.sampled_from(self.readers.names))
        self.readers.read(self.store, name, self.seen, self.batches, self.tasks, **how)

    @precondition(lambda self: self.readers.names)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        self.readers.unsubscribe(self.store, data.draw(st.sampled_from(self.readers.names)))

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def slots_are_never_exceeded(self) -> None:
        if not hasattr(self, "store"):
            return
        status = self.store.status(self.now)
        if self.lineage == 0:
            assert status.slots_used <= status.slots
        assert min(status.waiting, status.leased, status.ready, status.reserved, status.payload_bytes) >= 0
        assert status.waiting + status.leased + status.ready + status.reserved <= status.slots_used
        admitted = [event.group for event in self.seen.admitted()]
        assert len(admitted) == len(set(admitted))
        assert len(admitted) - len(self.seen.given_up()) <= STEPS * BATCH
        refilled = self.seen.refilled()
        assert all(group % 3 and group < EVAL_GROUPS for group in refilled), "a group with signal, or an evaluation's"
        assert len(refilled) - self.refills <= self.settings.refill_allowance
        assert status.counters.get("refilled", 0) == len(refilled)
        fixed = {
            group for step, groups in self.batches.members.items() if step < self.reserved_until for group in groups
        }
        assert not fixed & set(refilled)

    @invariant()
    def counts_of_open_groups_are_those_of_the_groups(self) -> None:
        """And where they say that a step is short, the walk over the groups finds no batch, for the same reason."""
        if not hasattr(self, "store"):
            return
        book, batches = self.store.book, self.store.batches
        counted = OpenCounts()
        for group in book.open.values():
            counted.count(group, 1)
        assert vars(book.open_counts) == vars(counted)
        step = batches.dump().next_step
        if batches.is_short(step):
            walked = batches._members(step, self.now)
            assert isinstance(walked, NotReady)
            if book.count(State.READY) >= BATCH:
                assert walked == batches.reserve(step, self.now)

    @invariant()
    def the_shelf_is_in_the_order_of_training(self) -> None:
        if hasattr(self, "store"):
            consumers = self.store.consumers
            places = [consumers._places[group] for group in consumers._shelf]
            assert places == sorted(places)

    @invariant()
    def consumers_miss_only_what_is_counted(self) -> None:
        if not hasattr(self, "store"):
            return
        self.readers.miss_only_what_is_counted(self.store)
        report = self.store.inspect(self.now, {})
        assert 0 <= report.kept_bytes <= self.settings.consumer_bytes
        assert report.kept_bytes == 0 or any(record.behind for record in report.consumers)

    def teardown(self) -> None:
        """An honest worker finishes the run: nothing is lost, nothing is left over."""
        if not hasattr(self, "store"):
            return
        self.store.tasks.drain(False)
        for _ in range(4 * STEPS + self.settings.refill_allowance + STEPS * self.settings.max_refills):
            if self.step == STEPS:
                break
            self.now += 2 * LEASE_S
            self.store.expire(self.now)
            self.start_shards()
            self.held = []
            self.lease("z", 100)
            for worker, group, sample in self.held:
                assert self.put_sample(worker, group, sample, STEPS) == Done()
            self.reserve()
            self.train()
        assert self.step == STEPS, self.store.batches.reserve(self.reserved_until, self.now)
        status = self.store.status(self.now)
        assert (status.slots_used, status.waiting, status.leased, status.ready, status.reserved) == (0, 0, 0, 0, 0)
        assert sorted(self.batches.members) == list(range(STEPS))
        assert self.store.retire(STEPS) == Done()
        for name in self.readers.names:
            self.readers.read_to_the_end(self.store, name, self.seen, self.batches)
        assert self.store.inspect(self.now, {}).kept_bytes == 0, "everybody has read everything"
        for name in self.readers.names:
            self.readers.unsubscribe(self.store, name)
        assert all(group >= EVAL_GROUPS for group in self.seen.groups_with_rows())
        self.store.evals.open(1000)


# A history that breaks a rule is made small before it is shown, which takes minutes.
TestHistories = pytest.mark.timeout(600)(Histories.TestCase)
TestHistories.settings = settings(
    max_examples=examples(150), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.examples
def test_every_rule_holds_in_some_schedules() -> None:
    struck, broken = simulate(range(examples(300)))
    assert not broken, broken
    assert {"message lost", "message doubled", "journal lost", "trainer killed", "worker killed"} <= struck.keys()
    assert {"trainer frozen", "replaced trainer refused by the queue"} <= struck.keys()
    assert {"queue held up", "slow disk", "worker held up", "machine held up"} <= struck.keys()
    assert {"queue killed: before the flush", "queue killed: after the flush"} <= struck.keys()
