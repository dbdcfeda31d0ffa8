"""The exported trace against the trace event format: slices of a thread never overlap, flows join an episode to the
batch that it trained in, and the file holds the steps that were asked for."""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async.errors import UserError
from rl_async.launcher.cli.__main__ import main
from rl_async.launcher.timeline import episodes, read_processes, write_trace
from rl_async.messages import Activity
from rl_async.process.run_files import TIMELINE_FOLDER, Entered, read_timeline
from tests.conftest import make_rows
from tests.support.recordings import make_run, write_step

STEP_S = 10.0
BEGAN = 1_795_449_576.25


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
