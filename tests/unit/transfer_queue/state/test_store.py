"""The store's rules one by one, on the workers' side; test_store_machine.py mixes all of them."""

import math

import pytest

from rl_async.messages import Done, NotReady, Refused, Reserved, Version
from rl_async.transfer_queue.book import EVAL_GROUPS
from rl_async.transfer_queue.transitions import DeadLettered, LeaseLost, SamplesStored, Tightened
from tests.unit.transfer_queue.conftest import members, train_step


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
