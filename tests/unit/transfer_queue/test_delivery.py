"""The workers' side of the store: tasks of clients, draining, and groups without signal."""

import math

import pytest

from rl_async.configs.schema.algorithm import AlgorithmConfig, ShapingConfig
from rl_async.configs.schema.data import CurriculumConfig, DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.rollout import AgentConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.messages import Done, NotReady, Refused, Reserved, Resumed
from rl_async.transfer_queue import delivery
from rl_async.transfer_queue.admission import QueueSettings, passed_over
from rl_async.transfer_queue.delivery import MOST_SUBMITTED, NO_SIGNAL, GrowingTaskList, TaskList
from rl_async.transfer_queue.transitions import Admitted, GroupDropped, Requeued, Submitted
from tests.unit.transfer_queue.conftest import Rig, task


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
