"""Admission and the choice of a batch."""

import itertools
from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rl_async.configs.schema.algorithm import AlgorithmConfig, ShapingConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.transfer_queue.admission import (
    Candidate,
    Choice,
    Occupancy,
    QueueSettings,
    choose,
    is_blocked,
    is_short_of_bytes,
    may_admit,
    may_lease,
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
