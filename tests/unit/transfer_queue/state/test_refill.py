"""Dynamic sampling: groups that teach nothing are given up for others, within the allowance."""

import math

import pytest

from rl_async.configs.schema.algorithm import AlgorithmConfig, ShapingConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.messages import Done, NotReady, Reserved, Resumed
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import NO_SIGNAL
from rl_async.transfer_queue.transitions import GroupDropped


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


@pytest.mark.parametrize(("on", "expected"), [(True, 7), (False, 0)])
def test_settings_come_from_the_config(on, expected):
    shaping = ShapingConfig(dynamic_sampling=on, max_refills=7)
    config = RunConfig(
        model=ModelConfig(path="m"), data=DataConfig(path="d"), algorithm=AlgorithmConfig(shaping=shaping)
    )
    assert QueueSettings.of(config).max_refills == expected
