"""Random histories of workers, trainer, crashes and resumes, checked after every step and driven to the end."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_async.messages import Done, LeasedGroup, NotReady, Refused, Reserved, Resumed, ShardRecord, Task, Version
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.book import EVAL_GROUPS, OpenCounts, State
from rl_async.transfer_queue.delivery import Counted, numbered
from rl_async.transfer_queue.store import Store
from tests.simulation.world import simulate
from tests.support.queue import easy_or_hard
from tests.support.seed import examples
from tests.unit.transfer_queue.history import (
    BATCH,
    LEASE_S,
    STEPS,
    Announced,
    Batches,
    Readers,
    headers,
    queue_settings,
)

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


def test_every_rule_holds_in_some_schedules() -> None:
    struck, broken = simulate(range(examples(300)))
    assert not broken, broken
    assert {"message lost", "message doubled", "journal lost", "trainer killed", "worker killed"} <= struck.keys()
    assert {"trainer frozen", "replaced trainer refused by the queue"} <= struck.keys()
    assert {"queue held up", "slow disk", "worker held up", "machine held up"} <= struck.keys()
    assert {"queue killed: before the flush", "queue killed: after the flush"} <= struck.keys()
