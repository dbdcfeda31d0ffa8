"""Random histories of workers, trainer, crashes and resumes, checked after every step and driven to the end."""

from typing import Any

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
from rl_async.transfer_queue.conversations import chosen
from rl_async.transfer_queue.delivery import NO_SIGNAL
from rl_async.transfer_queue.groups import EVAL_GROUPS
from rl_async.transfer_queue.payloads import freed_by
from rl_async.transfer_queue.policy import QueueSettings
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import (
    Admitted,
    DeadLettered,
    GroupDropped,
    SampleStored,
    ShardLost,
    Transition,
    TransitionType,
)

EVAL_TASK = Task(task_id="e0", data_source="", prompt=[], ground_truth="")
STEPS, BATCH, GROUP, LEASE_S = 6, 2, 2, 10.0
WORKERS = ["a", "b"]


class Source:
    def __init__(self) -> None:
        self.taken = 0

    def next(self, step: int = 0) -> Task:
        self.taken += 1
        number = self.taken - 1
        source = "easy" if number % 3 else "hard"
        return Task(
            task_id=f"t{number}",
            data_source="",
            prompt=[],
            ground_truth="",
            priority=float(number * 7 % 5),
            source=source,
        )

    def cursor(self) -> bytes:
        return str(self.taken).encode()

    def seek(self, cursor: bytes) -> None:
        self.taken = int(cursor)


def recorded(transition: Transition) -> Transition:
    """As it comes back from a journal."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(transition), type=TransitionType)


def segments(group_id: int, sample: int) -> int:
    return 2 if (group_id + sample) % 3 == 0 else 1


class Histories(RuleBasedStateMachine):
    """The model: what workers hold, what each step's batch was, and what the trainer did."""

    @initialize(
        bound=st.sampled_from([0, 1, 4]),
        policy=st.sampled_from(["wait", "drop"]),
        refills=st.sampled_from([0, 1, 3]),
        replicas=st.sampled_from([0, 1, 2]),
        sampling=st.sampled_from(["fifo", "freshest", "priority", "quota"]),
        window=st.sampled_from([0, 0, BATCH, BATCH + 1]),
        consumer_bytes=st.sampled_from([0, 1000, 1 << 20]),
        logged=st.booleans(),
        slack=st.sampled_from([0, 1, 2]),
    )
    def start(
        self,
        bound: int,
        policy: Any,
        refills: int,
        replicas: int,
        sampling: Any,
        window: int,
        consumer_bytes: int,
        logged: bool,
        slack: int,
    ) -> None:
        self.settings = QueueSettings(
            steps=STEPS,
            batch_groups=BATCH,
            group_size=GROUP,
            max_staleness=bound,
            on_straggler=policy,
            lease_s=LEASE_S,
            max_attempts=3,
            max_refills=refills,
            replicas=replicas,
            sampling=sampling,
            slack=min(slack, bound),
            window=window,
            consumer_bytes=consumer_bytes,
            weights={"easy": ((0, 1.0),), "hard": ((0, 2.0), (STEPS, 0.0))},
        )
        self.now = 0.0
        self.started = 0  # shards
        self.lineage = 0
        self.step = 0  # the next one to train
        self.reserved_until = 0
        self.retired = 0
        self.batches: dict[int, list[int]] = {}
        self.rows: dict[int, list[TrajectoryHeader]] = {}
        self.same_rows = True  # batches seen before come with the same trajectories, not only the same members
        self.checkpoint = (0, b"")
        self.seen: list[Any] = []
        self.tasks: dict[int, Task] = {}  # of training groups, as they were admitted
        self.made = 0  # tasks that producers made
        self.open_queue()
        self.publish()
        if logged:
            self.subscribe("logger", True)

    def open_queue(self) -> None:
        self.learn_tasks()
        self.seen = []
        self.dumped = (b"", 0)  # a dump, and how many transitions came before it
        self.requests = 0
        self.refills = 0  # groups given up for want of signal since a batch was complete
        self.held: list[tuple[str, LeasedGroup, int]] = []
        self.readers: dict[str, list[int]] = {}  # by name: where it began, and what it acknowledged
        self.store = self.new_store()
        self.start_shards()

    def new_store(self) -> Store:
        self.source = Source()
        return Store(self.settings, self.source, [EVAL_TASK], self.seen.append)

    @rule(compact=st.booleans())
    def queue_is_killed(self, compact: bool) -> None:
        """Another takes its place, from what was recorded: a dump, if there was one, and what came later."""
        before = self.store.dump()
        if compact:
            self.dumped = (before, len(self.seen))
        dump, count = self.dumped
        taken = self.source.taken
        self.store = self.new_store()
        self.store.recover(dump, [recorded(transition) for transition in self.seen[count:]], self.now)
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
            self.store.renew(worker, self.now + LEASE_S)
        self.now += LEASE_S
        self.store.expire(self.now)
        assert self.store.shards.list().shards == []
        self.start_shards()

    def lost(self) -> set[tuple[int, int]]:
        return {sample for event in self.seen if isinstance(event, ShardLost) for sample in event.samples}

    def publish(self) -> None:
        self.published = Version(self.lineage, self.step)
        assert self.store.publish(self.published, []) == Done()

    def learn_tasks(self) -> None:
        self.tasks |= {event.group: event.task for event in self.seen if isinstance(event, Admitted)}

    # --- tasks of producers, and people -----------------------------------------------------------------------------

    def make_task(self) -> Task:
        self.made += 1
        return Task(task_id=f"made{self.made}", data_source="", prompt=[], ground_truth="")

    @rule(count=st.integers(1, 3))
    def submit(self, count: int) -> None:
        tasks, request = [self.make_task() for _ in range(count)], self.new_request()
        for _ in range(2):
            assert self.store.submit(tasks, request) == Done()

    @rule(worker=st.sampled_from(WORKERS))
    def bring_a_task(self, worker: str) -> None:
        task = self.make_task()
        self.store.renew(worker, self.now)
        for group in self.store.lease(worker, 1, self.now, self.new_request(), task).groups:
            assert group.task == task
            self.held += [(worker, group, sample) for sample in group.samples]

    @rule(last=st.booleans())
    def requeue(self, last: bool) -> None:
        letters = self.store.inspect(self.now, {}).dead_letters
        if letters:
            request, group = self.new_request(), letters[-1 if last else 0].group_id
            answer = self.store.requeue(group, request)
            if answer == Done():
                assert self.store.requeue(group, request) == Done()
            else:
                assert isinstance(answer, Refused) and answer.code == "too_late"

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        admitted = self.store.status(self.now).admitted
        assert self.store.drain(on) == Done()
        self.lease("a", 2)
        assert not on or self.store.status(self.now).admitted == admitted

    # --- workers ----------------------------------------------------------------------------------------------------

    def new_request(self) -> bytes:
        self.requests += 1
        return self.requests.to_bytes(8, "big")

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4), crash=st.booleans())
    def lease(self, worker: str, count: int, crash: bool = False) -> None:
        """Also by a worker that did not get the answer before the queue was killed, and asks again."""
        self.store.renew(worker, self.now)
        request = self.new_request()
        groups = self.store.lease(worker, count, self.now, request).groups
        if crash and groups:
            self.queue_is_killed(compact=False)
            assert self.store.lease(worker, count, self.now, request).groups == groups
        for group in groups:
            assert group.min_version == self.published
            self.held += [(worker, group, sample) for sample in group.samples]

    @rule(count=st.integers(1, 4))
    def lease_that_reaches_nobody(self, count: int) -> None:
        self.store.renew("gone", self.now)
        request = self.new_request()
        groups = self.store.lease("gone", count, self.now, request).groups
        assert self.store.lease("gone", count, self.now, request).groups == groups
        for _ in range(2):
            self.store.undelivered(request)
        assert not self.store.granted(request)

    def headers(self, group: LeasedGroup, sample: int, oldest: int) -> list[TrajectoryHeader]:
        """One row, or two of every third sample; each on the shards that are to keep it."""
        registry = self.store.shards.list()
        shards = [shard.shard_id for shard in chosen(group.group_id, registry.shards, registry.replicas)]
        count = segments(group.group_id, sample)
        headers = [self.header(group, sample, oldest, segment) for segment in range(count)]
        return [msgspec.structs.replace(header, shards=shards) for header in headers]

    def header(self, group: LeasedGroup, sample: int, oldest: int, segment: int) -> TrajectoryHeader:
        # Engines serve what was published last; it is older than the lease promised if training went back since.
        first, last = sorted((group.min_version.step, self.published.step))
        step = min(max(oldest, first), last)
        return TrajectoryHeader(
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
            versions=[VersionRun(Version(self.lineage, step), 0, 1)],
            tokens_sha256="",
            nbytes=3,
        )

    @precondition(lambda self: self.held)
    @rule(data=st.data(), oldest=st.integers(0, STEPS), again=st.booleans())
    def put(self, data: st.DataObject, oldest: int, again: bool) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        worker, group, sample = self.held[index] if again else self.held.pop(index)
        headers = self.headers(group, sample, oldest)
        answer = self.store.put(worker, headers, self.now)
        if answer == Done():
            resent = self.store.put(worker, headers, self.now)
            dropped = self.store.holds(group.group_id) is False
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
            self.store.put(held[0], self.headers(held[1], held[2], STEPS if newest else 0), self.now)
        self.reserve()
        self.train()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        worker, group, sample = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.store.fail(worker, group.group_id, sample, group.attempt, "boom", self.now)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]), alive=st.sets(st.sampled_from(WORKERS)))
    def time_passes(self, seconds: float, alive: set[str]) -> None:
        self.now += seconds
        for worker in alive:
            self.store.renew(worker, self.now)
        for shard in self.store.shards.list().shards:
            self.store.shards.hear(shard.shard_id, self.now)
        self.store.expire(self.now)

    @rule(eval_id=st.integers(0, 3))
    def evaluate(self, eval_id: int) -> None:
        assert self.store.evaluate(eval_id) == Done()
        self.store.eval_result(eval_id)

    # --- trainer ----------------------------------------------------------------------------------------------------

    @rule()
    def reserve(self) -> None:
        if self.reserved_until >= STEPS:
            return
        batch = self.store.reserve(self.reserved_until, self.now)
        if isinstance(batch, Reserved):
            self.check_batch(self.reserved_until, batch)
            self.reserved_until += 1
            self.refills = len(self.refilled())

    def refilled(self) -> list[int]:
        return [event.group for event in self.seen if isinstance(event, GroupDropped) and event.reason == NO_SIGNAL]

    def check_batch(self, step: int, batch: Reserved) -> None:
        members = sorted({header.group_id for header in batch.headers})
        assert len(members) == BATCH and sorted(batch.tasks) == members
        rows = [(g, s, i) for g in members for s in range(GROUP) for i in range(segments(g, s))]
        assert [header.key for header in batch.headers] == rows
        self.learn_tasks()
        assert all(task == self.tasks[group] for group, task in batch.tasks.items())
        for header in batch.headers:
            assert step - min(run.version.step for run in header.versions) <= self.settings.max_staleness
        earlier = [group for at, groups in self.batches.items() if at != step for group in groups]
        assert not set(members) & set(earlier), "a group in two batches"
        assert self.batches.setdefault(step, members) == members
        if self.same_rows:
            self.check_same_rows(self.rows.setdefault(step, batch.headers), batch.headers)
        self.rows[step] = batch.headers

    def check_same_rows(self, before: list[TrajectoryHeader], now: list[TrajectoryHeader]) -> None:
        """Only what went with a shard comes as another attempt."""
        for old, new in zip(before, now, strict=True):
            assert old == new or ((new.group_id, new.sample) in self.lost() and new.attempt > old.attempt)

    @precondition(lambda self: self.retired < self.reserved_until)
    @rule(data=st.data())
    def reserve_again(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.retired, self.reserved_until - 1))
        batch = self.store.reserve(step, self.now)
        if isinstance(batch, NotReady):
            assert any(header.key[:2] in self.lost() for header in self.rows[step])
            return
        assert isinstance(batch, Reserved)
        if step < self.step:  # trained: what was lost is missing, and nobody needs it
            kept = {header.key for header in batch.headers}
            assert all(header.key in kept or header.key[:2] in self.lost() for header in self.rows[step])
            return
        self.check_same_rows(self.rows[step], batch.headers)
        self.rows[step] = batch.headers

    @rule()
    def train(self) -> None:
        if self.step < self.reserved_until:
            assert self.store.commit(self.step) == Done()
            self.step += 1
            self.publish()

    @rule(bound=st.integers(0, 4))
    def tighten(self, bound: int) -> None:
        assert self.store.tighten(bound) == Done()

    @rule()
    def save_checkpoint(self) -> None:
        self.checkpoint = (self.step, self.store.snapshot())
        self.checkpoint_batches = dict(self.batches)
        assert self.store.retire(self.step) == Done()
        self.retired = self.step

    @rule()
    def trainer_crashes(self) -> None:
        self.lineage += 1
        self.step, snapshot = self.checkpoint
        self.reserved_until = self.step
        assert isinstance(self.store.resume(self.step, self.lineage, snapshot), Resumed)
        self.store.renew("a", self.now)
        assert self.store.lease("a", 9, self.now).groups == []
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
        self.batches = dict(self.checkpoint_batches)  # what was reserved later is not in the checkpoint
        self.same_rows = False
        self.publish()

    # --- other readers ----------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["logger", "evaluator"]), oldest=st.booleans())
    def subscribe(self, name: str, oldest: bool) -> None:
        answer = self.store.subscribe(name, oldest)
        assert isinstance(answer, Subscription)
        self.readers.setdefault(name, [answer.position])
        assert self.store.subscribe(name, not oldest) == answer

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), count=st.integers(1, 5), acknowledged=st.integers(0, 5), ahead=st.integers(-1, 2))
    def read(self, data: st.DataObject, count: int, acknowledged: int, ahead: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        position, behind = self.consumer(name).position, self.consumer(name).behind
        if ahead > behind:
            assert self.store.read(name, position + ahead, count).code == "bad_position"  # type: ignore[union-attr]
        after = position + min(ahead, behind)
        reply = self.store.read(name, after, count)
        assert isinstance(reply, Delivered) and len(reply.groups) <= count
        here = self.groups_with_rows()
        for place, group in enumerate(reply.groups, start=max(after, position) + 1):
            assert group.position == place and group.group_id in here
            kept = [h for h in self.rows[group.step] if (h.group_id, h.sample) not in self.lost()]
            kept = [h for h in kept if h.group_id == group.group_id]
            assert [h for h in group.headers if (h.group_id, h.sample) not in self.lost()] == kept
            assert group.task == self.tasks[group.group_id]
        for group in reply.groups[:acknowledged] if ahead <= 0 else []:
            for _ in range(2):
                assert self.store.acknowledge(name, group.position) == Done()
            assert group.group_id not in self.readers[name][1:], "every group comes once"
            self.readers[name].append(group.group_id)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.readers)))
        del self.readers[name]
        assert self.store.unsubscribe(name) == self.store.unsubscribe(name) == Done()
        assert isinstance(self.store.read(name, -1, 1), Refused)

    def read_to_the_end(self, name: str) -> None:
        """Every group that was trained since it subscribed, and was not given up, has come once."""
        self.consumers_miss_only_what_is_counted()
        began, *groups = self.readers[name]
        reply = self.store.read(name, -1, 1 << 20)
        assert isinstance(reply, Delivered) and {group.group_id for group in reply.groups} <= self.groups_with_rows()
        groups += [group.group_id for group in reply.groups]
        self.readers[name] = [began, *groups]
        assert len(groups) == len(set(groups))
        assert len(groups) + reply.skipped == self.consumer(name).position + self.consumer(name).behind - began
        trained = [group for step in range(STEPS) for group in self.batches[step]]
        assert set(groups) <= set(trained) and groups == sorted(groups, key=trained.index)
        since = trained[len(trained) - len(groups) :]
        assert reply.skipped or set(since) == set(groups), "only what was given up is missing"
        if reply.groups:
            assert self.store.acknowledge(name, reply.groups[-1].position) == Done()
            assert self.store.read(name, -1, 1) == Delivered(groups=[], skipped=reply.skipped)

    def consumer(self, name: str) -> ConsumerRecord:
        (record,) = [record for record in self.store.inspect(self.now, {}).consumers if record.name == name]
        return record

    def groups_with_rows(self) -> set[int]:
        """What a journal holds."""
        here: set[int] = set()
        for event in self.seen:
            if isinstance(event, SampleStored):
                here.add(event.headers[0].group_id)
            freed = freed_by(event)
            here = set() if freed is None else here - set(freed)
        return here

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
        given_up = len([event for event in self.seen if isinstance(event, GroupDropped | DeadLettered)])
        admitted = [event.group for event in self.seen if isinstance(event, Admitted) and event.partition == "train"]
        assert len(admitted) == len(set(admitted))
        assert len(admitted) - given_up <= STEPS * BATCH
        refilled = self.refilled()
        assert all(group % 3 and group < EVAL_GROUPS for group in refilled), "a group with signal, or an evaluation's"
        assert len(refilled) - self.refills <= self.settings.refill_allowance
        assert status.counters.get("refilled", 0) == len(refilled)
        fixed = {group for step, groups in self.batches.items() if step < self.reserved_until for group in groups}
        assert not fixed & set(refilled)

    @invariant()
    def consumers_miss_only_what_is_counted(self) -> None:
        if not hasattr(self, "store"):
            return
        for name, (began, *groups) in self.readers.items():
            record = self.consumer(name)
            assert record.position == began + len(groups) + record.skipped and record.behind >= 0
        report = self.store.inspect(self.now, {})
        assert 0 <= report.kept_bytes <= self.settings.consumer_bytes
        assert report.kept_bytes == 0 or any(record.behind for record in report.consumers)

    def teardown(self) -> None:
        """An honest worker finishes the run: nothing is lost, nothing is left over."""
        if not hasattr(self, "store"):
            return
        self.store.drain(False)
        for _ in range(4 * STEPS + self.settings.refill_allowance + STEPS * self.settings.max_refills):
            if self.step == STEPS:
                break
            self.now += 2 * LEASE_S
            self.store.expire(self.now)
            self.start_shards()
            self.held = []
            self.lease("z", 100)
            for worker, group, sample in self.held:
                assert self.store.put(worker, self.headers(group, sample, STEPS), self.now) == Done()
            self.reserve()
            self.train()
        assert self.step == STEPS, self.store.reserve(self.reserved_until, self.now)
        status = self.store.status(self.now)
        assert (status.slots_used, status.waiting, status.leased, status.ready, status.reserved) == (0, 0, 0, 0, 0)
        assert sorted(self.batches) == list(range(STEPS))
        assert self.store.retire(STEPS) == Done()
        for name in self.readers:
            self.read_to_the_end(name)
            assert self.store.acknowledge(name, STEPS * BATCH + 1).code == "bad_position"  # type: ignore[union-attr]
        for name in self.readers:
            self.store.unsubscribe(name)
        assert self.store.inspect(self.now, {}).kept_bytes == 0
        assert all(group >= EVAL_GROUPS for group in self.groups_with_rows())
        self.store.evaluate(1000)


# A history that breaks a rule is made small before it is shown, which takes minutes.
TestHistories = pytest.mark.timeout(600)(Histories.TestCase)
TestHistories.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
