"""The store's rules one by one; test_store_machine.py mixes them."""

import math

import msgspec
import pytest

from rl_async.messages import Done, NotReady, Refused, Reserved, Resumed, Version, VersionRun
from rl_async.transfer_queue.batches import QueueSnapshot
from rl_async.transfer_queue.groups import EVAL_GROUPS
from rl_async.transfer_queue.transitions import (
    DeadLettered,
    GroupDropped,
    LeaseLost,
    RolledBack,
    SampleStored,
    Tightened,
)


def train_step(rig, step, lineage=0):
    """Generate whatever may be generated, and train and publish one step."""
    rig.put_all(rig.lease())
    batch = rig.store.reserve(step, rig.now)
    assert isinstance(batch, Reserved), batch
    assert rig.store.commit(step) == Done()
    rig.publish(step + 1, lineage)
    return batch


def members(batch):
    return sorted({header.group_id for header in batch.headers})


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
    assert rig.store.tighten(1) == rig.store.tighten(1) == Done()
    assert [event.max_staleness for event in rig.of(Tightened)] == [1]
    assert rig.store.status(0.0).max_staleness == 1
    for step in range(2):  # eight groups were admitted before; four may be alive
        train_step(rig, step)
        assert rig.source.taken == 8 and rig.lease() == []
    assert rig.store.status(0.0).slots_used == 4
    train_step(rig, 2)
    assert len(rig.lease()) == 2 and rig.store.status(0.0).slots_used == 4
    rig.store.tighten(2)
    assert len(rig.lease()) == 2


def test_a_bound_is_never_loosened_beyond_the_configured_one(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    assert rig.store.tighten(7) == Done() and rig.of(Tightened) == []
    assert rig.store.tighten(-1).code == "bad_bound"
    assert len(rig.lease()) == 4


def test_a_resume_forgets_that_the_bound_was_tightened(make_rig):
    rig = make_rig(max_staleness=2)
    rig.publish(0)
    rig.store.tighten(0)
    assert isinstance(rig.store.resume(0, 1, b""), Resumed)
    rig.publish(0, lineage=1)
    assert len(rig.lease()) == 6


def test_publication_frees_slots_and_commit_alone_does_not(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    rig.put_all(rig.lease())
    assert isinstance(rig.store.reserve(0, 0.0), Reserved)
    rig.store.commit(0)
    assert rig.lease() == []
    rig.publish(1)
    leased = rig.lease()
    assert [group.group_id for group in leased] == [2, 3]
    assert all(group.min_version == Version(0, 1) for group in leased)


def test_exactly_the_groups_of_the_run_are_admitted(make_rig):
    rig = make_rig(steps=3, max_staleness=4)
    rig.publish(0)
    for step in range(3):
        train_step(rig, step)
    assert rig.lease() == [] and rig.source.taken == 6


def test_batch_headers_are_ordered_and_come_with_their_tasks(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.put_all(list(reversed(rig.lease())))
    batch = rig.store.reserve(0, 0.0)
    assert [(h.group_id, h.sample) for h in batch.headers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {group: task.task_id for group, task in batch.tasks.items()} == {0: "t0", 1: "t1"}


def test_reserve_is_idempotent_and_in_order(make_rig):
    rig = make_rig()
    rig.publish(0)
    first = train_step(rig, 0)
    assert rig.store.reserve(0, 0.0) == first
    assert rig.store.reserve(2, 0.0).code == "wrong_step"


def test_put_again_is_done_and_stores_once(make_rig):
    rig = make_rig()
    rig.publish(0)
    group = rig.lease()[0]
    header = rig.header(group, 0, reward=math.nan)
    assert rig.store.put("w", [header], 0.0) == rig.store.put("w", [header], 0.0) == Done()
    assert len(rig.of(SampleStored)) == 1
    assert rig.store.put("w", [rig.header(group, 0, tokens=99)], 0.0).code == "conflict"


def test_put_to_nowhere_is_refused(make_rig):
    rig = make_rig()
    rig.publish(0)
    group = rig.lease()[0]
    assert rig.store.put("w", [rig.header(group, 0, group_id=77)], 0.0).code == "unknown_group"
    assert rig.store.put("w", [rig.header(group, 7)], 0.0).code == "unknown_sample"
    assert rig.store.put("w", [rig.header(group, 0, partition="eval")], 0.0).code == "conflict"


def test_only_missing_samples_of_a_lost_worker_are_leased_again(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    first, second = rig.lease("lost")
    rig.store.put("lost", [rig.header(first, 0)], 0.0)
    rig.now = 5.0
    rig.store.renew("other", rig.now)
    rig.now = 10.0
    rig.store.expire(rig.now)
    again = rig.lease("other")
    assert [(g.group_id, g.samples, g.attempt) for g in again] == [(0, [1], 1), (1, [0, 1], 1)]
    assert rig.store.put("lost", [rig.header(first, 1)], rig.now).code == "fenced"
    assert rig.store.put("lost", [rig.header(first, 0)], rig.now) == Done()  # it was stored before the loss
    rig.put_all(again, "other")
    assert isinstance(rig.store.reserve(0, rig.now), Reserved)
    assert rig.store.put("lost", [rig.header(second, 0)], rig.now).code == "fenced"
    assert rig.store.status(rig.now).counters["redelivered"] == 3


def test_renewing_keeps_leases(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.lease()
    for now in (6.0, 12.0, 18.0):
        rig.store.renew("w", now)
        rig.store.expire(now)
    assert rig.of(LeaseLost) == []
    assert rig.store.status(18.0).oldest_lease_s == 18.0


def test_failed_sample_is_redelivered_then_dead_letters_its_group(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    first, second = rig.lease()
    assert rig.store.fail("w", 0, 1, first.attempt, "boom", 0.0) == Done()
    assert rig.store.fail("w", 0, 1, first.attempt, "boom", 0.0) == Done()  # a resend, counted once
    (again,) = rig.lease()
    assert (again.group_id, again.samples, again.attempt) == (0, [1], 1)
    assert rig.store.fail("w", 0, 1, first.attempt, "boom", 0.0).code == "fenced"
    assert rig.store.fail("w", 0, 1, again.attempt, "bang", 0.0) == Done()
    (dead,) = rig.of(DeadLettered)
    assert dead.group == 0 and "bang" in dead.error
    assert rig.store.put("w", [rig.header(first, 0)], 0.0).code == "fenced"
    (replacement,) = rig.lease()
    assert replacement.group_id == 2
    rig.put_all([second, replacement])
    assert members(rig.store.reserve(0, 0.0)) == [1, 2]


def test_two_lost_workers_of_one_group_dead_letter_it_once(make_rig):
    rig = make_rig(max_attempts=1, max_staleness=0)
    rig.publish(0)
    group = rig.lease("a", 1)[0]
    rig.store.fail("a", group.group_id, 0, group.attempt, "x", 0.0)
    assert len(rig.of(DeadLettered)) == 1
    rig = make_rig(max_attempts=2, max_staleness=0)
    rig.publish(0)
    group = rig.lease("a", 1)[0]
    rig.store.fail("a", 0, 0, group.attempt, "x", 0.0)
    rig.lease("b", 1)
    rig.store.expire(100.0)
    (again,) = rig.of(DeadLettered)
    assert again.group == 0


def test_wait_does_not_pass_a_straggler_that_would_become_too_old(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    straggler, *rest = rig.lease()
    rig.put_all(rest)
    assert members(rig.store.reserve(0, 0.0)) == [1, 2]  # group 0 can still meet step 1
    rig.store.commit(0)
    rig.publish(1)
    rig.put_all(rig.lease())
    answer = rig.store.reserve(1, 7.0)
    assert isinstance(answer, NotReady) and "group 0 with 0 of 2 samples, leased by w for 7 s" in answer.why
    rig.put_all([straggler])
    assert members(rig.store.reserve(1, 7.0)) == [0, 3]


def test_drop_gives_up_a_straggler_and_replaces_it(make_rig):
    rig = make_rig(max_staleness=1, on_straggler="drop")
    rig.publish(0)
    straggler, *rest = rig.lease()
    rig.put_all(rest)
    rig.store.reserve(0, 0.0)
    rig.store.commit(0)
    rig.publish(1)
    rig.put_all(rig.lease())
    assert members(rig.store.reserve(1, 0.0)) == [3, 4]
    assert [dropped.group for dropped in rig.of(GroupDropped)] == [0]
    assert rig.store.put("w", [rig.header(straggler, 0)], 0.0).code == "fenced"
    assert [group.group_id for group in rig.lease()] == [6]


def test_mask_passes_a_straggler(make_rig):
    rig = make_rig(max_staleness=1, on_straggler="mask")
    rig.publish(0)
    straggler, *rest = rig.lease()
    rig.put_all(rest)
    for step, expected in [(0, [1, 2]), (1, [3, 4])]:
        assert members(rig.store.reserve(step, 0.0)) == expected
        rig.store.commit(step)
        rig.publish(step + 1)
        rig.put_all(rig.lease())
    rig.put_all([straggler])
    assert members(rig.store.reserve(2, 0.0)) == [0, 5]


def test_younger_tokens_than_promised_loosen_a_deadline(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    groups = rig.lease()
    rig.put_all(groups[1:])
    rig.store.reserve(0, 0.0)
    rig.store.commit(0)
    rig.publish(1)
    for sample in groups[0].samples:
        header = rig.header(groups[0], sample, versions=[VersionRun(Version(0, 1), 0, 2)])
        rig.store.put("w", [header], 0.0)
    rig.put_all(rig.lease())
    assert members(rig.store.reserve(1, 0.0)) == [0, 3]


def test_publish_wants_trained_steps_of_this_lineage(make_rig):
    rig = make_rig()
    rig.publish(0)
    assert rig.store.publish(Version(0, 1), []).code == "wrong_step"
    assert rig.store.publish(Version(1, 0), []).code == "wrong_lineage"
    train_step(rig, 0)
    assert rig.store.publish(Version(0, 0), []).code == "wrong_step"
    assert rig.store.publish(Version(0, 1), []) == Done()


def test_retire_forgets_and_keeps_slots_that_are_not_published(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    rig.put_all(rig.lease())
    rig.store.reserve(0, 0.0)
    assert rig.store.retire(1).code == "wrong_step"
    rig.store.commit(0)
    assert rig.store.retire(1) == rig.store.retire(1) == Done()
    status = rig.store.status(0.0)
    assert (status.committed, status.payload_bytes, status.slots_used) == (0, 40, 4)
    rig.publish(1)
    assert rig.store.status(0.0).slots_used == 2
    assert rig.store.reserve(0, 0.0).code == "wrong_step"
    assert rig.store.commit(0) == Done()


def test_byte_budget_holds_admission_back_but_never_below_one_batch(make_rig):
    rig = make_rig(max_staleness=4, max_bytes=5000)
    rig.publish(0)
    assert len(rig.lease()) == 2  # a guess of 1024 bytes a sample
    assert rig.store.status(0.0).counters["short_of_bytes"] == 1
    rig = make_rig(max_staleness=4, max_bytes=1)
    rig.publish(0)
    for step in range(3):
        train_step(rig, step)


def test_resume_repeats_batches_with_the_same_trajectories(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    batches = [train_step(rig, step) for step in range(4)]
    rig.store.retire(2)
    resumed = rig.store.resume(2, 1, b"")
    assert isinstance(resumed, Resumed)
    assert rig.store.resume(2, 1, b"") == resumed
    assert rig.lease() == []  # nothing is published
    assert rig.store.publish(Version(0, 5), []).code == "wrong_lineage"
    rig.publish(2, lineage=1)
    assert rig.store.reserve(2, 0.0) == batches[2]
    assert rig.lease() == []  # four groups trained again and their successors hold all slots
    rig.store.commit(2)
    rig.publish(3, lineage=1)
    assert rig.store.reserve(3, 0.0) == batches[3]
    rig.store.commit(3)
    rig.publish(4, lineage=1)
    train_step(rig, 4, lineage=1)


def test_resume_behind_the_published_version_fences_what_is_being_generated(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    train_step(rig, 0)
    in_flight = rig.lease()
    rig.store.resume(0, 1, b"")
    assert rig.store.put("w", [rig.header(in_flight[0], 0)], 0.0).code == "fenced"
    rig.publish(0, lineage=1)
    assert rig.lease() == []
    train_step(rig, 0, lineage=1)
    again = rig.lease()
    assert [(group.group_id, group.min_version) for group in again] == [(2, Version(1, 1)), (3, Version(1, 1))]


def test_resume_at_the_published_version_keeps_leases(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    train_step(rig, 0)
    in_flight = rig.lease()
    assert rig.store.resume(1, 1, b"") == Resumed(kept=2, readmitted=0)
    rig.put_all(in_flight)
    rig.publish(1, lineage=1)
    assert members(rig.store.reserve(1, 0.0)) == [2, 3]


def test_resume_before_what_is_retired_is_refused(make_rig):
    rig = make_rig()
    rig.publish(0)
    for step in range(2):
        train_step(rig, step)
    rig.store.retire(2)
    assert rig.store.resume(1, 1, b"").code == "wrong_step"
    assert rig.store.resume(3, 1, b"").code == "wrong_step"
    assert isinstance(rig.store.resume(2, 1, b""), Resumed)
    assert rig.store.resume(2, 0, b"").code == "wrong_lineage"


def test_a_fresh_queue_restores_a_snapshot(make_rig):
    old = make_rig(max_staleness=1)
    old.publish(0)
    train_step(old, 0)
    old.put_all(old.lease())
    reserved = old.store.reserve(1, 0.0)  # fixed ahead of time, not trained
    snapshot = old.store.snapshot()
    rig = make_rig(max_staleness=1)
    assert rig.store.resume(1, 3, snapshot) == Resumed(kept=0, readmitted=4)
    (event,) = rig.of(RolledBack)
    assert event.fresh and event.next_group == 6
    rig.publish(1, lineage=3)
    leased = rig.lease()
    assert [group.group_id for group in leased] == [2, 3, 4, 5]
    assert [group.task.task_id for group in leased] == ["t2", "t3", "t4", "t5"]
    rig.put_all(list(reversed(leased)))
    assert members(rig.store.reserve(1, 0.0)) == members(reserved)
    rig.store.commit(1)
    rig.publish(2, lineage=3)
    assert [group.group_id for group in rig.lease()] == [6, 7]


def test_a_fresh_queue_needs_a_good_snapshot(make_rig):
    rig = make_rig()
    assert rig.store.resume(3, 1, b"").code == "no_snapshot"
    assert rig.store.resume(3, 1, b"nonsense").code == "bad_snapshot"
    assert rig.store.resume(0, 1, b"") == Resumed(kept=0, readmitted=0)
    rig.publish(0, lineage=1)
    assert len(rig.lease()) == 4


def test_snapshot_holds_what_is_not_trained(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    train_step(rig, 0)
    snapshot = msgspec.msgpack.decode(rig.store.snapshot(), type=QueueSnapshot)
    assert (snapshot.next_group, [group.group for group in snapshot.groups]) == (4, [2, 3])
    assert snapshot.cursor == b"4"


def test_evaluation_runs_outside_the_slots(make_rig):
    rig = make_rig(max_staleness=0, eval_samples=1)
    rig.publish(0)
    train = rig.lease()
    assert rig.store.evaluate(5) == rig.store.evaluate(5) == Done()
    groups = rig.lease()
    assert [(g.group_id, g.partition, g.samples) for g in groups] == [
        (EVAL_GROUPS, "eval", [0]),
        (EVAL_GROUPS + 1, "eval", [0]),
    ]
    assert isinstance(rig.store.eval_result(5), NotReady)
    rig.put_all(train + groups)
    result = rig.store.eval_result(5)
    assert [h.group_id for h in result.headers] == [EVAL_GROUPS, EVAL_GROUPS + 1]
    assert members(rig.store.reserve(0, 0.0)) == [0, 1]
    assert rig.store.eval_result(6).code == "unknown_eval"


def test_evaluation_ends_without_samples_that_failed_for_good(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    rig.store.evaluate(1)
    groups = rig.lease(max_groups=2)
    rig.put_all(groups[1:])
    rig.store.fail("w", groups[0].group_id, 0, 0, "boom", 0.0)
    (again,) = rig.lease(max_groups=1)
    rig.store.fail("w", again.group_id, 0, again.attempt, "boom", 0.0)
    result = rig.store.eval_result(1)
    assert isinstance(result, Reserved) and len(result.headers) == 1
    assert rig.store.status(0.0).counters["eval_missing"] == 1
    rig.store.evaluate(2)
    assert rig.store.eval_result(1).code == "unknown_eval"
    assert rig.store.status(0.0).payload_bytes == 0


def test_resume_forgets_evaluations(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    rig.store.evaluate(1)
    groups = rig.lease(max_groups=2)
    rig.store.resume(0, 1, b"")
    assert rig.store.put("w", [rig.header(groups[0], 0)], 0.0).code == "fenced"
    assert rig.store.evaluate(1) == Done()


def test_finish_sends_workers_home(make_rig):
    rig = make_rig()
    rig.publish(0)
    assert rig.store.finish() == rig.store.finish() == Done()
    assert rig.store.lease("w", 1, 0.0).finished
    assert rig.store.evaluate(1).code == "finished"


def test_engine_registry(make_rig):
    rig = make_rig()
    assert rig.store.register_engine("e0", "http://a", "embedded") == Done()
    assert rig.store.register_engine("e0", "http://a", "embedded") == Done()
    assert rig.store.register_engine("e0", "http://b", "embedded").code == "conflict"
    listed = rig.store.engines()
    assert (listed.revision, listed.published, listed.engines[0].version) == (1, Version(0, -1), None)
    rig.store.publish(Version(0, 0), ["e0", "gone"])
    assert rig.store.engines().engines[0].version == Version(0, 0)
    rig.store.register_engine("e1", "http://c", "embedded")
    assert rig.store.confirm("e1", Version(0, 0)) == Done()
    assert isinstance(rig.store.confirm("e2", Version(0, 0)), Refused)
    rig.store.remove_engine("e0")
    assert [engine.engine_id for engine in rig.store.engines().engines] == ["e1"]


def test_the_rows_of_a_sample_come_together_or_not_at_all(make_rig):
    rig = make_rig()
    rig.publish(0)
    (group,) = rig.lease(max_groups=1)
    first, second = (rig.header(group, 0, segment=segment, tokens_sha256=f"s{segment}") for segment in (0, 1))
    other_episode = rig.header(group, 0, segment=1, episode_id="another")
    for rows in ([], [second], [second, first], [first, first], [first, rig.header(group, 1)], [first, other_episode]):
        assert rig.store.put("w", rows, 0.0).code == "rows"
    assert rig.store.status(0.0).payload_bytes == 0
    assert rig.store.put("w", [first, second], 0.0) == rig.store.put("w", [first, second], 0.0) == Done()
    assert rig.store.put("w", [first], 0.0).code == "conflict"
    assert [[h.key for h in event.headers] for event in rig.of(SampleStored)] == [[(0, 0, 0), (0, 0, 1)]]
    assert rig.store.status(0.0).payload_bytes == 20
    for header in (rig.header(group, 1), *(rig.header(g, s) for g in rig.lease() for s in g.samples)):
        assert rig.store.put("w", [header], 0.0) == Done()
    batch = rig.store.reserve(0, 0.0)
    assert [header.key for header in batch.headers] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    rig.store.commit(0)
    rig.publish(1)
    rig.store.retire(1)
    left = sum(h.nbytes for event in rig.of(SampleStored) for h in event.headers) - 50
    assert rig.store.status(0.0).payload_bytes == left


# --- recovery ---------------------------------------------------------------------------------------------------------


def recovered(make_rig, rig, transitions=None, now=100.0, **settings):
    """Another store, from what the first one announced."""
    other = make_rig(**settings)
    other.now = now
    other.store.recover(b"", rig.seen if transitions is None else transitions, now)
    return other


def test_workers_have_a_full_lease_time_after_a_recovery(make_rig):
    rig = make_rig()
    rig.publish(0)
    groups = rig.lease()
    other = recovered(make_rig, rig)
    assert (other.store.status(100.0).workers, other.store.status(104.0).oldest_lease_s) == (1, 4.0)
    other.store.expire(109.9)
    assert other.of(LeaseLost) == []
    other.put_all(groups[:1])
    other.store.expire(120.0)
    assert [lost.group for lost in other.of(LeaseLost)] == [1, 2, 3]


def test_a_repeated_request_gets_its_groups_without_those_that_are_gone(make_rig):
    rig = make_rig(max_attempts=1)
    rig.publish(0)
    rig.store.renew("w", 0.0)
    first = rig.store.lease("w", 2, 0.0, b"one")
    other = recovered(make_rig, rig, max_attempts=1)
    assert other.store.lease("w", 2, 100.0, b"one") == first
    assert other.of(LeaseLost) == [] and len(other.lease(max_groups=1)) == 1
    other.store.fail("w", 0, 0, 0, "boom", 100.0)
    assert [group.group_id for group in other.store.lease("w", 2, 100.0, b"one").groups] == [1]


def test_a_queue_that_remembers_less_than_the_checkpoint_starts_from_it(make_rig):
    """A power cut took the end of the journal; the checkpoint had been forced to disk."""
    rig = make_rig()
    rig.publish(0)
    train_step(rig, 0)
    known = list(rig.seen)
    train_step(rig, 1)
    snapshot = rig.store.snapshot()
    assert rig.store.retire(2) == Done()
    other = recovered(make_rig, rig, known)
    assert other.store.resume(2, 1, b"").code == "wrong_step"
    assert other.store.resume(2, 1, snapshot) == Resumed(kept=0, readmitted=2)
    other.publish(2, lineage=1)
    assert other.store.status(100.0).payload_bytes == 0
    batch = train_step(other, 2, lineage=1)
    assert members(batch) == [4, 5] and {task.task_id for task in batch.tasks.values()} == {"t4", "t5"}
    assert [group.group_id for group in other.lease()][:2] == [8, 9]


def test_a_relaunched_run_finds_no_engines_no_leases_and_no_end(make_rig):
    rig = make_rig()
    rig.store.relaunch()
    assert rig.seen == [], "a new run has nothing to forget"
    rig.store.register_engine("e0", "http://a", "embedded")
    rig.publish(0)
    rig.lease()
    rig.store.finish()
    other = recovered(make_rig, rig)
    other.store.relaunch()
    assert other.store.engines().engines == []
    assert other.store.register_engine("e0", "http://elsewhere", "embedded") == Done()
    status = other.store.status(100.0)
    assert (status.finished, status.leased, status.waiting) == (False, 0, 4)
    assert other.lease() == [], "nothing is published yet"
    assert isinstance(other.store.resume(0, 1, b""), Resumed)
    other.publish(0, lineage=1)
    assert [group.attempt for group in other.lease()] == [1, 1, 1, 1]
    seen = rig.seen + other.seen
    assert recovered(make_rig, rig, seen).store.dump() == other.store.dump()
