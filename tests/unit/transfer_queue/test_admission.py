"""Admission, the choice of a batch, and sampling policies: what they prefer, and what deadlines force."""

import itertools
from collections import Counter
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_async.configs.schema.algorithm import AlgorithmConfig, ShapingConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.transfer_queue.admission import (
    ORDERS,
    Candidate,
    Choice,
    Occupancy,
    QueueSettings,
    Sampling,
    choose,
    is_blocked,
    is_short_of_bytes,
    may_admit,
    may_lease,
    seats_by_source,
    urgency,
)

SETTINGS = QueueSettings(steps=5, batch_groups=2, group_size=4, max_staleness=1, max_bytes=1000)


def load(**changes: int) -> Occupancy:
    values = {
        "slots": SETTINGS.slots,
        "alive": 0,
        "unreserved": 0,
        "wanted": 10,
        "expected_bytes": 0,
        "group_bytes": 100,
    }
    return Occupancy(**({"group_bytes": 100} | values | changes))


def test_settings_come_from_the_config():
    config = RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d", train_batch_groups=3),
        queue=QueueConfig(max_staleness=4, on_straggler="drop", lease_s=2.0),
    )
    settings = QueueSettings.of(config)
    assert (settings.batch_groups, settings.slots, settings.on_straggler, settings.lease_s) == (3, 15, "drop", 2.0)
    assert (settings.steps, settings.group_size, settings.eval_samples) == (100, 16, 1)


def test_a_replay_admits_one_batch_at_a_time_and_takes_it_whole() -> None:
    config = RunConfig(
        model=ModelConfig(path="m"),
        data=DataConfig(path="d", train_batch_groups=3),
        rollout=RolloutConfig(replay="runs/before"),
        queue=QueueConfig(max_staleness=4, sampling="freshest", window=5),
        algorithm=AlgorithmConfig(shaping=ShapingConfig(dynamic_sampling=True)),
    )
    settings = QueueSettings.of(config)
    assert settings.slots == settings.slots_at(4) == settings.batch_groups == 3
    assert (settings.sampling, settings.window, settings.max_refills) == ("fifo", 0, 0)
    assert settings.replays


def test_admission_stops_at_slots_run_length_and_bytes():
    assert may_admit(SETTINGS, load(alive=3))
    assert not may_admit(SETTINGS, load(alive=4))
    assert may_admit(SETTINGS, load(alive=1, slots=2)) and not may_admit(SETTINGS, load(alive=2, slots=2))
    assert may_admit(SETTINGS, load(unreserved=1, wanted=2))
    assert not may_admit(SETTINGS, load(unreserved=2, wanted=2))
    assert may_admit(SETTINGS, load(unreserved=2, expected_bytes=900))
    assert not may_admit(SETTINGS, load(unreserved=2, expected_bytes=901))
    assert may_admit(SETTINGS, load(unreserved=1, expected_bytes=10_000))


def test_shortness_of_bytes_is_told_from_other_reasons():
    assert is_short_of_bytes(SETTINGS, load(unreserved=2, expected_bytes=901))
    assert not is_short_of_bytes(SETTINGS, load(unreserved=2, expected_bytes=900))
    assert not is_short_of_bytes(SETTINGS, load(alive=4, unreserved=2, expected_bytes=901))
    assert not is_short_of_bytes(SETTINGS, load(wanted=2, unreserved=2, expected_bytes=901))


def test_a_new_group_needs_a_slot_among_those_with_tokens_and_one_begun_has_it():
    def may(active: int, oldest: int | None) -> bool:
        return may_lease(SETTINGS, active, oldest=oldest, published=2)

    assert may(3, None) and not may(4, None)
    assert may(4, 3) and not may(5, 3)
    assert may(5, 2), "its tokens are as old already, as after a resume with fewer slots"


def choice(candidates: list[Candidate], on_straggler: str = "wait", pinned: dict[int, int] | None = None) -> Choice:
    settings = QueueSettings(steps=5, batch_groups=2, group_size=4, on_straggler=on_straggler)  # type: ignore[arg-type]
    return choose(candidates, 0, 2, settings, pinned or {})


def test_the_most_urgent_ready_groups_are_taken():
    candidates = [Candidate(0, True, 2), Candidate(1, True, 1), Candidate(2, True, 1), Candidate(3, False, None)]
    assert choice(candidates) == Choice([1, 2], [], [])


def test_too_few_ready_groups_name_whom_they_wait_for():
    assert choice([Candidate(0, True, 0), Candidate(1, False, 1), Candidate(2, False, 0)]) == Choice([], [], [2, 1])


def test_a_straggler_at_its_deadline_blocks_is_dropped_or_passed():
    candidates = [Candidate(0, False, 0), Candidate(1, True, 1), Candidate(2, True, 1)]
    assert choice(candidates) == Choice([], [], [0])
    assert choice(candidates, "drop") == Choice([1, 2], [0], [])
    assert choice(candidates, "mask") == Choice([1, 2], [], [])


def test_seats_given_away_bring_deadlines_closer():
    candidates = [Candidate(0, True, 1), Candidate(1, True, 1), Candidate(2, False, 1)]
    assert choice(candidates) == Choice([0, 1], [], [])
    assert choice(candidates, pinned={1: 2}) == Choice([], [], [2])
    assert choice(candidates, pinned={2: 2}) == Choice([0, 1], [], [])


@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, 4)), max_size=9), st.sampled_from(["wait", "drop"]))
def test_what_is_left_can_always_meet_its_deadlines(groups, on_straggler):
    candidates = [
        Candidate(group, ready, 4 if ready and deadline is None else deadline)
        for group, (ready, deadline) in enumerate(groups)
    ]
    result = choice(candidates, on_straggler)
    assert len(result.take) in (0, 2)
    ready = {candidate.group for candidate in candidates if candidate.ready}
    assert set(result.take) <= ready and not set(result.drop) & ready
    if not result.take:
        return
    left = sorted(
        c.deadline
        for c in candidates
        if c.group not in {*result.take, *result.drop} and c.deadline is not None and not c.ready
    )
    for count, deadline in zip(itertools.count(1), left):
        assert count <= deadline * 2


@given(
    st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, 5)), max_size=14),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(1, 3),
)
def test_counts_of_groups_tell_just_what_the_choice_finds(groups, bound, step, batch_groups):
    settings = QueueSettings(steps=99, batch_groups=batch_groups, group_size=4, max_staleness=bound)
    ages = [(ready, 0 if ready and oldest is None else oldest) for ready, oldest in groups]
    counts = {
        ready: Counter(oldest for at, oldest in ages if at is ready and oldest is not None) for ready in (False, True)
    }
    candidates = [
        Candidate(group, ready, None if oldest is None else oldest + bound)
        for group, (ready, oldest) in enumerate(ages)
    ]
    enough = sum(ready for ready, _ in ages) >= batch_groups
    blocked = is_blocked(counts[False], counts[True], 0, step, settings)
    found = choose(candidates, step, batch_groups, settings, {})
    if enough:
        assert blocked == (not found.take)
    if blocked:
        assert not found.take and not found.drop


def test_counts_tell_nothing_of_pinned_groups_or_where_stragglers_are_not_waited_for():
    unfinished, ready = {0: 1}, {1: 2}
    assert is_blocked(unfinished, ready, 0, 1, SETTINGS)
    assert not is_blocked(unfinished, ready, 1, 1, SETTINGS)
    for other in ("drop", "mask"):
        assert not is_blocked(unfinished, ready, 0, 1, msgspec.structs.replace(SETTINGS, on_straggler=other))


SAMPLING_SETTINGS = QueueSettings(steps=99, batch_groups=2, group_size=1, max_staleness=4)
POLICIES: list[Sampling] = ["fifo", "freshest", "priority", "quota"]


def sampling_choice(
    candidates, sampling, *, step=0, window=0, pinned=None, on_straggler="wait", weights=None
) -> Choice:
    settings = QueueSettings(
        steps=99,
        batch_groups=2,
        group_size=1,
        max_staleness=4,
        sampling=sampling,
        window=window,
        on_straggler=on_straggler,
        weights=weights or {"a": ((0, 1.0),), "b": ((0, 1.0),)},
    )
    return choose(candidates, step, 2, settings, pinned or {})


def ready(group: int, deadline: int = 4, **more) -> Candidate:
    return Candidate(group, True, deadline, **more)


def test_each_policy_takes_what_its_name_says():
    groups = [ready(0, 3), ready(1, 3, priority=2.0), ready(2, 4), ready(3, 5, priority=1.0), ready(4, 5)]
    taken = {sampling: sampling_choice(groups, sampling).take for sampling in ("fifo", "freshest", "priority")}
    assert taken == {"fifo": [0, 1], "freshest": [3, 4], "priority": [1, 3]}


@pytest.mark.parametrize("sampling", ["freshest", "priority"])
def test_groups_whose_deadline_has_come_are_taken_whatever_is_preferred(sampling):
    due = ready(0, 0, priority=-1.0)
    assert 0 in sampling_choice([due, ready(1, 4), ready(2, 4)], sampling).take
    # One step further on there are two seats for three that are due by then: one of them must go now.
    soon = [ready(0, 1), ready(1, 1), ready(2, 1), ready(3, 4, priority=9.0), ready(4, 4, priority=8.0)]
    assert sampling_choice(soon, sampling).take == [3, 0]
    assert sampling_choice(soon, sampling, pinned={1: 1}).take in ([0, 1], [1, 0])


def test_a_quota_is_kept_and_waits_only_for_those_who_come():
    a = [ready(n, source="a") for n in range(3)]
    late_b = Candidate(5, False, 4, coming=True, source="b")
    assert sampling_choice([*a, ready(5, source="b")], "quota").take == [0, 5]
    assert sampling_choice([*a, late_b], "quota") == Choice([], [], [5])
    assert sampling_choice([*a, late_b._replace(coming=False)], "quota").take == [0, 1]
    assert sampling_choice([*a, ready(7, source="nobody's")], "quota").take == [0, 1]
    late_a = Candidate(6, False, 4, coming=True, source="a")
    assert sampling_choice([*a, late_a], "quota").take == [0, 1], "one of a source that has its share fills no seat"
    due = [ready(0, 0, source="a"), ready(1, 0, source="a")]
    assert sampling_choice([*due, late_b], "quota").take == [0, 1], (
        "a forced group needs no quota, and leaves nothing to wait for"
    )


def test_a_quota_follows_the_schedule_of_the_weights():
    groups = [ready(n, source="ab"[n % 2]) for n in range(6)]
    weights = {"a": ((0, 1.0), (10, 0.0)), "b": ((0, 0.0), (10, 1.0))}
    assert sampling_choice(groups, "quota", weights=weights).take == [0, 2]
    late = [group._replace(deadline=14) for group in groups]
    assert sampling_choice(late, "quota", weights=weights, step=5).take == [0, 1]
    assert sampling_choice(late, "quota", weights=weights, step=10).take == [1, 3]


def test_a_window_waits_for_the_head_of_the_line_unless_nobody_works_on_it():
    groups = [Candidate(0, False, 4), ready(1), ready(2), ready(3)]
    assert sampling_choice(groups, "fifo").take == [1, 2]
    assert sampling_choice(groups, "fifo", window=3).take == [1, 2]
    assert sampling_choice(groups, "fifo", window=2) == Choice([], [], [0])
    assert sampling_choice([groups[0]._replace(coming=False), *groups[1:]], "fifo", window=2).take == [1, 2]
    assert sampling_choice([ready(0), ready(1), ready(2, priority=5.0)], "priority", window=2).take == [0, 1]


def candidates_of(draw: list[tuple[bool, int | None, int, str, bool]]) -> list[Candidate]:
    return [
        Candidate(n, is_ready, 4 if is_ready and deadline is None else deadline, coming, float(priority), source)
        for n, (is_ready, deadline, priority, source, coming) in enumerate(draw)
    ]


CANDIDATES = st.lists(
    st.tuples(
        st.booleans(), st.none() | st.integers(0, 4), st.integers(0, 3), st.sampled_from(["a", "b", ""]), st.booleans()
    ),
    max_size=9,
).map(candidates_of)


def in_time(left: list[Candidate], pinned: dict[int, int]) -> bool:
    """Whether every group with a deadline finds a seat until then, counted step by step."""
    return all(
        sum(c.deadline is not None and c.deadline <= until for c in left)
        <= sum(2 - pinned.get(step, 0) for step in range(1, until + 1))
        for until in range(5)
    )


@given(
    CANDIDATES,
    st.sampled_from(POLICIES),
    st.sampled_from([0, 2, 3, 5]),
    st.sampled_from(["wait", "drop", "mask"]),
    st.dictionaries(st.integers(1, 4), st.integers(1, 2), max_size=2),
)
def test_no_policy_takes_what_is_not_eligible_or_leaves_what_must_go(groups, sampling, window, on_straggler, pinned):
    plain = sampling_choice(groups, "fifo", pinned=pinned, on_straggler=on_straggler)
    chosen = sampling_choice(groups, sampling, window=window, pinned=pinned, on_straggler=on_straggler)
    assert chosen == sampling_choice(groups[::-1], sampling, window=window, pinned=pinned, on_straggler=on_straggler)
    are_ready = {c.group for c in groups if c.ready}
    assert set(chosen.take) <= are_ready and len(set(chosen.take)) == len(chosen.take)
    if not plain.take:
        assert chosen == plain, "where the bound allows no batch, no policy has one"
        return
    if not chosen.take:
        assert chosen.blocked_by and not chosen.drop
        coming = {c.group for c in groups if not c.ready and c.coming}
        assert set(chosen.blocked_by) <= coming, "a batch waits for nobody who does not come"
        assert window or sampling == "quota"
        return
    assert len(chosen.take) == 2 and chosen.drop == plain.drop
    gone = {*chosen.take, *chosen.drop}
    left = [c for c in groups if c.group not in gone and (c.ready or on_straggler != "mask")]
    plain_left = [
        c for c in groups if c.group not in {*plain.take, *plain.drop} and (c.ready or on_straggler != "mask")
    ]
    assert in_time(left, pinned) or not in_time(plain_left, pinned)


@given(CANDIDATES, st.sampled_from(["freshest", "priority"]))
def test_the_choice_is_the_best_that_the_deadlines_allow(groups, sampling):
    chosen = sampling_choice(groups, sampling)
    order = ORDERS[sampling]
    allowed = [
        sorted(map(order, pair))
        for pair in combinations([c for c in groups if c.ready], 2)
        if in_time([c for c in groups if c not in pair], {})
    ]
    if not chosen.take or not allowed:  # nothing allowed: more were due than a step has seats, which the slots prevent
        return
    by_group = {c.group: c for c in groups}
    assert sorted(order(by_group[group]) for group in chosen.take) == min(allowed)


@given(CANDIDATES)
def test_first_in_first_out_is_earliest_deadline_first(groups):
    taken = sampling_choice(groups, "fifo").take
    assert not taken or taken == [c.group for c in sorted(groups, key=urgency) if c.ready][:2]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5).filter(any), st.integers(0, 30), st.integers(0, 1000))
def test_the_seats_of_data_sets_add_up(weights, seats, step):
    shares = {str(n): weight / sum(weights) for n, weight in enumerate(weights)}
    divided = seats_by_source(shares, seats, step)
    assert sum(divided.values()) == seats
    assert all(abs(count - shares[name] * seats) < 1 + 1e-6 for name, count in divided.items())


def test_over_many_steps_each_data_set_has_its_share():
    shares = {"a": 0.5, "b": 0.3, "c": 0.2, "off": 0.0}
    total: Counter[str] = Counter()
    for step in range(1000):
        total.update(seats_by_source(shares, 2, step))
    assert {name: total[name] for name in shares} == pytest.approx({"a": 1000, "b": 600, "c": 400, "off": 0}, abs=3)
