"""What was recorded, as lanes of spans. Pure: the page and the export both draw these."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal

import msgspec

from rl_async.messages import Activity
from rl_async.process.run_files import Entered

Kind = Literal[
    "wait", "train", "sync", "checkpoint", "generate", "tool", "environment", "reward", "start", "down", "other"
]

LAUNCHER, WEIGHTS = "launcher", "weights"  # writers whose lanes are other processes
AGENTS, ENGINES = "agent workers", "engines"
PHASES: dict[str, Kind] = {
    "starting": "start",
    "waiting for a batch": "wait",
    "training": "train",
    "meeting the ranks": "wait",
    "publishing": "sync",
    "checkpointing": "checkpoint",
    "reporting": "other",
}
STATES: dict[str, Kind] = {"starting": "start", "restarting": "down", "failed": "down"}
ENDED = ("restarting", "ended", "failed")
ROWS: dict[str, tuple[str, str]] = {  # of activities: process and row
    "tool": (AGENTS, "tools"),
    "environment": (AGENTS, "environments"),
    "reward": (AGENTS, "rewards"),
}


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A time (Unix, in seconds) in which one thing was done."""

    began: float
    ended: float
    kind: Kind
    name: str
    step: int = -1  # that it belongs to; of an episode, the one that trained it
    key: str = ""  # of the trajectory, as the page names it
    about: str = ""


class Lane(msgspec.Struct, frozen=True):
    """Spans of one process; those of a row do not overlap."""

    process: str
    title: str
    rows: Sequence[Sequence[Span]]


class Played(msgspec.Struct, frozen=True):
    """A recorded row, as far as the timeline reads it."""

    group_id: int
    sample: int
    segment: int = 0
    activities: list[Activity] = []


def process_lanes(entered: Sequence[Entered], until: float) -> list[Lane]:
    """Return the lanes of everything that was ``entered`` (oldest first), in the order of ``place``.

    What has no end lasts until its process ended, or ``until``.
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
    """Return the kind of a stage without one of its own; None: it is not drawn."""
    if title == "process" or not stage:
        return None
    if title == "weights":
        return "wait" if stage == "asleep" else "sync"
    return "other"


def episode_lanes(spans: Iterable[tuple[str, Span]]) -> list[Lane]:
    """Return lanes of what ``activities`` gave, each with as many rows as were busy at once."""
    found: dict[tuple[str, str], list[Span]] = {}
    for engine, span in spans:
        lane = ROWS.get(span.kind, (process_of(engine) or ENGINES, "generate"))
        found.setdefault(lane, []).append(span)
    return sorted((Lane(process, title, packed(spans)) for (process, title), spans in found.items()), key=place)


def activities(played: Played, partition: str, step: int) -> list[tuple[str, Span]]:
    """Return the spans of an episode, each with the engine that sampled it (empty for others)."""
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
    """Deal spans to rows in which none overlaps another, each to the first row that is free."""
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
    """Join neighbours that are shorter than ``width`` (seconds) and less than that apart, so that at most about two
    spans remain per ``width``. A joined one has the kind that took most of its time."""
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
    """Return the process of an engine's id, such as engine-0 of engine-0.1, which is its second start."""
    return lane.partition(".")[0]


ORDER = ("trainer", "engine", "agent", "worker", "gateway", "reward", "queue", "shard")
TITLES = ("process", "phase", "weights", "generate", "tools", "environments", "rewards")


def place(lane: Lane) -> tuple[int, int, str, int]:
    """Return what lanes are sorted by: trainer ranks first, then engines, then who plays episodes."""
    role, _, number = lane.process.partition("-")
    first = next((place for place, name in enumerate(ORDER) if role.startswith(name)), len(ORDER))
    return first, int(number) if number.isdigit() else 0, lane.process, TITLES.index(lane.title)
