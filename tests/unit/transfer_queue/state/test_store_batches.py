"""The store's rules for the trainer: batches, stragglers, publication and what retires."""

import pytest

from rl_async.messages import Done, NotReady, Reserved, Version, VersionRun
from rl_async.transfer_queue.transitions import GroupDropped, SamplesStored
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
