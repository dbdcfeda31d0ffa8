"""Computes the contents of the live view, independently of a terminal: metrics, bars, summaries, a conversation."""

import gzip
import itertools
import math
import shlex
import statistics
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.files import UNDECODABLE, undamaged
from rl_async.insight.tail import LineTail, Record, record_of
from rl_async.messages import StatusReport, Turn
from rl_async.process.role import printable
from rl_async.recording import trained_file
from rl_async.transfer_queue import book as state_book

BARS = "▁▂▃▄▅▆▇█"
BLOCKS, MARK = " " + BARS, "○"
UNSCORED = "reward/unscored_fraction"
GIVEN_UP = "queue/dead_letters"
# This many of the newest steps are compared with earlier ones. A run is slower if its steps take SLOWER times as long
# and SLOWER_S longer.
NEWEST = 10
SLOWER, SLOWER_S = 3.0, 1.0
# At most this many earlier steps are kept, evenly spaced.
EARLIER = 100
# A queue whose flush takes this long keeps everybody waiting.
SLOW_FLUSH_S = 1.0
PHASES = {"waiting": "waiting for a batch", "training": "training", "syncing": "publishing weights to engines"}
TIMED = ("step_s", *PHASES, "tokens_per_s")


class RecordedConversation(msgspec.Struct):
    """The part of a recorded trajectory that the view shows; other fields of the line are skipped."""

    turns: list[Turn]
    reward: float
    finish_reason: str = ""
    error: str = ""


class Kept(msgspec.Struct):
    """The metrics that are kept of every step; others in the line are skipped."""

    step: int
    reward: float = msgspec.field(name="reward/mean", default=math.nan)
    staleness: float = msgspec.field(name="staleness/max", default=math.nan)
    held_out: float = msgspec.field(name="eval/reward", default=math.nan)
    unscored: float = msgspec.field(name=UNSCORED, default=math.nan)
    step_s: float = msgspec.field(name="time/step_s", default=math.nan)
    waiting: float = msgspec.field(name="time/wait_batch_s", default=math.nan)
    training: float = msgspec.field(name="time/train_s", default=math.nan)
    syncing: float = msgspec.field(name="time/sync_s", default=math.nan)
    tokens_per_s: float = msgspec.field(name="tokens/per_s", default=math.nan)


class Speeds:
    """The timings of the newest steps and, for comparison, of a bounded number of earlier ones."""

    def __init__(self) -> None:
        self._newest, self._earlier = ({name: array("f") for name in TIMED} for _ in range(2))
        self._every, self._passed = 1, 0

    def add(self, step: Kept) -> None:
        """Add the next step; the oldest of the newest ones becomes an earlier one."""
        for name, column in self._newest.items():
            column.append(getattr(step, name))
            if len(column) > NEWEST:
                passed = column.pop(0)
                if self._passed % self._every == 0:
                    self._earlier[name].append(passed)
        self._passed += len(self._newest["step_s"]) == NEWEST
        if len(self._earlier["step_s"]) > EARLIER:
            self._earlier = {name: column[::2] for name, column in self._earlier.items()}
            self._every *= 2

    @property
    def newest_s(self) -> list[float]:
        """The lengths of the newest steps, in seconds."""
        return [seconds for seconds in self._newest["step_s"] if not math.isnan(seconds)]

    @property
    def slower_phase(self) -> str:
        """The phase, a key of PHASES, by which the newest steps are slower than earlier ones; empty if they are not.

        Longer answers alone do not count, so the tokens per second must have fallen as well.
        """
        if len(self._earlier["step_s"]) < NEWEST:
            return ""
        before, now = self._medians()
        slower = now["step_s"] >= max(SLOWER * before["step_s"], before["step_s"] + SLOWER_S)
        if not (slower and SLOWER * now["tokens_per_s"] <= before["tokens_per_s"]):
            return ""
        return max(PHASES, key=lambda name: now[name] - before[name])

    def _medians(self) -> tuple[dict[str, float], dict[str, float]]:
        before, now = (
            {name: _median(column) for name, column in columns.items()} for columns in (self._earlier, self._newest)
        )
        return before, now

    @property
    def slowdown(self) -> str:
        """Describe by how much and by which phase the newest steps are slower than earlier ones; empty if they are
        not."""
        phase = self.slower_phase
        if not phase:
            return ""
        before, now = self._medians()
        return (
            f"steps take {now['step_s']:.1f} s, where earlier ones took {before['step_s']:.1f} s, most of it for "
            f"{PHASES[phase]} ({now[phase]:.1f} s, before {before[phase]:.1f} s)"
        )


def _median(values: Sequence[float]) -> float:
    """Return the median of the values without NaN, or 0 if none is left."""
    found = [value for value in values if not math.isnan(value)]
    return statistics.median(found) if found else 0.0


class History:
    """A few numbers of every step, and the newest whole record.

    After a resume, steps are trained again: the newest record of a step counts, and records of later steps are dropped.
    """

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns = {name: array("d") for name in ("reward", "staleness", "held_out", "unscored")}
        self.speeds = Speeds()
        self._last = b""

    def add(self, line: bytes) -> None:
        """Add a line of ``metrics.jsonl``."""
        kept, self._last = msgspec.convert(record_of(line), Kept, strict=False), line
        if self._steps and kept.step <= self._steps[-1]:
            place = bisect_left(self._steps, kept.step)
            del self._steps[place:]
            for column in self._columns.values():
                del column[place:]
        self._steps.append(kept.step)
        for name, column in self._columns.items():
            column.append(getattr(kept, name))
        self.speeds.add(kept)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last(self) -> Record | None:
        """The record of the newest step, or None before the first."""
        return record_of(self._last) if self._last else None

    def values(self, name: Literal["reward", "staleness", "held_out", "unscored"]) -> list[float]:
        """Return the values of the steps that have this number, oldest first."""
        return [value for value in self._columns[name] if not math.isnan(value)]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def sparkline(values: Sequence[float], width: int, low: float = 0.0, high: float = 1.0) -> str:
    """Draw one character per value, or per bucket of neighbouring values if there are more than ``width``."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    span = max(high - low, 1e-12)
    return "".join(BARS[min(len(BARS) - 1, max(0, int((m - low) / span * len(BARS))))] for m in means)


def scale_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the range to draw rewards in: 0 to 1 if they lie there, else from their least to their largest."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, high if high > low else low + 1.0)


def curve(values: Sequence[float], marks: Mapping[int, float], width: int, height: int) -> list[str]:
    """Draw values as columns of ``height`` lines with a scale, and ``marks`` by step as circles over them.

    ``width`` counts the scale. There is a column for each step, or for each bucket of neighbouring steps.
    """
    there = {step: mark for step, mark in marks.items() if 0 <= step <= len(values)}
    low, high = scale_of([*values, *there.values()])
    labels = [f"{low + (high - low) * (height - 1 - row) / (height - 1):.2f}" for row in range(height)]
    margin = max(map(len, labels))
    count = max(1, min(width - margin - 1, len(values)))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    # Where a value or a mark stands, in eighths of a line from below.
    eighths = [max(1, round((m - low) / (high - low) * 8 * height)) for m in means]
    rows = []
    for row in range(height):
        below = 8 * (height - 1 - row)
        line = [BLOCKS[min(8, max(0, eighth - below))] for eighth in eighths]
        for step, mark in there.items():
            if min(height - 1, int((high - mark) / (high - low) * height)) == row:
                line[min(count - 1, step * count // max(1, len(values)))] = MARK
        label = labels[row] if row in (0, height // 2, height - 1) else ""
        rows.append(f"{label:>{margin}}▕{''.join(line)}".rstrip())
    first, last = "0", str(len(values) - 1)
    rows.append(" " * (margin + 1) + first + last.rjust(count - len(first)) if count > len(last) else "")
    return rows


def time_split(record: Record) -> dict[str, float]:
    """Split the seconds of a step into waiting for the batch, training and syncing weights."""
    return {
        "waiting": record.get("time/wait_batch_s", 0.0),
        "training": record.get("time/train_s", 0.0),
        "syncing": record.get("time/sync_s", 0.0),
    }


def bar(parts: Sequence[float], width: int, fills: str = "░█▒") -> str:
    """Draw a bar of ``width`` characters, divided in proportion to ``parts``, with a fill character for each."""
    total = sum(parts)
    if total <= 0:
        return ""
    ends = [round(width * sum(parts[: i + 1]) / total) for i in range(len(parts))]
    return "".join(fill * (end - start) for fill, start, end in zip(fills, [0, *ends], ends, strict=False))


def position(record: Record, steps: int) -> str:
    """Format a step's number, counted from 0, and how many of ``steps`` are done with it."""
    step = int(record["step"])
    return f"{step} ({step + 1} of {steps} done)"


def step_line(record: Record, steps: int) -> str:
    """Format one trainer step as a line of text."""
    split = time_split(record)
    parts = [
        f"step {position(record, steps)}",
        f"reward {record.get('reward/mean', 0.0):.3f}",
        f"{record.get('time/step_s', 0.0):.2f} s (wait {split['waiting']:.2f}, train {split['training']:.2f}, "
        f"sync {split['syncing']:.2f})",
        f"staleness {record.get('staleness/mean', 0.0):.2f} max {record.get('staleness/max', 0.0):.0f}",
        f"ready {record.get('queue/ready_groups', 0.0):.0f}",
        f"{record.get('tokens/per_s', 0.0):.0f} tokens/s",
    ]
    if "eval/reward" in record:
        lost = record.get("eval/failed", 0.0)
        parts.append(f"eval {record['eval/reward']:.3f}" + (f" ({lost:.0f} episodes failed)" if lost else ""))
    if no_tool_works(record):
        parts.append("every tool call failed")
    if unscored := record.get(UNSCORED):
        parts.append(f"{unscored:.1%} of episodes not scored")
    if failed := record.get(GIVEN_UP):
        parts.append(f"{failed:.0f} group{'' if failed == 1 else 's'} given up so far")
    return "  ".join(parts)


def no_tool_works(record: Record) -> bool:
    """Whether tools were called in this step, and all calls ended in an error."""
    calls = record.get("rollout/tool_calls_mean", 0.0)
    return bool(calls) and record.get("rollout/tool_errors_mean", 0.0) >= calls


def given_up_text(report: StatusReport | None, record: Record | None) -> str:
    """Describe how many groups were given up because their episodes failed, and the last failure; empty for none.

    Both the queue's report and a step's record count them, and the larger number is newer; either may be missing.
    """
    reported = 0 if report is None else report.counters.get("dead_letters", 0)
    count = max(reported, int(record.get(GIVEN_UP, 0.0)) if record else 0)
    if not count:
        return ""
    last = report.last_failure if report else ""
    return state_book.given_up_text(count, printable(last)) + ("" if last else " (logs/worker-*.log)")


def slow_disk_text(report: StatusReport) -> str:
    """Describe a queue whose disk is slow to flush; empty if it is fast enough."""
    if report.flush_s < SLOW_FLUSH_S:
        return ""
    return (
        f"the queue's disk (or its Redis) takes {report.flush_s:.1f} s to flush, and the queue's answers wait for it: "
        "give queue.sqlite.folder on a faster disk, see queue.sqlite.synchronous, or look at the server of "
        "queue.redis.url"
    )


def nothing_scored_text(report: StatusReport) -> str:
    """Say, long before the first step does, that no sample has been scored; empty if one was, or none was put."""
    if report.scored or not report.unscored:
        return ""
    return f"none of {report.unscored} samples could be scored; logs/worker-*.log says why"


def unscored_text(share: float) -> str:
    """Describe the share of episodes without reward, and where to find their errors."""
    return f"{share:.1%} of episodes could not be scored and are in no mean; `rl-async show RUN` has the errors"


def summary_lines(
    history: History, folder: Path, seconds: float, bound: int, report: StatusReport | None = None
) -> list[str]:
    """Summarize an ended run; ``report`` is the queue's last one."""
    failed = given_up_text(report, history.last)
    failures = [f"given up: {failed}"] if failed else []
    if not len(history):
        return [f"no step was trained; logs are in {folder / 'logs'}", *failures]
    if share := mean(history.values("unscored")):
        failures.append(f"not scored: {unscored_text(share)}")
    rewards = history.values("reward")
    some = max(1, min(5, len(rewards) // 2))
    steps = "step" if some == 1 else f"{some} steps"
    evaluations = held_out(folder)
    lines = [
        f"reward: {mean(rewards[:some]):.3f} (mean of the first {steps}) -> {mean(rewards[-some:]):.3f} "
        f"(mean of the last {steps}), {len(rewards)} step{'s' * (len(rewards) != 1)}",
        f"staleness: at most {max(history.values('staleness'), default=0.0):.0f} (bound {bound})",
        *failures,
        f"wall time: {seconds:.0f} s",
        f"run folder: {folder}",
    ]
    if evaluations:
        last = max(evaluations)
        before = f"{evaluations[0]:.3f} before, " if 0 in evaluations and last else ""
        lines.insert(1, f"held-out reward: {before}{evaluations[last]:.3f} at version {last}")
    return lines


def held_out(folder: Path) -> dict[int, float]:
    """Return the held-out reward by the version of the weights; a resumed run replaces those of its later versions."""
    found: dict[int, float] = {}
    for evaluation in LineTail(folder / "evaluations.jsonl").records():
        version = int(evaluation["eval/step"])
        found = {step: reward for step, reward in found.items() if step < version}
        found[version] = evaluation["eval/reward"]
    return found


def next_commands(folder: Path, *, trained: bool) -> list[str]:
    """Name the three commands that most want next, with the folder of the ended run."""
    run = shlex.quote(str(folder))
    if not trained:
        commands = {
            f"rl-async doctor {run}": "says what happened",
            f"tail -n 20 {run}/logs/*.log": "shows the ends of all logs",
            "rl-async doctor": "checks this machine",
        }
    else:
        commands = {
            f"rl-async show {run}": "shows answers, token by token",
            f"rl-async view {run}": "shows curves in a browser",
            f"rl-async export {run} {run}-model": "writes the trained model",
        }
    width = max(map(len, commands))
    return ["next:", *(f"  {command:<{width}}  {about}" for command, about in commands.items())]


def unplayed_lines(config: RunConfig, history: History, folder: Path) -> list[str]:
    """Say if the final weights were not evaluated because no agent program played."""
    record = history.last
    if config.agent.gateway is None or not config.data.eval_path or record is None:
        return []
    if record["step"] + 1 < config.trainer.steps:
        return []
    evaluations = LineTail(folder / "evaluations.jsonl").records()
    if any(evaluation["eval/step"] == record["version"] for evaluation in evaluations):
        return []
    return ["held-out: the final weights were not evaluated, as no agent program played (logs/trainer-0.log)"]


def away_text(report: StatusReport) -> str:
    """Describe the absence of agent programs."""
    return f"no program has asked for an episode for {report.unattended_s:.0f} s"


def conversation_of(folder: Path, record: Record, ranks: int) -> RecordedConversation | None:
    """Return a step's first recorded trajectory, from the lowest of ``ranks`` ranks that recorded any.

    Returns None until a file is written, which is after the step's record. File names are computed, since listing the
    folder takes longer with every step. Raises UserError, naming the file, if it is damaged.
    """
    step, lineage = int(record["step"]), int(record["lineage"])
    for rank in range(ranks):
        path = trained_file(folder, step, lineage, rank)
        with undamaged(path), suppress(FileNotFoundError), gzip.open(path, "rb") as file:
            if line := file.readline():
                return msgspec.json.decode(line, type=RecordedConversation)
    return None


def arguments_text(arguments: str) -> str:
    """Format the arguments of a tool call as ``name=value``, or unchanged unless they are a JSON object."""
    try:
        values = msgspec.json.decode(arguments)
    except UNDECODABLE:
        return arguments
    if not isinstance(values, dict):
        return arguments
    return ", ".join(f"{name}={value}" for name, value in values.items())
