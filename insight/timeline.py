"""The timeline of a run: the activities of each process over time, for the page (``rl-async view``) and ``rl-async
trace``.

Lanes of spans are pure functions of the records, and only parts are read: the page draws a window of bounded size
however long the run is and however many episodes play at once; a trace covers some steps, in Perfetto's format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). To show another kind of activity,
record it (``rl_async.process.run_files``, or an ``Activity`` of an episode) and give it a lane.
"""

import gzip
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rl_async.errors import UserError
from rl_async.files import undamaged
from rl_async.insight.doctor import launcher_of
from rl_async.insight.tail import LineTail
from rl_async.messages import Activity
from rl_async.process.run_files import Entered, read_timeline
from rl_async.recording import evaluations, files_of_step

Kind = Literal[
    "wait", "train", "sync", "checkpoint", "generate", "tool", "environment", "reward", "start", "down", "other"
]

# Writers whose lanes are other processes.
LAUNCHER, WEIGHTS = "launcher", "weights"
AGENTS, ENGINES = "agent workers", "engines"
PHASES: dict[str, Kind] = {
    "starting": "start",
    "waiting for a batch": "wait",
    "training": "train",
    "meeting the ranks": "wait",
    "publishing": "sync",
    "checkpointing": "checkpoint",
    "reporting": "other",
    "evaluating the final weights": "wait",
}
STATES: dict[str, Kind] = {"starting": "start", "restarting": "down", "failed": "down"}
ENDED = ("restarting", "ended", "failed")
# The process and the title of the lane for each kind of activity.
ROWS: dict[str, tuple[str, str]] = {
    "tool": (AGENTS, "tools"),
    "environment": (AGENTS, "environments"),
    "reward": (AGENTS, "rewards"),
}


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One activity, from ``began`` to ``ended`` in Unix seconds.

    ``step`` is the step that it belongs to, or that trained its episode; ``key`` is the page's key of its trajectory.
    """

    began: float
    ended: float
    kind: Kind
    name: str
    step: int = -1
    key: str = ""
    about: str = ""


class Lane(msgspec.Struct, frozen=True):
    """Spans of one process, in rows without overlaps."""

    process: str
    title: str
    rows: Sequence[Sequence[Span]]


class Played(msgspec.Struct, frozen=True):
    """The part of a recorded row that the timeline reads."""

    group_id: int
    sample: int
    segment: int = 0
    activities: list[Activity] = []


def process_lanes(entered: Sequence[Entered], until: float) -> list[Lane]:
    """Return the lanes of all entries, given oldest first, sorted by ``place``.

    A span without a recorded end lasts until the end of its process, or ``until``.
    """
    ends: dict[str, list[float]] = {}
    by_lane: dict[tuple[str, str], list[Entered]] = {}
    for one in entered:
        if one.writer == LAUNCHER and one.stage in ENDED:
            ends.setdefault(one.lane, []).append(one.at)
        by_lane.setdefault((one.writer, one.lane), []).append(one)
    trainer = sorted(at for process, times in ends.items() if process.startswith("trainer-") for at in times)
    rows: dict[tuple[str, str], list[Span]] = {}
    for (writer, lane), lines in by_lane.items():
        process = process_of(lane)
        limits = [] if writer == LAUNCHER else ends.get(process, []) + (trainer if writer == WEIGHTS else [])
        title = {LAUNCHER: "process", WEIGHTS: "weights"}.get(writer, "phase")
        kinds = {LAUNCHER: STATES, WEIGHTS: {}}.get(writer, PHASES)
        rows.setdefault((process, title), []).extend(_spans(lines, kinds, title, limits, until))
    lanes = [Lane(process, title, [sorted(spans, key=lambda s: s.began)]) for (process, title), spans in rows.items()]
    return sorted((lane for lane in lanes if lane.rows[0]), key=place)


def _spans(
    lines: Sequence[Entered], kinds: Mapping[str, Kind], title: str, limits: Iterable[float], until: float
) -> Iterable[Span]:
    ordered = sorted(limits)
    for one, after in pairwise([*lines, None]):
        assert one is not None
        kind = kinds.get(one.stage, _kind_of_rest(title, one.stage))
        if kind is None:
            continue
        end = min((at for at in ordered if at > one.at), default=until)
        end = min(end, until if after is None else after.at)
        name = f"{one.stage}, {one.version}" if one.version else one.stage
        yield Span(one.at, max(one.at, end), kind, name, one.step, "", one.about)


def _kind_of_rest(title: str, stage: str) -> Kind | None:
    """Return the kind of a stage that the tables do not name, or None if it is not drawn."""
    if title == "process" or not stage:
        return None
    if title == "weights":
        return "wait" if stage == "asleep" else "sync"
    return "other"


def episode_lanes(spans: Iterable[tuple[str, Span]]) -> list[Lane]:
    """Return lanes of the spans of ``activities``, each with as many rows as were busy at once."""
    found: dict[tuple[str, str], list[Span]] = {}
    for engine, span in spans:
        lane = ROWS.get(span.kind, (process_of(engine) or ENGINES, "generate"))
        found.setdefault(lane, []).append(span)
    return sorted((Lane(process, title, packed(spans)) for (process, title), spans in found.items()), key=place)


def activities(played: Played, partition: str, step: int) -> list[tuple[str, Span]]:
    """Return the spans of an episode, each with the engine that sampled it, or an empty string for other kinds."""
    key = f"{partition}-{step}-{played.group_id}-{played.sample}-{played.segment}"
    episode = f"{played.group_id}.{played.sample}"
    return [
        (
            one.name if one.kind == "generate" else "",
            Span(
                one.began,
                one.began + one.seconds,
                one.kind,
                f"{one.name} {episode}" if one.kind == "tool" else episode,
                step,
                key,
                "" if partition == "train" else "held out",
            ),
        )
        for one in played.activities
    ]


def packed(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over rows without overlaps, each to the first row that is free."""
    rows: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda span: (span.began, span.ended, span.name)):
        while busy and busy[0][0] <= span.began:
            heappush(free, heappop(busy)[1])
        row = heappop(free) if free else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        heappush(busy, (span.ended, row))
    return rows


def thinned(spans: Sequence[Span], width: float) -> list[Span]:
    """Join neighbours that are shorter than ``width`` seconds and less than that apart, so that about two spans at most
    remain per ``width``. A joined span has the kind that took most of its time."""
    found: list[Span] = []
    short: list[Span] = []
    for span in spans:
        if short and (span.began - short[-1].ended > width or short[-1].ended - short[0].began > width):
            found.append(_joined(short))
            short = []
        if span.ended - span.began < width:
            short.append(span)
            continue
        if short:
            found.append(_joined(short))
            short = []
        found.append(span)
    return [*found, _joined(short)] if short else found


def _joined(spans: Sequence[Span]) -> Span:
    if len(spans) == 1:
        return spans[0]
    took: dict[Kind, float] = {}
    for span in spans:
        took[span.kind] = took.get(span.kind, 0.0) + span.ended - span.began
    kind = max(took, key=lambda kind: took[kind])
    return Span(spans[0].began, spans[-1].ended, kind, f"{len(spans)} short spans", spans[-1].step)


def process_of(lane: str) -> str:
    """Return the process of an engine's id, such as engine-0 for engine-0.1, its second start."""
    return lane.partition(".")[0]


ORDER = ("trainer", "engine", "agent", "worker", "gateway", "reward", "queue", "shard")
TITLES = ("process", "phase", "weights", "generate", "tools", "environments", "rewards")


def place(lane: Lane) -> tuple[int, int, str, int]:
    """Return the sort key of a lane: trainer ranks first, then engines, then processes that play episodes."""
    role, _, number = lane.process.partition("-")
    first = next((place for place, name in enumerate(ORDER) if role.startswith(name)), len(ORDER))
    return first, int(number) if number.isdigit() else 0, lane.process, TITLES.index(lane.title)


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """The newest update of one engine's weights.

    ``stage`` is empty once the update is over; ``began`` and ``ended`` are the Unix times of its first and its last
    recorded stage.
    """

    process: str
    version: str
    stage: str
    began: float
    ended: float


def newest_updates(entered: Iterable[Entered]) -> list[Update]:
    """Return the newest update of each engine, sorted by process, from entries given oldest first."""
    newest: dict[str, Update] = {}
    for one in entered:
        if one.writer != WEIGHTS:
            continue
        process = process_of(one.lane)
        before = newest.get(process)
        goes_on = before is not None and before.stage and before.version == one.version
        began = before.began if before is not None and goes_on else one.at
        newest[process] = Update(process=process, version=one.version, stage=one.stage, began=began, ended=one.at)
    return [newest[process] for process in sorted(newest)]


# A span with the engine that sampled it, as ``activities`` returns them.
Placed = tuple[str, Span]
# This many files, and spans of each, are cached.
FILES = 64
MOST = 4000
FROM_METRICS: tuple[tuple[str, Kind, str], ...] = (
    ("waiting for a batch", "wait", "wait_batch"),
    ("training", "train", "train"),
    ("publishing", "sync", "sync"),
    ("checkpointing, reporting", "checkpoint", "checkpoint"),
)


class Timeline(NamedTuple):
    """The lanes of all processes, and the time of each step, from its wait for a batch to its report.

    ``until`` is the present time or, for an ended run, the end of its records.
    """

    lanes: list[Lane]
    steps: dict[int, tuple[float, float]]
    until: float
    running: bool


def read_processes(run: Path, entered: Sequence[Entered]) -> Timeline:
    """Return the timeline of a run's processes from the entries in its timeline files.

    Earlier steps, which these files no longer hold, are taken from ``metrics.jsonl``, for rank 0 only. Runs of older
    versions have no other record.
    """
    running = launcher_of(run) is not None
    old = _before(run / "metrics.jsonl", next((one for one in entered if one.step >= 0), None))
    last = max([*(one.at for one in entered), *(span.ended for span in old)], default=0.0)
    until = time.time() if running else last
    lanes = process_lanes(entered, until)
    phases = next((place for place, lane in enumerate(lanes) if lane.title == "phase"), None)
    if old and phases is None:
        lanes.insert(0, Lane("trainer-0", "phase", [old]))
    elif old and phases is not None:
        lanes[phases] = msgspec.structs.replace(lanes[phases], rows=[[*old, *lanes[phases].rows[0]]])
    steps: dict[int, tuple[float, float]] = {}
    for span in next((lane.rows[0] for lane in lanes if lane.title == "phase"), ()):
        if span.step >= 0 and span.kind != "start":
            began, ended = steps.get(span.step, (span.began, span.ended))
            # After a restart, a step begins again with its wait for a batch.
            again = span.kind == "wait" and span.began > ended + 1e-6
            steps[span.step] = (span.began, span.ended) if again else (began, max(ended, span.ended))
    return Timeline(lanes, steps, until, running)


def _before(metrics: Path, first: Entered | None) -> Sequence[Span]:
    """Return the steps of rank 0 that the timeline files no longer have, or never had."""
    if (first is not None and first.step <= 0) or not metrics.is_file():
        return ()
    return _from_metrics(metrics, first.at if first else float("inf"), 0 if first else metrics.stat().st_size)


@lru_cache(FILES)
def _from_metrics(metrics: Path, before: float, size: int) -> Sequence[Span]:
    """Read the steps that ended ``before``; ``size`` is part of the cache's key, so that a grown file is read again."""
    spans: list[Span] = []
    for record in LineTail(metrics).records():
        if "time" not in record or "time/step_s" not in record or record["time"] >= before:
            continue
        step, at = int(record["step"]), record["time"] - record["time/step_s"]
        for name, kind, metric in FROM_METRICS:
            took = record.get(f"time/{metric}_s", 0.0)
            spans.append(Span(at, at + took, kind, name, step))
            at += took
    return spans


def episodes(run: Path, steps: Iterable[int], most: int | None = None) -> tuple[list[Lane], int]:
    """Read the activities of the episodes of some steps, and of the evaluations of the versions with these numbers.

    From each file about ``most`` spans are taken: those of whole episodes, evenly chosen by their ends and including
    the last one. Also return the number of spans left out.
    """
    held_out, found, left = evaluations(run / "trajectories"), list[Placed](), 0
    for step in steps:
        files = [("train", file) for file in files_of_step(run / "trajectories", step)]
        files += [("eval", held_out[step])] if step in held_out else []
        for partition, file in files:
            stat = file.stat()
            spans, without = _played(file, (stat.st_mtime_ns, stat.st_size), partition, step, most)
            found += spans
            left += without
    return episode_lanes(found), left


@lru_cache(FILES)
def _played(
    file: Path, changed: tuple[int, int], partition: str, step: int, most: int | None
) -> tuple[Sequence[Placed], int]:
    """Read one file. ``changed`` is part of the cache's key: a resumed run rewrites its evaluations."""
    with undamaged(file), gzip.open(file, "rb") as opened:
        rows = [activities(msgspec.json.decode(line, type=Played), partition, step) for line in opened]
    rows = sorted((row for row in rows if row), key=lambda row: row[-1][1].ended)
    total = sum(map(len, rows))
    every = 1 if most is None else max(1, -(-total // most))
    kept = [placed for row in rows[::-1][::every] for placed in row]
    return kept, total - len(kept)


# The page shows this many steps at first, and the episodes of at most DETAILED steps.
NEWEST_OF_PAGE = 6
DETAILED = 24
# Episodes that are trained up to this many steps after a window may have begun within it.
LATER = 4
# A window is divided into this many parts, and no span shorter than one is drawn alone.
PIXELS = 2000


def window(run: Path, entered: Sequence[Entered], began: float | None, ended: float | None) -> dict[str, Any]:
    """Return the lanes between two Unix times, by default around the newest steps, from the entries of processes.

    Episodes are included unless the window has more than DETAILED steps. ``left_out`` counts their missing spans.
    """
    timeline = read_processes(run, entered)
    known = sorted(timeline.steps)
    first = min((row[0].began for lane in timeline.lanes for row in lane.rows), default=timeline.until)
    newest = timeline.steps[known[-NEWEST_OF_PAGE:][0]][0] if known else first
    last = timeline.until if timeline.running or not known else timeline.steps[known[-1]][1]
    since, until = newest if began is None else began, last if ended is None else ended
    within = [step for step in known if timeline.steps[step][1] > since and timeline.steps[step][0] <= until]
    lanes = [_cut(lane, since, until) for lane in timeline.lanes]
    left = 0
    if within and len(within) <= DETAILED:
        wanted = [*within, *(step for step in known if within[-1] < step <= within[-1] + LATER)]
        played, left = episodes(run, wanted, MOST)
        lanes += [_cut(lane, since, until) for lane in played]
    return {
        "from": since,
        "to": until,
        "began": first,
        "until": timeline.until,
        "running": timeline.running,
        "steps": [[step, *timeline.steps[step]] for step in within[:: max(1, -(-len(within) // PIXELS))]],
        "detailed": len(within) <= DETAILED,
        "left_out": left,
        "lanes": sorted((lane for lane in lanes if lane.rows), key=place),
    }


def _cut(lane: Lane, since: float, until: float) -> Lane:
    rows = [[span for span in row if span.ended > since and span.began <= until] for row in lane.rows]
    if len(rows) == 1:
        rows = [thinned(rows[0], (until - since) / PIXELS)]
    return Lane(lane.process, lane.title, [row for row in rows if row])


# A trace has this many steps by default.
NEWEST_OF_TRACE = 20
Event = dict[str, Any]


def write_trace(run: Path, out: Path, steps: range | None) -> str:
    """Write the trace of ``steps``, or of the newest, and describe its content. Raises UserError if it is empty."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run folder; name one, such as runs/NAME")
    timeline = read_processes(run, read_timeline(run))
    known = sorted(timeline.steps)
    chosen = known[-NEWEST_OF_TRACE:] if steps is None else [step for step in known if step in steps]
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
    # The first rank's training of each step, and the last span of each trained episode.
    trained: dict[int, Event] = {}
    last: dict[str, Event] = {}
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
    # Both ends are rounded, and not the duration, so that neighbours stay neighbours.
    began, ended = (round((at - zero) * 1e9) for at in (span.began, span.ended))
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
    """Return a point inside a slice for a flow to bind to."""
    return {"pid": event["pid"], "tid": event["tid"], "ts": round(event["ts"] + event["dur"] / 2, 3)}


def _named(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "ts": 0, "name": what, "args": args}
