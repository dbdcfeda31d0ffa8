"""Going back to a checkpoint, and going on from a journal or in a new process."""

from typing import Any

import msgspec
import pytest

from rl_async.messages import Done, Reserved, Resumed, Version
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.batches import QueueSnapshot
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.transitions import LeaseLost, ReadmittedGroup, RolledBack, RunFinished, ShardLost
from tests.unit.transfer_queue.conftest import members, train_step


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
