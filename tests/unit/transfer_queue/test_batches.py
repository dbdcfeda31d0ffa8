"""Batches of steps, and going back to a checkpoint."""

from typing import Any

import msgspec
import pytest

from rl_async.messages import Done, NotReady, Reserved, Resumed, Version, VersionRun
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.store import QueueSnapshot
from rl_async.transfer_queue.transitions import (
    GroupDropped,
    LeaseLost,
    ReadmittedGroup,
    RolledBack,
    RunFinished,
    SamplesStored,
    ShardLost,
)
from tests.unit.transfer_queue.conftest import members, train_step


def test_publication_frees_slots_and_commit_alone_does_not(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    rig.put_all(rig.lease())
    assert isinstance(rig.store.batches.reserve(0, 0.0), Reserved)
    rig.store.batches.commit(0)
    assert rig.lease() == []
    rig.publish(1)
    leased = rig.lease()
    assert [group.group_id for group in leased] == [2, 3]
    assert all(group.min_version == Version(0, 1) for group in leased)


def test_batch_headers_are_ordered_and_come_with_their_tasks(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.put_all(list(reversed(rig.lease())))
    batch = rig.store.batches.reserve(0, 0.0)
    assert [(h.group_id, h.sample) for h in batch.headers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {group: task.task_id for group, task in batch.tasks.items()} == {0: "t0", 1: "t1"}


def test_reserve_is_idempotent_and_in_order(make_rig):
    rig = make_rig()
    rig.publish(0)
    first = train_step(rig, 0)
    assert rig.store.batches.reserve(0, 0.0) == first
    assert rig.store.batches.reserve(2, 0.0).code == "wrong_step"


def test_a_replay_that_lacks_a_sample_of_a_batch_is_refused(make_rig):
    """A journal with a hole must not become a partial batch."""
    rig = make_rig()
    rig.publish(0)
    batch = train_step(rig, 0)
    stored = [event for event in rig.of(SamplesStored) if event.samples[0][0] in batch.headers]
    assert len(stored) == 4
    for missing in stored:
        with pytest.raises(ValueError, match="step 0"):
            make_rig().store.recover(b"", [event for event in rig.seen if event is not missing], 0.0)


def test_a_batch_is_never_given_out_in_part(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.put_all(rig.lease())
    batch = rig.store.batches.reserve(0, 0.0)
    rig.store.book.groups[batch.headers[0].group_id].samples[1].headers = []
    assert rig.store.batches.reserve(0, 0.0).code == "incomplete"


def test_a_step_that_waits_for_a_straggler_is_short_by_the_age_of_the_tokens_that_came(make_rig):
    """Two groups leased from version 0 have tokens of version 1 alone when they come, so a third one may be passed."""
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    late = rig.lease(max_groups=2)
    rig.put_all(rig.lease())
    assert members(rig.store.batches.reserve(0, 0.0)) == [2, 3]
    rig.store.batches.commit(0)
    rig.publish(1)
    straggler, *new = rig.lease()
    assert rig.store.batches.is_short(1)
    for group in late:
        for sample in group.samples:
            header = rig.header(group, sample, versions=[VersionRun(Version(0, 1), 0, 2)])
            assert rig.store.delivery.put("w", [header], 0.0) == Done()
    assert not rig.store.batches.is_short(1)
    assert rig.store.book.open_counts.ready == {1: 2} and rig.store.book.open_counts.unfinished == {1: 2}
    assert members(rig.store.batches.reserve(1, 0.0)) == [0, 1]
    rig.put_all(new)
    assert rig.store.batches.is_short(2), "one group is ready, and a batch has two"
    rig.put_all([straggler])
    assert not rig.store.batches.is_short(2)


def test_of_several_unfinished_groups_one_is_named(make_rig):
    rig = make_rig()
    rig.publish(0)
    rig.lease()
    answer = rig.store.batches.reserve(0, 7.0)
    assert isinstance(answer, NotReady) and "group 0 with 0 of 2 samples, leased by w for 7 s" in answer.why


def test_wait_does_not_pass_a_straggler_that_would_become_too_old(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    straggler, *rest = rig.lease()
    rig.put_all(rest)
    assert members(rig.store.batches.reserve(0, 0.0)) == [1, 2]  # group 0 can still meet step 1
    rig.store.batches.commit(0)
    rig.publish(1)
    rig.put_all(rig.lease())
    answer = rig.store.batches.reserve(1, 7.0)
    assert isinstance(answer, NotReady) and "group 0 with 0 of 2 samples, leased by w for 7 s" in answer.why
    rig.put_all([straggler])
    assert members(rig.store.batches.reserve(1, 7.0)) == [0, 3]


def test_drop_gives_up_a_straggler_and_replaces_it(make_rig):
    rig = make_rig(max_staleness=1, on_straggler="drop")
    rig.publish(0)
    straggler, *rest = rig.lease()
    rig.put_all(rest)
    rig.store.batches.reserve(0, 0.0)
    rig.store.batches.commit(0)
    rig.publish(1)
    rig.put_all(rig.lease())
    assert members(rig.store.batches.reserve(1, 0.0)) == [3, 4]
    assert [dropped.group for dropped in rig.of(GroupDropped)] == [0]
    assert rig.store.delivery.put("w", [rig.header(straggler, 0)], 0.0).code == "fenced"
    assert [group.group_id for group in rig.lease()] == [6]


def test_mask_passes_a_straggler(make_rig):
    rig = make_rig(max_staleness=1, on_straggler="mask")
    rig.publish(0)
    straggler, *rest = rig.lease()
    rig.put_all(rest)
    for step, expected in [(0, [1, 2]), (1, [3, 4])]:
        assert members(rig.store.batches.reserve(step, 0.0)) == expected
        rig.store.batches.commit(step)
        rig.publish(step + 1)
        rig.put_all(rig.lease())
    rig.put_all([straggler])
    assert members(rig.store.batches.reserve(2, 0.0)) == [0, 5]


def test_younger_tokens_than_promised_loosen_a_deadline(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    groups = rig.lease()
    rig.put_all(groups[1:])
    rig.store.batches.reserve(0, 0.0)
    rig.store.batches.commit(0)
    rig.publish(1)
    for sample in groups[0].samples:
        header = rig.header(groups[0], sample, versions=[VersionRun(Version(0, 1), 0, 2)])
        rig.store.delivery.put("w", [header], 0.0)
    rig.put_all(rig.lease())
    assert members(rig.store.batches.reserve(1, 0.0)) == [0, 3]


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
    rig.store.batches.reserve(0, 0.0)
    assert rig.store.retire(1).code == "wrong_step"
    rig.store.batches.commit(0)
    assert rig.store.retire(1) == rig.store.retire(1) == Done()
    status = rig.store.status(0.0)
    assert (status.committed, status.payload_bytes, status.slots_used) == (0, 40, 4)
    rig.publish(1)
    assert rig.store.status(0.0).slots_used == 2
    assert rig.store.batches.reserve(0, 0.0).code == "wrong_step"
    assert rig.store.batches.commit(0) == Done()


def test_a_resume_forgets_that_the_bound_was_tightened(make_rig):
    rig = make_rig(max_staleness=2)
    rig.publish(0)
    rig.store.batches.tighten(0)
    assert isinstance(rig.store.resume(0, 1, b""), Resumed)
    rig.publish(0, lineage=1)
    assert len(rig.lease()) == 6


def test_resume_repeats_batches_with_the_same_trajectories(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    batches = [train_step(rig, step) for step in range(4)]
    rig.store.retire(2)
    resumed = rig.store.resume(2, 1, b"")
    assert isinstance(resumed, Resumed)
    assert rig.store.resume(2, 1, b"") == resumed
    assert rig.lease() == []  # nothing is published
    assert rig.store.publish(Version(0, 5), []).code == wire.REPLACED
    rig.publish(2, lineage=1)
    assert rig.store.batches.reserve(2, 0.0) == batches[2]
    assert rig.lease() == []  # four groups trained again and their successors hold all slots
    rig.store.batches.commit(2)
    rig.publish(3, lineage=1)
    assert rig.store.batches.reserve(3, 0.0) == batches[3]
    rig.store.batches.commit(3)
    rig.publish(4, lineage=1)
    train_step(rig, 4, lineage=1)


def test_resume_behind_the_published_version_fences_what_is_being_generated(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    train_step(rig, 0)
    in_flight = rig.lease()
    rig.store.resume(0, 1, b"")
    assert rig.store.delivery.put("w", [rig.header(in_flight[0], 0)], 0.0).code == "fenced"
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
    assert members(rig.store.batches.reserve(1, 0.0)) == [2, 3]


def test_resume_before_what_is_retired_is_refused(make_rig):
    rig = make_rig()
    rig.publish(0)
    for step in range(2):
        train_step(rig, step)
    rig.store.retire(2)
    assert rig.store.resume(1, 1, b"").code == "wrong_step"
    assert rig.store.resume(3, 1, b"").code == "wrong_step"
    assert isinstance(rig.store.resume(2, 1, b""), Resumed)
    assert rig.store.resume(2, 0, b"").code == wire.REPLACED


def test_a_fresh_queue_restores_a_snapshot(make_rig):
    old = make_rig(max_staleness=1)
    old.publish(0)
    train_step(old, 0)
    old.put_all(old.lease())
    reserved = old.store.batches.reserve(1, 0.0)  # fixed ahead of time, not trained
    snapshot = old.store.batches.snapshot()
    rig = make_rig(max_staleness=1)
    assert rig.store.resume(1, 3, snapshot) == Resumed(kept=0, readmitted=4)
    (event,) = rig.of(RolledBack)
    assert event.fresh and event.next_group == 6
    rig.publish(1, lineage=3)
    leased = rig.lease()
    assert [group.group_id for group in leased] == [2, 3, 4, 5]
    assert [group.task.task_id for group in leased] == ["t2", "t3", "t4", "t5"]
    rig.put_all(list(reversed(leased)))
    assert members(rig.store.batches.reserve(1, 0.0)) == members(reserved)
    rig.store.batches.commit(1)
    rig.publish(2, lineage=3)
    assert [group.group_id for group in rig.lease()] == [6, 7]


def test_a_fresh_queue_needs_a_good_snapshot(make_rig):
    rig = make_rig()
    assert rig.store.resume(3, 1, b"").code == "no_snapshot"
    assert rig.store.resume(3, 1, b"nonsense").code == "bad_snapshot"
    assert rig.store.resume(0, 1, b"") == Resumed(kept=0, readmitted=0)
    rig.publish(0, lineage=1)
    assert len(rig.lease()) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": b"junk"},
        {"next_group": -1},
        {"next_group": 1 << 62},
        {"groups": [4]},
        {"groups": [2, 2]},
        {"groups": [-1]},
        {"step": 0},
    ],
)
def test_a_snapshot_that_makes_no_sense_is_refused_and_changes_nothing(make_rig, change: dict[str, Any]):
    rig = make_rig()
    good = {"cursor": b"4", "next_group": 4, "groups": [2, 3], "step": 1}

    def resume(values: dict[str, Any]):
        groups = [ReadmittedGroup(group=g, task=numbered(g), step=values["step"]) for g in values["groups"]]
        snapshot = QueueSnapshot(next_group=values["next_group"], cursor=values["cursor"], groups=groups)
        return rig.store.resume(1, 1, msgspec.msgpack.encode(snapshot))

    before = rig.store.dump()
    assert resume(good | change).code == "bad_snapshot"
    assert rig.store.dump() == before and rig.seen == []
    assert resume(good) == Resumed(kept=0, readmitted=2)
    rig.publish(1, lineage=1)
    assert [group.group_id for group in rig.lease()] == [2, 3, 4, 5]


def test_a_resume_at_a_negative_step_is_refused(make_rig):
    assert make_rig().store.resume(-1, 1, b"").code == "no_snapshot"
    snapshot = msgspec.msgpack.encode(QueueSnapshot(next_group=0, cursor=b"0", groups=[]))
    assert make_rig().store.resume(-1, 1, snapshot).code == "bad_snapshot"
    assert make_rig().store.resume(1, 1, snapshot) == Resumed(kept=0, readmitted=0), "nothing was admitted before it"


def test_snapshot_holds_what_is_not_trained(make_rig):
    rig = make_rig(max_staleness=1)
    rig.publish(0)
    train_step(rig, 0)
    snapshot = msgspec.msgpack.decode(rig.store.batches.snapshot(), type=QueueSnapshot)
    assert (snapshot.next_group, [group.group for group in snapshot.groups]) == (4, [2, 3])
    assert snapshot.cursor == b"4"


def test_resume_forgets_evaluations(make_rig):
    rig = make_rig(max_staleness=0)
    rig.publish(0)
    rig.store.evals.open(1)
    groups = rig.lease(max_groups=2)
    rig.store.resume(0, 1, b"")
    assert rig.store.delivery.put("w", [rig.header(groups[0], 0)], 0.0).code == "fenced"
    assert rig.store.evals.open(1) == Done()


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
    rig.store.delivery.renew("w", 0.0)
    first = rig.store.delivery.lease("w", 2, 0.0, b"one")
    other = recovered(make_rig, rig, max_attempts=1)
    assert other.store.delivery.lease("w", 2, 100.0, b"one") == first
    assert other.of(LeaseLost) == [] and len(other.lease(max_groups=1)) == 1
    other.store.delivery.fail("w", 0, 0, 0, "boom", 100.0)
    assert [group.group_id for group in other.store.delivery.lease("w", 2, 100.0, b"one").groups] == [1]


def test_a_queue_that_remembers_less_than_the_checkpoint_starts_from_it(make_rig):
    """A power cut took the end of the journal; the checkpoint had been forced to disk."""
    rig = make_rig()
    rig.publish(0)
    train_step(rig, 0)
    known = list(rig.seen)
    train_step(rig, 1)
    snapshot = rig.store.batches.snapshot()
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
    rig.store.engines.register("e0", "http://a", "embedded")
    rig.publish(0)
    rig.lease()
    rig.store.finish()
    other = recovered(make_rig, rig)
    other.store.relaunch()
    assert other.store.engine_list().engines == []
    assert other.store.engines.register("e0", "http://elsewhere", "embedded") == Done()
    status = other.store.status(100.0)
    assert (status.finished, status.leased, status.waiting) == (False, 0, 4)
    assert other.lease() == [], "nothing is published yet"
    assert isinstance(other.store.resume(0, 1, b""), Resumed)
    other.publish(0, lineage=1)
    assert [group.attempt for group in other.lease()] == [1, 1, 1, 1]
    seen = rig.seen + other.seen
    assert recovered(make_rig, rig, seen).store.dump() == other.store.dump()


def test_a_run_that_gets_shards_generates_again_what_the_queue_had_kept_itself(make_rig):
    rig = make_rig()
    rig.publish(0)
    group = rig.lease()[0]
    rig.put_all([group])
    for replicas, lost in ((0, []), (1, [[(group.group_id, 0), (group.group_id, 1)]])):
        other = recovered(make_rig, rig, replicas=replicas)
        other.store.relaunch()
        assert [event.samples for event in other.of(ShardLost)] == lost
        assert other.store.status(100.0).ready == 1 - len(lost)


def test_a_run_that_ends_says_which_groups_it_leaves(make_rig):
    rig = make_rig(max_staleness=1, steps=3)
    rig.publish(0)
    train_step(rig, 0)
    shorter = make_rig(max_staleness=1, steps=1)
    assert shorter.store.resume(1, 1, rig.store.batches.snapshot()) == Resumed(kept=0, readmitted=2)
    shorter.publish(1, lineage=1)
    shorter.store.finish()
    (finished,) = shorter.of(RunFinished)
    assert finished.left == [2, 3]
    train_step(rig, 1)
    train_step(rig, 2)
    rig.store.finish()
    assert rig.of(RunFinished)[0].left == []


@pytest.mark.parametrize("way", ["journal", "dump", "snapshot"])
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, 1), (4, 3), (2, 4), (3, 4)])
@pytest.mark.parametrize("on_straggler", ["wait", "drop"])
def test_a_resumed_run_may_have_batches_of_another_size(make_rig, before, after, bound, way, on_straggler):
    """Each step to come has its batch, whatever was sampled ahead, reserved or half finished, and the bound holds."""
    settings = {"max_staleness": bound, "steps": 7, "on_straggler": on_straggler}
    rig = make_rig(**settings, batch_groups=before)
    rig.publish(0)
    for step in range(2):
        train_step(rig, step)
    snapshot = rig.store.batches.snapshot()
    groups = rig.lease()
    rig.put_all(groups[:before])
    assert isinstance(rig.store.batches.reserve(2, 0.0), Reserved)
    for group in groups[before:]:  # one sample of two, and then its worker dies with the queue
        rig.store.delivery.put("w", [rig.header(group, 0)], rig.now)
    other = make_rig(**settings, batch_groups=after)
    if way == "journal":
        other.store.recover(b"", rig.seen, 0.0)
    elif way == "dump":
        other.store.recover(rig.store.dump(), [], 0.0)
    other.store.relaunch()
    assert isinstance(other.store.resume(2, 1, snapshot), Resumed)
    other.publish(2, 1)
    for step in range(2, 7):
        other.put_all(other.lease())
        other.store.batches.reserve(step, 0.0)  # gives up what is too old for smaller batches
        batch = train_step(other, step, 1)
        assert len(members(batch)) == after
        assert min(run.version.step for header in batch.headers for run in header.versions) >= step - bound
    assert all(group.group_id < (bound + 3) * before for group in other.lease()), (
        "nothing is admitted that nobody needs"
    )


def test_a_run_resumed_with_fewer_steps_admits_nothing_beyond_them(make_rig):
    rig = make_rig(max_staleness=0, steps=10)
    rig.publish(0)
    train_step(rig, 0)
    other = recovered(make_rig, rig, max_staleness=0, steps=2)
    other.store.relaunch()
    other.store.resume(1, 1, b"")
    other.publish(1, 1)
    train_step(other, 1, 1)
    assert other.lease() == []
