"""Reads what a run recorded of its time, in part: a window, or some steps."""

import gzip
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from rl_async.files import undamaged
from rl_async.launcher.doctor.observe import launcher_of
from rl_async.launcher.folder.tail import MetricsTail
from rl_async.launcher.timeline.lanes import Kind, Lane, Played, Span, activities, episode_lanes, process_lanes
from rl_async.process.run_files import Entered
from rl_async.recording import evaluations, files_of_step

Placed = tuple[str, Span]  # with the engine that sampled it
FILES = 64  # whose episodes are kept to be shown again
MOST = 4000  # spans of a file that are
FROM_METRICS: tuple[tuple[str, Kind, str], ...] = (
    ("waiting for a batch", "wait", "wait_batch"),
    ("training", "train", "train"),
    ("publishing", "sync", "sync"),
    ("checkpointing, reporting", "checkpoint", "checkpoint"),
)


class Timeline(NamedTuple):
    """The lanes of all processes, and when each step was trained: from its wait for a batch to its report."""

    lanes: list[Lane]
    steps: dict[int, tuple[float, float]]
    until: float  # now, or of an ended run the end of what was recorded
    running: bool


def read_processes(run: Path, entered: Sequence[Entered]) -> Timeline:
    """Return what the processes of a run did, from what they ``entered``.

    Of what is too old for that, ``metrics.jsonl`` has the steps of rank 0; runs of older versions have only these.
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
            again = span.kind == "wait" and span.began > ended + 1e-6  # after a restart
            steps[span.step] = (span.began, span.ended) if again else (began, max(ended, span.ended))
    return Timeline(lanes, steps, until, running)


def _before(metrics: Path, first: Entered | None) -> Sequence[Span]:
    """Return the steps of rank 0 that the timeline no longer has, or never had."""
    if (first is not None and first.step <= 0) or not metrics.is_file():
        return ()
    return _from_metrics(metrics, first.at if first else float("inf"), 0 if first else metrics.stat().st_size)


@lru_cache(FILES)
def _from_metrics(metrics: Path, before: float, size: int) -> Sequence[Span]:
    """Read the steps that ended ``before``; ``size`` is another where there may be more of them."""
    spans: list[Span] = []
    for record in MetricsTail(metrics).read():
        if "time" not in record or "time/step_s" not in record or record["time"] >= before:
            continue
        step, at = int(record["step"]), record["time"] - record["time/step_s"]
        for name, kind, metric in FROM_METRICS:
            took = record.get(f"time/{metric}_s", 0.0)
            spans.append(Span(at, at + took, kind, name, step))
            at += took
    return spans


def episodes(run: Path, steps: Iterable[int], most: int | None = None) -> tuple[list[Lane], int]:
    """Read what the episodes of some steps did, and of the evaluations of the versions of these numbers.

    Of each file at most ``most`` spans are taken: of whole episodes, evenly chosen by when they ended, with the last
    one. The second value counts the spans that were left out.
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
    """Read one file; ``changed`` is another once it was written again, as a resumed run does with an evaluation."""
    with undamaged(file), gzip.open(file, "rb") as opened:
        rows = [activities(msgspec.json.decode(line, type=Played), partition, step) for line in opened]
    rows = sorted((row for row in rows if row), key=lambda row: row[-1][1].ended)
    total = sum(map(len, rows))
    every = 1 if most is None else max(1, -(-total // most))
    kept = [placed for row in rows[::-1][::every] for placed in row]
    return kept, total - len(kept)
