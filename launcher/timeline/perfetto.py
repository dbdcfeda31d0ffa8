"""``rl-async trace``: the timeline of some steps in the trace event format, which Perfetto reads.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_async.errors import UserError
from rl_async.launcher.timeline.lanes import Lane, Span
from rl_async.launcher.timeline.recorded import Timeline, episodes, read_processes
from rl_async.process.run_files import read_timeline

NEWEST = 20  # steps, unless others are asked for
Event = dict[str, Any]


def write_trace(run: Path, out: Path, steps: range | None) -> str:
    """Write the trace of ``steps`` (None: of the newest), and say what it holds. Raises UserError if none is known."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run folder; name one, such as runs/NAME")
    timeline = read_processes(run, read_timeline(run))
    known = sorted(timeline.steps)
    chosen = known[-NEWEST:] if steps is None else [step for step in known if step in steps]
    if not chosen:
        has = f"it recorded steps {known[0]} to {known[-1]}" if known else "it recorded no step"
        raise UserError(f"--steps: {run} has nothing to show; {has}")
    played, _ = episodes(run, chosen)
    lanes = _between(timeline, chosen, played) + played
    events = list(trace_events(lanes))
    try:
        out.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    spans = sum(event["ph"] == "X" for event in events)
    return f"{out}: {spans} spans of steps {chosen[0]} to {chosen[-1]}; open it in https://ui.perfetto.dev"


def _between(timeline: Timeline, steps: Sequence[int], played: Sequence[Lane]) -> list[Lane]:
    """Return the part of the processes' lanes from the first episode of ``steps`` to the end of the last step."""
    starts = [row[0].began for lane in played for row in lane.rows]
    began = min([timeline.steps[steps[0]][0], *starts])
    ended = max(timeline.steps[step][1] for step in steps)
    found = []
    for lane in timeline.lanes:
        row = [span for span in lane.rows[0] if span.ended > began and span.began < ended]
        if row:
            found.append(Lane(lane.process, lane.title, [row]))
    return found


def trace_events(lanes: Sequence[Lane]) -> Iterator[Event]:
    """Yield the events of lanes: names, a slice for each span, and a flow from each trained episode to its batch.

    Times are microseconds since the first span. Lanes of one process are its threads, one for each row.
    """
    spans = [span for lane in lanes for row in lane.rows for span in row]
    zero = min((span.began for span in spans), default=0.0)
    processes = list(dict.fromkeys(lane.process for lane in lanes))
    trained: dict[int, Event] = {}  # by step, of the first rank
    last: dict[str, Event] = {}  # of each trained episode
    for order, process in enumerate(processes, start=1):
        yield _named("process_name", order, 0, name=process)
        yield _named("process_sort_index", order, 0, sort_index=order)
        rows = [
            (lane.title if len(lane.rows) == 1 else f"{lane.title} {number}", row)
            for lane in lanes
            if lane.process == process
            for number, row in enumerate(lane.rows, start=1)
        ]
        for thread, (title, row) in enumerate(rows, start=1):
            yield _named("thread_name", order, thread, name=title)
            yield _named("thread_sort_index", order, thread, sort_index=thread)
            for span in row:
                event = _slice(span, zero, order, thread)
                yield event
                if span.kind == "train":
                    trained.setdefault(span.step, event)
                elif span.key.startswith("train-") and event["ts"] >= last.get(span.key, event)["ts"]:
                    last[span.key] = event | {"step": span.step}
    for number, (key, event) in enumerate(last.items(), start=1):
        batch = trained.get(event["step"])
        if batch is not None:
            about = {"name": "trained", "cat": "episode", "id": number, "args": {"trajectory": key}}
            yield about | {"ph": "s"} | _inside(event)
            yield about | {"ph": "f", "bp": "e"} | _inside(batch)


def _slice(span: Span, zero: float, process: int, thread: int) -> Event:
    about = {"step": span.step, "trajectory": span.key, "about": span.about}
    began, ended = (round((at - zero) * 1e9) for at in (span.began, span.ended))  # so that neighbours stay neighbours
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": began / 1000,
        "dur": (ended - began) / 1000,
        "name": span.name,
        "cat": span.kind,
        "args": {name: value for name, value in about.items() if value not in ("", -1)},
    }


def _inside(event: Event) -> Event:
    """Return a place within a slice, to which a flow is bound."""
    return {"pid": event["pid"], "tid": event["tid"], "ts": round(event["ts"] + event["dur"] / 2, 3)}


def _named(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "ts": 0, "name": what, "args": args}
