"""The store: its verbs, listings for people, and whether anybody plays."""

import math

import pytest

from rl_async.configs.schema.algorithm import AlgorithmConfig, ShapingConfig
from rl_async.configs.schema.data import CurriculumConfig, DataConfig, ModelConfig
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.errors import DataError
from rl_async.messages import (
    FAILED,
    Done,
    GroupList,
    LeaseRecord,
    NotReady,
    Peeked,
    Refused,
    Reserved,
    Resumed,
    Version,
)
from rl_async.transfer_queue import delivery, store
from rl_async.transfer_queue.admission import QueueSettings, passed_over
from rl_async.transfer_queue.book import DEAD_LETTERS_KEPT, ERROR_SHOWN, EVAL_GROUPS
from rl_async.transfer_queue.delivery import MOST_CAUSES, MOST_SUBMITTED, NO_SIGNAL, GrowingTaskList, TaskList
from rl_async.transfer_queue.store import HEARD_S, REMEMBERED, Attendance, Rates
from rl_async.transfer_queue.transitions import (
    Admitted,
    BatchReserved,
    DeadLettered,
    GroupDropped,
    GroupReady,
    LeaseLost,
    Requeued,
    SamplesStored,
    Submitted,
    Tightened,
)
from rl_async.transfer_queue.wire import SHARD_LOST
from tests.unit.transfer_queue.conftest import Rig, members, task, train_step


def test_nothing_is_leased_before_the_first_publication(make_rig):
    rig = make_rig()
    assert rig.lease() == [] and rig.source.taken == 0
    rig.publish(0)
    assert [group.group_id for group in rig.lease()] == [0, 1, 2, 3]


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_slots_bound_what_is_admitted(make_rig, bound):
    rig = make_rig(max_staleness=bound)
    rig.publish(0)
    assert len(rig.lease()) == (bound + 1) * 2
    assert rig.store.status(0.0).slots_used == rig.store.status(0.0).slots == (bound + 1) * 2


def test_a_tightened_bound_admits_less_until_it_is_loosened(make_rig):
    rig = make_rig(max_staleness=3)
    rig.publish(0)
    rig.put_all(rig.lease())
    assert rig.store.batches.tighten(1) == rig.store.batches.tighten(1) == Done()
    assert [event.max_staleness for event in rig.of(Tightened)] == [1]
    assert rig.store.status(0.0).max_staleness == 1
    for step in range(2):  # eight groups were admitted before; four may be alive
        train_step(rig, step)
        assert rig.source.taken == 8 and rig.lease() == []
    assert rig.store.status(0.0).slots_used == 4
    train_step(rig, 2)
    assert len(rig.lease()) == 2 and rig.store.status(0.0).slots_used == 4
    rig.store.batches.tighten(2)
    assert len(rig.lease()) == 2


def test_a_bound_is_never_loosened_beyond_the_configured_one(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    assert rig.store.batches.tighten(7) == Done() and rig.of(Tightened) == []
    assert rig.store.batches.tighten(-1).code == "bad_bound"
    assert len(rig.lease()) == 4


def test_exactly_the_groups_of_the_run_are_admitted(make_rig):
    rig = make_rig(steps=3, max_staleness=4)
    rig.publish(0)
    for step in range(3):
        train_step(rig, step)
    assert rig.lease() == [] and rig.source.taken == 6


def test_put_again_is_done_and_stores_once(make_rig):
    rig = make_rig()
    rig.publish(0)
    group = rig.lease()[0]
    header = rig.header(group, 0, reward=math.nan)
    assert rig.store.delivery.put("w", [header], 0.0) == rig.store.delivery.put("w", [header], 0.0) == Done()
    assert len(rig.of(SamplesStored)) == 1
    assert rig.store.delivery.put("w", [rig.header(group, 0, tokens=99)], 0.0).code == "conflict"


def test_put_to_nowhere_is_refused(make_rig):
    rig = make_rig()
    rig.publish(0)
    group = rig.lease()[0]
    assert rig.store.delivery.put("w", [rig.header(group, 0, group_id=77)], 0.0).code == "unknown_group"
    assert rig.store.delivery.put("w", [rig.header(group, 7)], 0.0).code == "unknown_sample"
    assert rig.store.delivery.put("w", [rig.header(group, 0, partition="eval")], 0.0).code == "conflict"


def test_only_missing_samples_of_a_lost_worker_are_leased_again(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    first, second = rig.lease("lost")
    rig.store.delivery.put("lost", [rig.header(first, 0)], 0.0)
    rig.now = 5.0
    rig.store.delivery.renew("other", rig.now)
    rig.now = 10.0
    rig.store.expire(rig.now)
    again = rig.lease("other")
    assert [(g.group_id, g.samples, g.attempt) for g in again] == [(0, [1], 1), (1, [0, 1], 1)]
    assert rig.store.delivery.put("lost", [rig.header(first, 1)], rig.now).code == "fenced"
    assert rig.store.delivery.put("lost", [rig.header(first, 0)], rig.now) == Done()  # it was stored before the loss
    rig.put_all(again, "other")
    assert isinstance(rig.store.batches.reserve(0, rig.now), Reserved)
    assert rig.store.delivery.put("lost", [rig.header(second, 0)], rig.now).code == "fenced"
    assert rig.store.status(rig.now).counters["redelivered"] == 3


def test_a_sample_is_put_and_failed_by_the_worker_that_holds_it_alone(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    first, _ = rig.lease("holder")
    assert rig.store.delivery.put("other", [rig.header(first, 0)], 0.0).code == "fenced"
    rig.store.delivery.fail("other", 0, 0, first.attempt, "boom", 0.0)
    assert rig.store.delivery.put("holder", [rig.header(first, 0)], 0.0) == Done()


def test_renewing_keeps_leases(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.lease()
    for now in (6.0, 12.0, 18.0):
        rig.store.delivery.renew("w", now)
        rig.store.expire(now)
    assert rig.of(LeaseLost) == []
    assert rig.store.status(18.0).oldest_lease_s == 18.0


def test_a_lease_that_its_worker_forgot_ends_after_the_lease_time(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    first, second = rig.lease()
    held = [(second.group_id, 0, second.attempt), (second.group_id, 1, second.attempt)]
    held.append((first.group_id, 0, first.attempt))
    for now in (3.0, 6.0, 9.0):  # the answer with the others may still be on its way
        rig.store.delivery.renew("w", now, held)
    assert rig.of(LeaseLost) == []
    rig.store.delivery.renew("w", 10.0, held)
    (lost,) = rig.of(LeaseLost)
    assert (lost.group, lost.samples, lost.charged) == (first.group_id, [1], True)
    rig.now = 10.0
    (again,) = rig.lease("other")
    assert (again.group_id, again.samples) == (first.group_id, [1])
    assert rig.store.delivery.put("w", [rig.header(first, 1)], rig.now).code == "fenced"
    rig.store.delivery.renew("w", 25.0, held)
    rig.put_all([second])
    assert rig.store.delivery.put("w", [rig.header(first, 0)], rig.now) == Done()


def test_what_a_worker_holds_of_an_older_attempt_is_not_what_it_leased(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    group = rig.lease(max_groups=1)[0]
    rig.store.delivery.renew("w", 10.0, [(group.group_id, 0, group.attempt - 1), (77, 0, 0), (group.group_id, 9, 0)])
    (lost,) = rig.of(LeaseLost)
    assert lost.samples == [0, 1]


def test_a_renewal_that_lists_nothing_keeps_all(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.lease()
    rig.store.delivery.renew("w", 9.0)
    rig.store.delivery.renew("w", 18.0, None)
    assert rig.of(LeaseLost) == []


def test_a_lease_ends_at_its_maximum_age_whatever_its_worker_says(make_rig):
    rig = make_rig(max_staleness=0, max_lease_s=50.0)
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    held = [(group.group_id, sample, group.attempt) for sample in group.samples]
    for now in range(5, 50, 5):
        rig.store.delivery.renew("w", float(now), held)
        rig.store.expire(float(now))
    assert rig.of(LeaseLost) == []
    rig.now = 48.0
    young = rig.lease(max_groups=1)[0]
    rig.store.expire(50.0)
    assert [(lost.group, lost.samples) for lost in rig.of(LeaseLost)] == [(group.group_id, [0, 1])]
    rig.put_all([young])


def test_only_the_holder_of_a_lease_puts_or_fails_it(make_rig):
    rig = make_rig()
    rig.publish(0)
    group, *_ = rig.lease("w")
    before = rig.store.dump()
    assert rig.store.delivery.put("stranger", [rig.header(group, 0)], 0.0).code == "fenced"
    rig.store.delivery.fail("stranger", group.group_id, 0, group.attempt, "boom", 0.0)
    assert rig.store.dump() == before
    assert rig.store.delivery.put("w", [rig.header(group, 0)], 0.0) == Done()
    assert rig.store.delivery.put("w", [rig.header(group, 0)], 0.0) == Done()


@pytest.mark.parametrize(("url", "kind"), [("http://a", "junk"), ("junk", "vllm"), ("http://", "vllm")])
def test_an_engine_that_no_worker_could_use_is_refused(make_rig, url, kind):
    rig = make_rig()
    assert rig.store.engines.register("e0", url, kind).code == "bad_engine"
    assert rig.store.engine_list().engines == [] and rig.seen == []


def test_failed_sample_is_redelivered_then_dead_letters_its_group(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    first, second = rig.lease()
    assert rig.store.delivery.fail("w", 0, 1, first.attempt, "boom", 0.0) == Done()
    assert rig.store.delivery.fail("w", 0, 1, first.attempt, "boom", 0.0) == Done()  # a resend, counted once
    (again,) = rig.lease()
    assert (again.group_id, again.samples, again.attempt) == (0, [1], 1)
    assert rig.store.delivery.fail("w", 0, 1, first.attempt, "boom", 0.0).code == "fenced"
    assert rig.store.delivery.fail("w", 0, 1, again.attempt, "bang", 0.0) == Done()
    (dead,) = rig.of(DeadLettered)
    assert dead.group == 0 and "bang" in dead.error
    assert rig.store.delivery.put("w", [rig.header(first, 0)], 0.0).code == "fenced"
    (replacement,) = rig.lease()
    assert replacement.group_id == 2
    rig.put_all([second, replacement])
    assert members(rig.store.batches.reserve(0, 0.0)) == [1, 2]


def test_a_group_that_was_given_up_keeps_no_bytes_for_its_other_samples(make_rig):
    rig = make_rig(max_attempts=1, max_staleness=0)
    rig.publish(0)
    first, second = rig.lease()
    assert rig.store.delivery.put("w", [rig.header(second, 0, nbytes=5000)], 0.0) == Done()
    assert rig.store.book.occupancy().expected_bytes == 5000 + 3 * 5000
    rig.store.delivery.fail("w", first.group_id, 0, first.attempt, "x", 0.0)
    assert rig.store.book.occupancy().expected_bytes == 5000 + 5000


def test_a_group_that_is_given_up_while_it_waits_is_not_leased(make_rig):
    rig = make_rig(max_attempts=2, max_staleness=0)
    rig.publish(0)
    first, _ = rig.lease("a")
    rig.store.delivery.fail("a", first.group_id, 0, first.attempt, "x", 0.0)
    (again,) = rig.lease("b")
    assert (again.group_id, again.samples) == (first.group_id, [0])
    rig.store.delivery.fail("a", first.group_id, 1, first.attempt, "x", 0.0)
    rig.store.delivery.fail("b", first.group_id, 0, again.attempt, "x", 0.0)
    assert len(rig.of(DeadLettered)) == 1
    assert [group.group_id for group in rig.lease("c")] == [2]


def test_two_lost_workers_of_one_group_dead_letter_it_once(make_rig):
    rig = make_rig(max_attempts=1, max_staleness=0)
    rig.publish(0)
    group = rig.lease("a", 1)[0]
    rig.store.delivery.fail("a", group.group_id, 0, group.attempt, "x", 0.0)
    assert len(rig.of(DeadLettered)) == 1
    rig = make_rig(max_attempts=2, max_staleness=0)
    rig.publish(0)
    group = rig.lease("a", 1)[0]
    rig.store.delivery.fail("a", 0, 0, group.attempt, "x", 0.0)
    rig.lease("b", 1)
    rig.store.expire(100.0)
    (again,) = rig.of(DeadLettered)
    assert again.group == 0


def test_byte_budget_holds_admission_back_but_never_below_one_batch(make_rig):
    rig = make_rig(max_staleness=4, max_bytes=5000)
    rig.publish(0)
    assert len(rig.lease()) == 2  # a guess of 1024 bytes a sample
    assert rig.store.status(0.0).counters["short_of_bytes"] == 1
    rig = make_rig(max_staleness=4, max_bytes=1)
    rig.publish(0)
    for step in range(3):
        train_step(rig, step)


def test_evaluation_runs_outside_the_slots(make_rig):
    rig = make_rig(max_staleness=0, eval_samples=1)
    rig.publish(0)
    train = rig.lease()
    assert rig.store.evals.open(5) == rig.store.evals.open(5) == Done()
    groups = rig.lease()
    assert [(g.group_id, g.partition, g.samples) for g in groups] == [
        (EVAL_GROUPS, "eval", [0]),
        (EVAL_GROUPS + 1, "eval", [0]),
    ]
    assert isinstance(rig.store.evals.result(5), NotReady)
    rig.put_all(train + groups)
    result = rig.store.evals.result(5)
    assert [h.group_id for h in result.headers] == [EVAL_GROUPS, EVAL_GROUPS + 1]
    assert members(rig.store.batches.reserve(0, 0.0)) == [0, 1]
    assert rig.store.evals.result(6).code == "unknown_eval"


def test_a_listing_says_to_which_partition_a_group_belongs(make_rig):
    rig = make_rig(max_staleness=0, eval_samples=1)
    rig.publish(0)
    rig.store.evals.open(5)
    rig.lease()
    listed = store.group_list(rig.store.book, -1, 100, "", 0.0)
    assert isinstance(listed, GroupList)
    assert {(group.group_id >= EVAL_GROUPS, group.partition) for group in listed.groups} == {
        (False, "train"),
        (True, "eval"),
    }


@pytest.mark.parametrize("name", ["", "a/b", "x" * 101])
def test_a_bad_name_of_a_consumer_is_named(make_rig, name):
    refused = make_rig().store.consumers.subscribe(name, True)
    assert isinstance(refused, Refused) and refused.code == "bad_name" and repr(name) in refused.reason


def test_a_shard_that_is_not_registered_is_told_that_it_is_lost(make_rig):
    refused = make_rig().store.shards.sweep("shard-7", [0])
    assert isinstance(refused, Refused) and refused.code == SHARD_LOST and "shard-7" in refused.reason


def test_what_there_is_of_an_evaluation_so_far_can_be_read_and_does_not_end_it(make_rig):
    rig = make_rig(max_staleness=0, eval_samples=1)
    rig.publish(0)
    rig.store.evals.open(5)
    groups = [group for group in rig.lease() if group.partition == "eval"]
    rig.put_all(groups[:1])
    waiting = rig.store.evals.result(5)
    assert (waiting.finished, waiting.groups) == (1, 2)
    result = rig.store.evals.result(5, so_far=True)
    assert [header.group_id for header in result.headers] == [EVAL_GROUPS]
    assert list(result.tasks) == [EVAL_GROUPS, EVAL_GROUPS + 1]
    rig.store.evals.open(6)  # forgets evaluations that were answered
    rig.put_all(groups[1:])
    assert len(rig.store.evals.result(5).headers) == 2


def test_evaluation_ends_without_samples_that_failed_for_good(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    rig.store.evals.open(1)
    groups = rig.lease(max_groups=2)
    rig.put_all(groups[1:])
    rig.store.delivery.fail("w", groups[0].group_id, 0, 0, "boom", 0.0)
    (again,) = rig.lease(max_groups=1)
    rig.store.delivery.fail("w", again.group_id, 0, again.attempt, "boom", 0.0)
    result = rig.store.evals.result(1)
    assert isinstance(result, Reserved) and len(result.headers) == 1
    assert result.failed == [(groups[0].group_id, 0)]
    assert rig.store.status(0.0).counters["eval_missing"] == 1
    rig.store.evals.open(2)
    assert rig.store.evals.result(1).code == "unknown_eval"
    assert rig.store.status(0.0).payload_bytes == 0


def test_finish_sends_workers_home(make_rig):
    rig = make_rig()
    rig.publish(0)
    assert rig.store.finish() == rig.store.finish() == Done()
    assert rig.store.delivery.lease("w", 1, 0.0).finished
    assert rig.store.evals.open(1).code == "finished"


def test_engine_registry(make_rig):
    rig = make_rig()
    assert rig.store.engines.register("e0", "http://a", "embedded") == Done()
    assert rig.store.engines.register("e0", "http://a", "embedded") == Done()
    assert rig.store.engines.register("e0", "http://b", "embedded").code == "conflict"
    listed = rig.store.engine_list()
    assert (listed.revision, listed.published, listed.engines[0].version) == (1, Version(0, -1), None)
    rig.store.publish(Version(0, 0), ["e0", "gone"])
    assert rig.store.engine_list().engines[0].version == Version(0, 0)
    rig.store.engines.register("e1", "http://c", "embedded")
    assert rig.store.engines.confirm("e1", Version(0, 0)) == Done()
    assert isinstance(rig.store.engines.confirm("e2", Version(0, 0)), Refused)
    revision = rig.store.engine_list().revision
    for _ in range(2):
        assert rig.store.engines.withdraw(["e1", "gone"]) == Done()
        listed = rig.store.engine_list()
        assert (listed.revision, [each.version for each in listed.engines]) == (revision + 1, [Version(0, 0), None])
    rig.store.engines.published(["e1"], Version(0, 0))
    assert rig.store.engine_list().engines[1].version == Version(0, 0)
    rig.store.engines.remove("e0")
    assert [engine.engine_id for engine in rig.store.engine_list().engines] == ["e1"]


def test_the_rows_of_a_sample_come_together_or_not_at_all(make_rig):
    rig = make_rig()
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    first, second = (rig.header(group, 0, segment=segment, tokens_hash=f"s{segment}") for segment in (0, 1))
    other_episode = rig.header(group, 0, segment=1, episode_id="another")
    for rows in ([], [second], [second, first], [first, first], [first, rig.header(group, 1)], [first, other_episode]):
        assert rig.store.delivery.put("w", rows, 0.0).code == "rows"
    assert rig.store.status(0.0).payload_bytes == 0
    put = rig.store.delivery.put
    assert put("w", [first, second], 0.0) == put("w", [first, second], 0.0) == Done()
    assert rig.store.delivery.put("w", [first], 0.0).code == "conflict"
    assert [[h.key for h in rows] for event in rig.of(SamplesStored) for rows in event.samples] == [
        [(0, 0, 0), (0, 0, 1)]
    ]
    assert rig.store.status(0.0).payload_bytes == 20
    for header in (rig.header(group, 1), *(rig.header(g, s) for g in rig.lease() for s in g.samples)):
        assert rig.store.delivery.put("w", [header], 0.0) == Done()
    batch = rig.store.batches.reserve(0, 0.0)
    assert [header.key for header in batch.headers] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    rig.store.batches.commit(0)
    rig.publish(1)
    rig.store.retire(1)
    left = sum(h.nbytes for event in rig.of(SamplesStored) for rows in event.samples for h in rows) - 50
    assert rig.store.status(0.0).payload_bytes == left


def test_a_lease_names_the_samples_that_have_a_trace_and_again_the_same(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    asked = []
    rig.store.book.traced = lambda group, samples, attempt: asked.append((group, attempt)) or samples[group:]
    rig.store.delivery.renew("w", 0.0)
    first = rig.store.delivery.lease("w", 2, 0.0, b"request").groups
    assert [group.traced for group in first] == [[0, 1], [1]] and first[1].trace(1) == "1.1.0"
    assert first[1].trace(0) == ""
    rig.store.book.traced = lambda *_: pytest.fail("it was chosen before")
    again = rig.store.delivery.lease("w", 2, 0.0, b"request").groups
    assert again == first and asked == [(0, 0), (1, 0)]
    recovered = make_rig(max_staleness=0)
    recovered.store.recover(rig.store.dump(), [], 0.0)
    assert recovered.store.delivery.lease("w", 2, 0.0, b"request").groups == first


def test_an_inspection_names_the_oldest_lease_and_the_age_of_every_state(make_rig):
    rig = make_rig(lease_s=1000.0)
    rig.publish(0)
    (first,) = rig.lease("early", 1)
    rig.now = 5.0
    (second,) = rig.lease("late", 1)
    rig.now = 8.0
    report = rig.store.inspect(rig.now, {})
    assert report.oldest_lease == LeaseRecord(group_id=first.group_id, worker="early", age_s=8.0)
    assert report.ages_s == {"leased": 8.0}
    rig.store.expire(rig.now)  # a tick
    rig.put_all([first], "early")
    assert rig.store.inspect(8.25, {}).ages_s == {"leased": 3.25, "ready": 0.25}
    rig.now = 10.0
    report = rig.store.inspect(rig.now, {})
    assert report.oldest_lease == LeaseRecord(group_id=second.group_id, worker="late", age_s=5.0)
    assert report.ages_s == {"leased": 5.0, "ready": 2.0}
    assert report.status == rig.store.status(rig.now)


def test_an_inspection_has_what_each_worker_holds(make_rig):
    rig = make_rig(lease_s=10.0)
    rig.publish(0)
    first, second = rig.lease("busy", 2)
    rig.now = 4.0
    rig.store.delivery.renew("idle", rig.now)
    rig.store.delivery.put("busy", [rig.header(first, 0)], rig.now)

    def held():
        return [(w.worker, w.samples, w.groups, w.oldest_s) for w in rig.store.inspect(rig.now, {}).workers]

    assert held() == [("busy", 3, 2, 4.0), ("idle", 0, 0, 0.0)]
    rig.store.delivery.put("busy", [rig.header(first, 1)], rig.now)
    rig.put_all([second], "busy")
    assert held() == [("busy", 0, 0, 0.0), ("idle", 0, 0, 0.0)]
    rig.now = 13.0
    rig.store.delivery.renew("idle", rig.now)
    rig.now = 15.0
    rig.store.expire(rig.now)
    assert held() == [("idle", 0, 0, 0.0)], "the other was silent for longer than a lease"


def test_without_groups_there_is_nothing_to_name(make_rig):
    report = make_rig().store.inspect(3.0, {"rows": 1.0})
    assert (report.oldest_lease, report.ages_s, report.dead_letters) == (None, {}, [])
    assert report.rates == {"rows": 1.0}


def kill(rig, group) -> None:
    for _ in range(2):
        rig.store.delivery.fail("w", group.group_id, 0, group.attempt, "boom", rig.now)
        again = rig.lease(max_groups=1)
        group = next((g for g in again if g.group_id == group.group_id), group)


def test_dead_letters_keep_their_task_and_error_and_survive_a_recovery(make_rig):
    rig = make_rig()
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    kill(rig, group)
    (letter,) = rig.store.inspect(0.0, {}).dead_letters
    assert (letter.group_id, letter.task, letter.error) == (0, group.task, "sample 0 failed 2 times; last: boom")
    for dump, transitions in ((rig.store.dump(), []), (b"", rig.seen)):
        other = make_rig()
        other.store.recover(dump, transitions, 0.0)
        assert other.store.inspect(0.0, {}).dead_letters == [letter]
        assert other.store.dump() == rig.store.dump()
    peeked = store.peek(rig.store.book, 0, 0.0)
    assert isinstance(peeked, Refused) and peeked.code == "dead_letter" and "boom" in peeked.reason


def test_status_counts_samples_with_and_without_a_reward(make_rig):
    rig = make_rig()
    rig.publish(0)
    (group,) = rig.lease("w", 1)
    for _ in range(2):
        rig.store.delivery.put("w", [rig.header(group, 0, scored=False)], rig.now)
    status = rig.store.status(rig.now)
    assert (status.scored, status.unscored) == (0, 1), "the same put again is the same sample"
    rig.store.delivery.put("w", [rig.header(group, 1)], rig.now)
    status = rig.store.status(rig.now)
    assert (status.scored, status.unscored) == (1, 1)


def test_status_and_a_missing_batch_tell_why_groups_were_given_up(make_rig):
    rig = make_rig(max_attempts=1)
    rig.publish(0)
    assert rig.store.status(0.0).last_failure == ""
    for error in ("boom", f"bang\n\x1b{'x' * 1000}"):
        (group,) = rig.lease(max_groups=1)
        rig.store.delivery.fail("w", group.group_id, 0, group.attempt, error, rig.now)
    told = rig.store.status(0.0).last_failure
    assert "bang" in told and "\n" not in told and len(told) <= ERROR_SHOWN
    answer = rig.store.batches.reserve(0, 0.0)
    assert isinstance(answer, NotReady) and "2 groups were given up" in answer.why and told in answer.why
    for letter in list(rig.store.book.dead_letters):
        assert rig.store.tasks.requeue(letter) == Done()
    answer = rig.store.batches.reserve(0, 0.0)
    assert isinstance(answer, NotReady) and "2 groups were given up" in answer.why and "last with" not in answer.why


def test_failed_attempts_are_counted_by_cause(make_rig):
    rig = make_rig(max_attempts=2)
    rig.publish(0)
    for error in ("EpisodeTimeout: too late", "worker w was lost", "why: not", *(f"E{n}: x" for n in range(40))):
        (group,) = rig.lease(max_groups=1)
        rig.store.delivery.fail("w", group.group_id, 0, group.attempt, error, rig.now)
    counters = rig.store.status(0.0).counters
    failed = {name.removeprefix(FAILED): n for name, n in counters.items() if name.startswith(FAILED)}
    assert (failed["EpisodeTimeout"], failed["lost_worker"], failed["why"], failed["E0"]) == (1, 1, 1, 1)
    assert sum(failed.values()) == 43 and len(failed) == MOST_CAUSES + 1 and failed["other"] == 43 - MOST_CAUSES


def test_only_the_newest_dead_letters_are_kept(make_rig):
    rig = make_rig(max_attempts=1)
    rig.publish(0)
    for _ in range(DEAD_LETTERS_KEPT + 3):
        (group,) = rig.lease(max_groups=1)
        rig.store.delivery.fail("w", group.group_id, 0, group.attempt, "boom", rig.now)
    report = rig.store.inspect(0.0, {})
    assert report.status.counters["dead_letters"] == DEAD_LETTERS_KEPT + 3
    assert [letter.group_id for letter in report.dead_letters] == list(range(3, DEAD_LETTERS_KEPT + 3))


def test_listings_go_by_id_and_state_and_say_whether_more_follow(make_rig):
    rig = make_rig()
    rig.now = 2.0
    rig.store.expire(rig.now)  # a tick
    rig.publish(0)
    groups = rig.lease(max_groups=4)
    rig.put_all(groups[:1])
    rig.store.delivery.put("w", [rig.header(groups[1], 0)], rig.now)
    first = store.group_list(rig.store.book, -1, 3, "", 7.0)
    assert isinstance(first, GroupList)
    assert [(g.group_id, g.state, g.here, g.samples, g.workers) for g in first.groups] == [
        (0, "ready", 2, 2, []),
        (1, "leased", 1, 2, ["w"]),
        (2, "leased", 0, 2, ["w"]),
    ]
    assert first.more and first.groups[0].nbytes == 20 and first.groups[0].age_s == 5.0
    rest = store.group_list(rig.store.book, 2, 3, "", 7.0)
    assert isinstance(rest, GroupList)
    assert [g.group_id for g in rest.groups] == [3] and not rest.more
    ready = store.group_list(rig.store.book, -1, 3, "ready", 7.0)
    assert isinstance(ready, GroupList)
    assert [g.group_id for g in ready.groups] == [0] and not ready.more
    wrong = store.group_list(rig.store.book, -1, 3, "red", 7.0)
    assert isinstance(wrong, Refused) and wrong.code == "unknown_state" and "red" in wrong.reason


def test_peeking_changes_nothing(make_rig):
    rig = make_rig()
    rig.publish(0)
    groups = rig.lease(max_groups=2)
    rig.put_all(groups[:1])
    before, seen = rig.store.dump(), len(rig.seen)
    peeked = store.peek(rig.store.book, 0, 1.0)
    assert isinstance(peeked, Peeked)
    assert [header.key for header in peeked.headers] == [(0, 0, 0), (0, 1, 0)]
    assert peeked.task == groups[0].task
    assert rig.store.dump() == before and len(rig.seen) == seen
    missing = store.peek(rig.store.book, 77, 1.0)
    assert isinstance(missing, Refused) and missing.code == "unknown_group"


def test_rates_are_of_the_last_minute(make_rig):
    rig = make_rig()
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    rates = Rates(0.0)
    for second in range(200):
        rates.see(SamplesStored(samples=[[rig.header(group, 0), rig.header(group, 0, segment=1)]]), float(second))
        rates.see(GroupReady(group=0, partition="train"), float(second))
        rates.see(GroupReady(group=1 << 40, partition="eval"), float(second))
    rates.see(BatchReserved(step=0, groups=[1, 2, 3]), 199.0)
    found = rates.per_second(199.5)
    assert found == {"groups_ready": 1.0, "groups_reserved": 3 / 60, "rows": 2.0, "bytes": 20.0}
    assert set(rates.per_second(400.0).values()) == {0.0}


def test_a_young_queue_does_not_divide_by_a_whole_minute():
    rates = Rates(100.0)
    rates.see(BatchReserved(step=0, groups=[1, 2]), 104.0)
    assert rates.per_second(104.0)["groups_reserved"] == 0.5


def test_without_workers_nobody_is_known_to_be_away() -> None:
    assert Attendance().unattended_s(5.0) == 0.0


def test_a_gateway_without_programs_is_unattended_from_when_they_left() -> None:
    attendance = Attendance()
    attendance.hear("gateway", 100.0, 30.0)
    assert attendance.unattended_s(102.0) == 32.0
    attendance.hear("gateway", 104.0)  # a renewal says nothing of programs
    assert attendance.unattended_s(104.0) == 34.0
    attendance.hear("gateway", 105.0, 0.0)
    assert attendance.unattended_s(150.0) == 0.0


def test_a_pause_between_two_episodes_is_no_absence() -> None:
    attendance = Attendance()
    attendance.hear("gateway", 100.0, 3.0)
    assert attendance.unattended_s(100.0) == 0.0 and attendance.unattended_s(120.0) == 23.0


def test_whoever_plays_counts() -> None:
    attendance = Attendance()
    attendance.hear("a", 100.0, 50.0)
    attendance.hear("b", 100.0, 20.0)
    assert attendance.unattended_s(100.0) == 20.0
    attendance.hear("agent-0", 100.0)
    assert attendance.unattended_s(100.0) == 0.0, "an agent worker needs no program"
    attendance.hear("a", 101.0 + HEARD_S, 111.0)
    assert attendance.unattended_s(101.0 + HEARD_S) == 111.0, "the others are gone"
    assert attendance.unattended_s(200.0 + 2 * HEARD_S) == 0.0, "and without any worker the deadlines hold"


def test_it_remembers_a_bounded_number_of_workers() -> None:
    attendance = Attendance()
    for number in range(REMEMBERED + 50):
        attendance.hear(f"gateway-{number}", 0.0, 30.0)
    assert len(attendance._heard) == len(attendance._away_since) == REMEMBERED


# The workers' side of the store: tasks of clients, draining, and groups without signal.


def same_after_recovery(rig: Rig, make_rig, **settings: int) -> None:
    for dump, transitions in ((rig.store.dump(), []), (b"", rig.seen)):
        other = make_rig(**settings)
        other.store.recover(dump, transitions, rig.now)
        assert other.store.dump() == rig.store.dump()


def bury(rig: Rig) -> int:
    """Let one group fail for good; its id."""
    (group,) = rig.lease(max_groups=1)
    for _ in range(2):
        assert rig.store.delivery.fail("w", group.group_id, 0, group.attempt, "boom", rig.now) == Done()
        group = next((g for g in rig.lease(max_groups=1) if g.group_id == group.group_id), group)
    return group.group_id


def test_submitted_tasks_come_first_and_once(make_rig):
    rig = make_rig()
    rig.publish(0)
    assert rig.store.tasks.submit([task(50), task(51)], b"q") == Done()
    assert rig.store.tasks.submit([task(50), task(51)], b"q") == Done(), "the same request again"
    assert len(rig.of(Submitted)) == 1
    assert [group.task.task_id for group in rig.lease(max_groups=3)] == ["t50", "t51", "t0"]
    same_after_recovery(rig, make_rig)


def test_too_many_submitted_tasks_are_refused_and_none_is_taken(make_rig):
    rig = make_rig()
    assert rig.store.tasks.submit([task(0)] * MOST_SUBMITTED) == Done()
    answer = rig.store.tasks.submit([task(0)])
    assert isinstance(answer, Refused) and answer.code == "full"


def test_a_replay_takes_no_tasks_of_others(make_rig):
    answer = make_rig(replays=True).store.tasks.submit([task(0)])
    assert isinstance(answer, Refused) and answer.code == "replay"


def test_a_stream_continues_where_more_of_it_is_known():
    stream, longer = GrowingTaskList([task(0)]), GrowingTaskList([task(0), task(1)])
    assert stream.next() == task(0) and stream.next() is None
    longer.seek(stream.cursor())
    assert longer.next() == task(1)
    stream.seek(longer.cursor())
    assert stream.next() is None


def test_a_second_chance_is_a_new_group_under_the_same_rules(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    dead = bury(rig)
    assert rig.store.tasks.requeue(dead, b"r") == Done()
    assert rig.store.tasks.requeue(dead, b"r") == Done(), "the same request again"
    assert len(rig.of(Requeued)) == 1
    same_after_recovery(rig, make_rig, max_staleness=0)
    rig.lease()
    status = rig.store.status(0.0)
    assert status.slots_used == status.slots == 2
    assert [event.task.task_id for event in rig.of(Admitted)] == ["t0", "t1", "t0"]
    late = rig.store.delivery.fail("w", dead, 0, 1, "boom", rig.now)
    assert isinstance(late, Refused) and late.code == "fenced"


def test_a_second_chance_takes_the_next_free_slot(make_rig):
    rig = make_rig(max_staleness=0, batch_groups=1, group_size=1)
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    rig.store.delivery.fail("w", 0, 0, group.attempt, "boom", rig.now)
    (group,) = rig.lease(max_groups=1)
    rig.store.delivery.fail("w", 0, 0, group.attempt, "boom", rig.now)
    assert rig.store.tasks.requeue(0) == Done()
    (again,) = rig.lease(max_groups=1)
    assert (again.group_id, again.task.task_id) == (1, "t0")
    same_after_recovery(rig, make_rig, max_staleness=0, batch_groups=1, group_size=1)


def test_no_second_chance_for_what_is_no_dead_letter_or_comes_too_late(make_rig):
    rig = make_rig(steps=1, batch_groups=1, group_size=1, max_attempts=1)
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    unknown = rig.store.tasks.requeue(group.group_id)
    assert isinstance(unknown, Refused) and unknown.code == "unknown_group"
    rig.store.delivery.fail("w", group.group_id, 0, group.attempt, "boom", rig.now)
    rig.lease(max_groups=1)
    late = rig.store.tasks.requeue(group.group_id)
    assert isinstance(late, Refused) and late.code == "too_late"
    rig.store.finish()
    over = rig.store.tasks.requeue(group.group_id)
    assert isinstance(over, Refused) and over.code == "finished"


def test_draining_admits_nothing_but_hands_out_again_what_was_lost(make_rig):
    rig = make_rig()
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    rig.store.tasks.drain(True)
    rig.store.tasks.drain(True)
    assert rig.lease() == []
    rig.store.delivery.fail("w", group.group_id, 1, group.attempt, "lost", rig.now)
    assert [(g.group_id, g.samples) for g in rig.lease()] == [(group.group_id, [1])]
    answer = rig.store.batches.reserve(0, rig.now)
    assert isinstance(answer, NotReady) and "draining" in answer.why
    same_after_recovery(rig, make_rig)
    other = make_rig()
    other.store.recover(rig.store.dump(), [], rig.now)
    assert other.store.inspect(rig.now, {}).draining
    rig.store.tasks.drain(False)
    assert len(rig.lease()) == 3


def test_processes_that_start_anew_find_no_drain(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.store.tasks.drain(True)
    rig.store.relaunch()
    rig.publish(0)
    assert len(rig.lease()) == 4


def test_a_task_of_ones_own_is_leased_under_the_same_rules(make_rig):
    rig = make_rig(max_staleness=0)
    rig.store.delivery.renew("w", 0.0)
    assert rig.store.delivery.lease("w", 1, 0.0, b"a", task(70)).groups == [], "nothing is published"
    rig.publish(0)
    (own,) = rig.store.delivery.lease("w", 1, 0.0, b"a", task(70)).groups
    assert own.task == task(70)
    assert [g.group_id for g in rig.store.delivery.lease("w", 1, 0.0, b"a", task(70)).groups] == [own.group_id]
    assert [group.task.task_id for group in rig.lease()] == ["t0"], "it took a slot, and no task of the source"
    assert rig.store.delivery.lease("w", 1, 0.0, b"b", task(71)).groups == []
    rig.store.delivery.fail("w", own.group_id, 0, own.attempt, "boom", 0.0)
    assert rig.store.delivery.lease("w", 1, 0.0, b"c", task(72)).groups == [], "what waits goes first"
    same_after_recovery(rig, make_rig, max_staleness=0)


def test_a_list_of_tasks_ends_and_goes_on_from_a_cursor():
    source = TaskList([task(0), task(1)])
    assert source.next() == task(0)
    cursor = source.cursor()
    assert (source.next(), source.next()) == (task(1), None)
    source.seek(cursor)
    assert source.next() == task(1)
    for wrong in (b"1/3", b"3/2", b"x/2", b"", b"\xff"):
        with pytest.raises(DataError):
            source.seek(wrong)


def put(rig, group, rewards, scored=(True, True)):
    for sample, (reward, ok) in enumerate(zip(rewards, scored, strict=True)):
        header = rig.header(group, sample, reward=reward, scored=ok)
        assert rig.store.delivery.put("w", [header], rig.now) == Done()


def dropped(rig):
    return [(event.group, event.reason) for event in rig.of(GroupDropped)]


def counters(rig):
    return rig.store.status(rig.now).counters


def test_a_group_without_signal_gives_its_slot_to_another_task(make_rig):
    rig = make_rig(max_staleness=0, max_refills=5)
    rig.publish(0)
    first, second = rig.lease()
    put(rig, first, [1.0, 1.0])
    put(rig, second, [0.0, 1.0])
    assert dropped(rig) == [(0, NO_SIGNAL)]
    assert isinstance(rig.store.batches.reserve(0, 0.0), NotReady)
    (third,) = rig.lease()
    assert third.task.task_id == "t2"
    put(rig, third, [1.0, 0.0])
    batch = rig.store.batches.reserve(0, 0.0)
    assert isinstance(batch, Reserved) and sorted(batch.tasks) == [1, 2]
    assert counters(rig) == {"refilled": 1}


@pytest.mark.parametrize(
    ("rewards", "scored", "kept"),
    [
        ([0.5, 0.5], (True, True), False),
        ([0.5, 0.6], (True, True), True),
        ([0.0, 0.5], (False, True), False),  # the first reward is no reward
        ([0.0, 1.0], (False, False), False),
        ([math.nan, math.nan], (True, True), True),  # the trainer is to see it, and to name it
    ],
)
def test_only_scored_rewards_that_differ_are_a_signal(make_rig, rewards, scored, kept):
    rig = make_rig(max_refills=5)
    rig.publish(0)
    put(rig, rig.lease()[0], rewards, scored)
    assert (dropped(rig) == []) is kept


def test_a_batch_completes_although_no_group_has_a_signal(make_rig):
    rig = make_rig(max_staleness=1, max_refills=2)
    rig.publish(0)
    for step, given_up in ((0, 4), (1, 6), (2, 8)):  # two batches' allowance at first, then one batch's a time
        while isinstance(rig.store.batches.reserve(step, 0.0), NotReady):
            for group in rig.lease():
                put(rig, group, [0.0, 0.0])
        rig.store.batches.commit(step)
        rig.publish(step + 1)
        for group in rig.lease():
            put(rig, group, [0.0, 0.0])
        assert counters(rig)["refilled"] <= given_up + 2
        assert len(dropped(rig)) == counters(rig)["refilled"] >= given_up
    assert counters(rig)["accepted_without_signal"] > 0


def test_an_unused_allowance_grows_no_further_than_the_slots(make_rig):
    rig = make_rig(max_staleness=0, max_refills=3)
    rig.publish(0)
    for step in range(4):
        for group in rig.lease():
            put(rig, group, [0.0, 1.0])
        assert isinstance(rig.store.batches.reserve(step, 0.0), Reserved)
        rig.store.batches.commit(step)
        rig.publish(step + 1)
    for _ in range(10):
        for group in rig.lease():
            put(rig, group, [1.0, 1.0])
    assert counters(rig)["refilled"] == 3


def test_without_dynamic_sampling_every_group_is_kept(make_rig):
    rig = make_rig()
    rig.publish(0)
    put(rig, rig.lease()[0], [1.0, 1.0])
    assert dropped(rig) == [] and counters(rig) == {}


def test_evaluations_are_never_given_up(make_rig):
    rig = make_rig(max_refills=5, eval_samples=2)
    rig.publish(0)
    rig.store.evals.open(0)
    for group in rig.lease(max_groups=2):
        assert group.partition == "eval"
        put(rig, group, [1.0, 1.0])
    assert isinstance(rig.store.evals.result(0), Reserved) and dropped(rig) == []


def test_a_batch_keeps_its_members_after_a_crash_even_if_they_come_back_without_signal(make_rig):
    old = make_rig(max_staleness=0, max_refills=5)
    old.publish(0)
    for group in old.lease():
        put(old, group, [0.0, 1.0])
    batch = old.store.batches.reserve(0, 0.0)
    rig = make_rig(max_staleness=0, max_refills=5)
    assert isinstance(rig.store.resume(0, 1, old.store.batches.snapshot()), Resumed)
    rig.publish(0, lineage=1)
    for group in rig.lease():
        put(rig, group, [1.0, 1.0])
    again = rig.store.batches.reserve(0, 0.0)
    assert isinstance(again, Reserved) and again.tasks == batch.tasks and dropped(rig) == []


@pytest.mark.parametrize(("on", "expected"), [(True, 64), (7, 7), (False, 0)])
def test_settings_come_from_the_config(on, expected):
    shaping = ShapingConfig(dynamic_sampling=on)
    config = RunConfig(
        model=ModelConfig(path="m"), data=DataConfig(path="d"), algorithm=AlgorithmConfig(shaping=shaping)
    )
    assert QueueSettings.of(config).max_refills == expected


@pytest.mark.parametrize(
    ("episode_s", "lease_s", "expected"), [(60.0, 15.0, 14400.0), (3600.0, 15.0, 28800.0), (60.0, 20000.0, 20000.0)]
)
def test_a_lease_may_last_as_long_as_several_episodes(episode_s: float, lease_s: float, expected: float) -> None:
    config = RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d"),
        agent=AgentConfig(episode_timeout_s=episode_s),
        queue=QueueConfig(lease_s=lease_s),
    )
    assert QueueSettings.of(config).max_lease_s == expected


def play(rig: Rig, rewards: dict[str, float], most: int = 100) -> list[str]:
    """Play every group that may be leased, its first sample for this reward and the other for half; their tasks."""
    played = rig.lease(max_groups=most)
    for group in played:
        reward = rewards[group.task.task_id]
        put(rig, group, [reward, reward / 2])
    return [group.task.task_id for group in played]


def test_a_curriculum_passes_over_tasks_by_their_newest_reward(make_rig):
    settings = {"tasks": 4, "steps": 20, "batch_groups": 4, "curriculum": CurriculumConfig(easy=0.75, hard=0.0)}
    rig = make_rig(**settings)
    rig.publish(0)
    rewards = {"t0": 1.0, "t1": 0.0, "t2": 0.5, "t3": 0.9}
    assert play(rig, rewards, 4) == ["t0", "t1", "t2", "t3"]
    assert rig.store.book.measured == {"t0": 0.75, "t1": 0.0, "t2": 0.375, "t3": pytest.approx(0.675)}
    rewards["t3"] = 1.0
    assert play(rig, rewards, 2) == ["t2", "t3"]
    # The last task of the source that is still trained.
    assert play(rig, rewards, 1) == ["t2"]
    assert counters(rig)["passed_over"] == 4
    same_after_recovery(rig, make_rig, **settings)
    snapshot = rig.store.batches.snapshot()
    fresh = make_rig(**settings)
    assert isinstance(fresh.store.resume(1, 1, snapshot), Resumed)
    assert fresh.store.book.measured == rig.store.book.measured


def test_a_curriculum_that_leaves_no_task_goes_on_with_one(make_rig, monkeypatch):
    monkeypatch.setattr(delivery, "MOST_PASSED_OVER", 10)
    rig = make_rig(tasks=2, max_staleness=3, curriculum=CurriculumConfig(easy=0.5))
    rig.publish(0)
    assert play(rig, {"t0": 1.0, "t1": 1.0}, 2) == ["t0", "t1"]
    assert len(play(rig, {"t0": 1.0, "t1": 1.0}, 2)) == 2


def test_tasks_that_are_passed_over_come_back_by_chance():
    settings = QueueSettings(steps=1, batch_groups=1, group_size=1, curriculum=CurriculumConfig(easy=1.0, again=0.25))
    kept = [not passed_over(settings, 1.0, f"{draw}") for draw in range(4000)]
    # Eight standard deviations of the binomial distribution.
    assert abs(sum(kept) - 1000) < 8 * math.sqrt(4000 * 0.25 * 0.75)
    assert kept == [not passed_over(settings, 1.0, f"{draw}") for draw in range(4000)]
    assert not passed_over(settings, None, "") and not passed_over(settings, 0.9, "")
