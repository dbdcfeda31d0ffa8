"""Lanes of spans from what was recorded: what ends what, what overlaps, and what is joined."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rl_async.launcher.timeline import (
    PHASES,
    Lane,
    Played,
    Span,
    activities,
    episode_lanes,
    packed,
    process_lanes,
    thinned,
)
from rl_async.messages import Activity
from rl_async.process import run_files
from rl_async.process.run_files import Entered


def entered(writer: str, lane: str, at: float, stage: str, step: int = -1, version: str = "") -> Entered:
    return Entered(writer=writer, lane=lane, at=at, stage=stage, step=step, version=version)


def shown(lanes: list[Lane]) -> dict[tuple[str, str], list[tuple[float, float, str, str]]]:
    return {
        (lane.process, lane.title): [(span.began, span.ended, span.kind, span.name) for span in lane.rows[0]]
        for lane in lanes
    }


def test_each_phase_of_a_rank_has_a_kind() -> None:
    assert set(PHASES) == set(run_files.PHASES)


def test_a_stage_lasts_until_the_next_one() -> None:
    lanes = process_lanes(
        [
            entered("weights", "engine-0", 3.5, "pause", version="0.1"),
            entered("trainer-0", "trainer-0", 1.0, "waiting for a batch", 0),
            entered("trainer-0", "trainer-0", 2.0, "training", 0),
            entered("trainer-0", "trainer-0", 3.0, "publishing", 0),
            entered("weights", "engine-0", 4.0, "", version="0.1"),
        ],
        until=9.0,
    )
    assert shown(lanes) == {
        ("trainer-0", "phase"): [
            (1.0, 2.0, "wait", "waiting for a batch"),
            (2.0, 3.0, "train", "training"),
            (3.0, 9.0, "sync", "publishing"),
        ],
        ("engine-0", "weights"): [(3.5, 4.0, "sync", "pause, 0.1")],
    }


def test_the_end_of_a_process_ends_what_it_did() -> None:
    lanes = process_lanes(
        [
            entered("launcher", "engine-0", 0.0, "running"),
            entered("trainer-0", "trainer-0", 1.0, "training", 4),
            entered("weights", "engine-0.1", 2.0, "pause"),
            entered("weights", "engine-1", 2.5, "pause"),
            entered("launcher", "engine-0", 3.0, "restarting"),
            entered("launcher", "trainer-0", 4.0, "ended"),
            entered("launcher", "engine-0", 5.0, "running"),
            entered("trainer-0", "trainer-0", 6.0, "starting", 4),
        ],
        until=7.0,
    )
    assert shown(lanes) == {
        ("trainer-0", "phase"): [(1.0, 4.0, "train", "training"), (6.0, 7.0, "start", "starting")],
        ("engine-0", "process"): [(3.0, 5.0, "down", "restarting")],
        ("engine-0", "weights"): [(2.0, 3.0, "sync", "pause")],
        ("engine-1", "weights"): [(2.5, 4.0, "sync", "pause")],  # the trainer's end ended it
    }


def test_an_episode_is_in_the_lanes_of_those_who_worked_on_it() -> None:
    played = Played(
        7,
        1,
        0,
        [
            Activity("generate", "engine-1.2", 1.0, 2.0),
            Activity("tool", "shell", 3.0, 0.5),
            Activity("generate", "", 3.5, 1.0),
            Activity("reward", "", 5.0, 0.25),
        ],
    )
    spans = activities(played, "train", 3)
    assert {span.key for _, span in spans} == {"train-3-7-1-0"} and {span.step for _, span in spans} == {3}
    assert shown(episode_lanes(spans)) == {
        ("engine-1", "generate"): [(1.0, 3.0, "generate", "7.1")],
        ("engines", "generate"): [(3.5, 4.5, "generate", "7.1")],
        ("agent workers", "tools"): [(3.0, 3.5, "tool", "shell 7.1")],
        ("agent workers", "rewards"): [(5.0, 5.25, "reward", "7.1")],
    }


TIMES = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), max_size=60)


@given(TIMES)
def test_no_row_overlaps_and_there_are_no_more_than_are_busy_at_once(times: list[tuple[float, float]]) -> None:
    spans = [Span(began, began + took, "tool", str(place)) for place, (began, took) in enumerate(times)]
    rows = packed(spans)
    assert sorted(int(span.name) for row in rows for span in row) == list(range(len(spans)))
    for row in rows:
        assert all(before.ended <= after.began for before, after in itertools.pairwise(row))
    busiest = max((sum(o.began <= s.began < o.ended or o is s for o in spans) for s in spans), default=0)
    assert len(rows) <= max(busiest, 1)


@given(TIMES, st.floats(0.5, 10))
def test_thinning_bounds_the_number_and_keeps_the_time(times: list[tuple[float, float]], width: float) -> None:
    spans, at = [], 0.0
    for gap, took in times:
        at += gap / 10
        spans.append(Span(at, at + took, "train" if took > 1 else "wait", "x"))
        at += took
    kept = thinned(spans, width)
    assert all(before.ended <= after.began for before, after in itertools.pairwise(kept))
    assert [span for span in spans if span.ended - span.began >= width] == [
        span for span in kept if span in spans and span.ended - span.began >= width
    ]
    if spans:
        assert (kept[0].began, kept[-1].ended) == (spans[0].began, spans[-1].ended)
        assert len(kept) <= 3 + 2 * (spans[-1].ended - spans[0].began) / width


def test_a_joined_span_has_the_kind_that_took_longest() -> None:
    spans = [Span(0.0, 0.1, "wait", "a"), Span(0.1, 0.4, "sync", "b"), Span(0.4, 0.5, "wait", "c")]
    (joined,) = thinned(spans, 1.0)
    assert (joined.began, joined.ended, joined.kind) == (0.0, 0.5, "sync") and "3" in joined.name
