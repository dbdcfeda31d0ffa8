"""The timeline: lanes of spans, the window that the page draws, and the trace."""

import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_async.errors import UserError
from rl_async.insight.timeline import (
    DETAILED,
    NEWEST_OF_PAGE,
    PHASES,
    PIXELS,
    Lane,
    Played,
    Span,
    activities,
    episode_lanes,
    episodes,
    newest_updates,
    packed,
    process_lanes,
    read_processes,
    thinned,
    window,
    write_trace,
)
from rl_async.launcher.cli.__main__ import main
from rl_async.messages import Activity
from rl_async.process import run_files
from rl_async.process.run_files import TIMELINE_FOLDER, Entered, read_timeline
from rl_async.recording import write_trajectories
from tests.conftest import make_rows
from tests.support.recordings import make_run, write_step


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


BEGAN = 1_795_449_576.25


def recorded(folder: Path, steps: int, length: float = 10.0) -> Path:
    """A run that waited and trained in turns, half of each step."""
    run = make_run(folder / "run", steps=0)
    lines = []
    for step in range(steps):
        at = BEGAN + step * length
        for stage, offset in (("waiting for a batch", 0.0), ("training", length / 2)):
            lines.append(Entered(writer="trainer-0", lane="trainer-0", at=at + offset, stage=stage, step=step))
    lines.append(Entered(writer="trainer-0", lane="trainer-0", at=BEGAN + steps * length))
    (run / TIMELINE_FOLDER).mkdir()
    (run / TIMELINE_FOLDER / "trainer-0.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return run


def play(run: Path, step: int, at: float) -> None:
    rows = make_rows(step)
    for row in rows:
        row.activities = [Activity("generate", "engine-0", at, 1.0), Activity("reward", "", at + 1.0, 0.5)]
    write_step(run, step, rows)


def test_it_begins_with_the_newest_steps_and_has_their_episodes(tmp_path: Path) -> None:
    run = recorded(tmp_path, 20)
    play(run, 19, BEGAN + 190.0)
    play(run, 3, BEGAN + 30.0)
    found = window(run, read_timeline(run), None, None)
    assert (found["from"], found["to"], found["running"]) == (BEGAN + 10 * (20 - NEWEST_OF_PAGE), BEGAN + 200.0, False)
    titles = [(lane.process, lane.title) for lane in found["lanes"]]
    assert titles == [("trainer-0", "phase"), ("engine-0", "generate"), ("agent workers", "rewards")]
    assert {span.step for lane in found["lanes"][1:] for row in lane.rows for span in row} == {19}
    assert [step for step, _, _ in found["steps"]] == list(range(20 - NEWEST_OF_PAGE, 20))


def test_episodes_that_train_later_are_in_the_window_in_which_they_played(tmp_path: Path) -> None:
    run = recorded(tmp_path, 20)
    play(run, 5, BEGAN + 42.0)
    lanes = window(run, read_timeline(run), BEGAN + 41.0, BEGAN + 44.0)["lanes"]
    assert ("engine-0", "generate") in [(lane.process, lane.title) for lane in lanes]
    assert all(lane.title == "phase" for lane in window(run, read_timeline(run), BEGAN + 51.0, BEGAN + 54.0)["lanes"])


def test_an_evaluation_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    file = run / "trajectories" / "eval-000000.jsonl.gz"
    for began in (10.0, 2000.0):
        (row,) = make_rows(0, groups=1, samples=1)
        row.partition, row.activities = "eval", [Activity("generate", "engine-0", began, 1.0)]
        write_trajectories(file, [row])
        (lane,), _ = episodes(run, [0])
        assert [span.began for span in lane.rows[0]] == [began]


def test_a_long_run_is_drawn_with_a_bounded_number_of_spans(tmp_path: Path) -> None:
    run = recorded(tmp_path, 20_000, length=2.0)
    play(run, 3, BEGAN)
    found = window(run, read_timeline(run), BEGAN, BEGAN + 40_000.0)
    (lane,) = found["lanes"]
    assert not found["detailed"] and len(found["steps"]) <= PIXELS and DETAILED < 20_000
    assert PIXELS / 4 < len(lane.rows[0]) <= 2 * PIXELS


def test_a_run_without_anything_has_no_lanes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert window(run, read_timeline(run), None, None)["lanes"] == []


def test_rows_of_before_activities_are_none(tmp_path: Path) -> None:
    run = recorded(tmp_path, 2)
    write_step(run, 0, make_rows(0))
    (file,) = (run / "trajectories").iterdir()
    lines = gzip.decompress(file.read_bytes()).replace(b'"activities"', b'"unknown"')
    file.write_bytes(gzip.compress(lines))
    assert [lane.title for lane in window(run, read_timeline(run), None, None)["lanes"]] == ["phase"]


def test_the_newest_update_of_an_engine_goes_through_stages() -> None:
    def entered(lane: str, at: float, stage: str, version: str, writer: str = "weights") -> Entered:
        return Entered(writer=writer, lane=lane, at=at, stage=stage, version=version)

    lines = [
        entered("engine-0", 1.0, "probe", "0.1"),
        entered("engine-1", 1.0, "probe", "0.1"),
        entered("engine-0", 2.0, "", "0.1"),
        entered("engine-1", 3.0, "", "0.1"),
        entered("engine-0", 4.0, "running", "", writer="launcher"),
        entered("engine-0", 5.0, "probe", "0.2"),
        entered("engine-0", 6.0, "update, bucket 1/2", "0.2"),
        entered("engine-1.1", time.time(), "pause", "0.2"),
    ]
    first, second = newest_updates(lines)
    assert (first.process, first.version, first.stage, first.began, first.ended) == (
        "engine-0",
        "0.2",
        "update, bucket 1/2",
        5.0,
        6.0,
    )
    assert (second.process, second.stage, second.began == second.ended) == ("engine-1", "pause", True)


STEP_S = 10.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 4 steps, each of 10 s: 4 s waiting, 5 s training; the step's episodes play in the 4 s."""
    folder = make_run(tmp_path / "run", steps=0)
    lines = []
    for step in range(4):
        at = BEGAN + step * STEP_S
        for stage, offset in (("waiting for a batch", 0.0), ("training", 4.0), ("publishing", 9.0)):
            lines.append(Entered(writer="trainer-0", lane="trainer-0", at=at + offset, stage=stage, step=step))
        rows = make_rows(step)
        for place, row in enumerate(rows):
            row.activities = [
                Activity("generate", f"engine-{place % 2}", at + 0.1 * place, 1.0 + 0.01 * place),
                Activity("tool", "shell", at + 2.0, 0.5),
                Activity("reward", "", at + 3.0, 0.125),
            ]
        write_step(folder, step, rows)
    lines.append(Entered(writer="trainer-0", lane="trainer-0", at=BEGAN + 4 * STEP_S))
    lines.append(Entered(writer="weights", lane="engine-0", at=BEGAN + 9.0, stage="pause", version="0.1"))
    lines.append(Entered(writer="weights", lane="engine-0", at=BEGAN + 9.5, version="0.1"))
    (folder / TIMELINE_FOLDER).mkdir()
    (folder / TIMELINE_FOLDER / "all.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return folder


def trace(run: Path, steps: range | None = None) -> list[dict[str, Any]]:
    out = run.with_name("trace.json")
    write_trace(run, out, steps)
    return list(json.loads(out.read_text())["traceEvents"])


def test_it_is_in_the_trace_event_format(run: Path) -> None:
    events = trace(run)
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["cat"], str)
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert rows.keys() == named
    for times in rows.values():
        times.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(times)), (
            "a slice within another"
        )
    assert sum(map(len, rows.values())) == 4 * 3 + 1 + 4 * 16 * 3


def test_every_trained_episode_flows_into_its_batch(run: Path) -> None:
    events = trace(run)
    slices = [event for event in events if event["ph"] == "X"]

    def under(flow: dict[str, Any]) -> dict[str, Any]:
        (found,) = (
            event
            for event in slices
            if (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
            and event["ts"] <= flow["ts"] <= event["ts"] + event["dur"]
        )
        return dict(found)

    starts = {event["id"]: under(event) for event in events if event["ph"] == "s"}
    ends = {event["id"]: under(event) for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys() and len(starts) == 4 * 16
    for number, start in starts.items():
        assert (start["cat"], ends[number]["cat"]) == ("reward", "train")
        assert start["args"]["step"] == ends[number]["args"]["step"]


def test_only_the_steps_that_are_asked_for_are_in_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = trace(run, range(1, 3))
    assert {event["args"]["step"] for event in events if event["ph"] == "X" and event["cat"] == "tool"} == {1, 2}
    assert max(event["ts"] for event in events) < 2 * STEP_S * 1e6
    assert main(["trace", str(run), str(run / "t.json"), "--steps", "2"]) == 0 and "step" in capsys.readouterr().out
    for wrong in ("7", "x", "1-y"):
        assert main(["trace", str(run), str(run / "t.json"), "--steps", wrong]) == 2
    with pytest.raises(UserError):
        write_trace(run.parent, run / "t.json", None)


def test_a_run_of_before_has_the_steps_of_its_metrics(run: Path) -> None:
    (run / TIMELINE_FOLDER / "all.jsonl").unlink()
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(3):
            record = {"step": step, "time": BEGAN + 10 * (step + 1), "time/step_s": 10, "time/wait_batch_s": 4}
            metrics.write(json.dumps(record | {"time/train_s": 5, "time/sync_s": 1}) + "\n")
    timeline = read_processes(run, read_timeline(run))
    assert timeline.steps[1] == (BEGAN + 10, BEGAN + 20) and not timeline.running
    (lane,) = timeline.lanes
    assert [(span.kind, span.ended - span.began) for span in lane.rows[0][:3]] == [
        ("wait", 4.0),
        ("train", 5.0),
        ("sync", 1.0),
    ]


def test_of_a_large_step_whole_episodes_are_shown_and_the_last_one(run: Path) -> None:
    whole, none_left = episodes(run, [0])
    assert none_left == 0 and sum(len(row) for lane in whole for row in lane.rows) == 48
    some, left = episodes(run, [0], most=12)
    spans = [span for lane in some for row in lane.rows for span in row]
    assert len(spans) == 12 and left == 36
    assert {sum(span.key == key for span in spans) for key in {span.key for span in spans}} == {3}
