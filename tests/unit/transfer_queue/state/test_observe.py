"""What a person sees of the queue: who holds what, for how long, what failed, how fast it goes."""

from rl_async.messages import FAILED, Done, GroupList, LeaseRecord, NotReady, Peeked, Refused
from rl_async.transfer_queue import store
from rl_async.transfer_queue.book import DEAD_LETTERS_KEPT, ERROR_SHOWN
from rl_async.transfer_queue.delivery import MOST_CAUSES
from rl_async.transfer_queue.store import Rates
from rl_async.transfer_queue.transitions import BatchReserved, GroupReady, SamplesStored


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
