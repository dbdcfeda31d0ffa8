"""Computes what the live view shows, without a terminal: metrics so far, bars, summaries, one conversation."""

import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.folder.tail import MetricsTail, Record
from rl_async.messages import StatusReport, Turn

BARS = "▁▂▃▄▅▆▇█"


class RecordedConversation(msgspec.Struct):
    """The part of a recorded trajectory that the view shows; other fields of the line are skipped."""

    turns: list[Turn]
    reward: float
    finish_reason: str = ""
    error: str = ""


class History:
    """One record per step. After a resume, steps are trained again: the newest record of a step counts."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def add(self, record: Record) -> None:
        """Add a record, and drop those of an abandoned lineage at and after its step."""
        step = int(record["step"])
        self._records = {at: kept for at, kept in self._records.items() if at < step}
        self._records[step] = record

    def __len__(self) -> int:
        return len(self._records)

    @property
    def last(self) -> Record | None:
        """The record of the newest step; None before the first."""
        return next(reversed(self._records.values()), None)

    def values(self, key: str) -> list[float]:
        """Return the values of one metric, oldest first, without the steps that lack it."""
        return [record[key] for record in self._records.values() if key in record]


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


def step_line(record: Record, steps: int) -> str:
    """Format one trainer step as a line of text."""
    split = time_split(record)
    parts = [
        f"step {int(record['step']) + 1}/{steps}",
        f"reward {record.get('reward/mean', 0.0):.3f}",
        f"{record.get('time/step_s', 0.0):.2f} s (wait {split['waiting']:.2f}, train {split['training']:.2f}, "
        f"sync {split['syncing']:.2f})",
        f"staleness {record.get('staleness/mean', 0.0):.2f} max {record.get('staleness/max', 0.0):.0f}",
        f"ready {record.get('queue/ready_groups', 0.0):.0f}",
        f"{record.get('tokens/per_s', 0.0):.0f} tokens/s",
    ]
    if "eval/reward" in record:
        parts.append(f"eval {record['eval/reward']:.3f}")
    if no_tool_works(record):
        parts.append("every tool call failed")
    return "  ".join(parts)


def no_tool_works(record: Record) -> bool:
    """Whether tools were called in this step, and all calls ended in an error."""
    calls = record.get("rollout/tool_calls_mean", 0.0)
    return bool(calls) and record.get("rollout/tool_errors_mean", 0.0) >= calls


def summary_lines(history: History, folder: Path, seconds: float, bound: int) -> list[str]:
    """Summarize a run that ended."""
    if not len(history):
        return [f"no step was trained; logs are in {folder / 'logs'}"]
    rewards = history.values("reward/mean")
    some = max(1, min(5, len(rewards) // 2))
    steps = "step" if some == 1 else f"{some} steps"
    lines = [
        f"reward: {mean(rewards[:some]):.3f} (mean of the first {steps}) -> {mean(rewards[-some:]):.3f} "
        f"(mean of the last {steps}), {len(rewards)} steps",
        f"staleness: at most {max(history.values('staleness/max'), default=0.0):.0f} (bound {bound})",
        f"wall time: {seconds:.0f} s",
        f"run folder: {folder}",
    ]
    evaluations = MetricsTail(folder / "evaluations.jsonl").read()
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        before = f"{first['eval/reward']:.3f} before, " if first["eval/step"] == 0 and last is not first else ""
        lines.insert(1, f"held-out reward: {before}{last['eval/reward']:.3f} after step {last['eval/step']:.0f}")
    return lines


def unplayed_lines(config: RunConfig, history: History, folder: Path) -> list[str]:
    """Say that the final weights were not evaluated, if that takes agent programs and none played."""
    record = history.last
    if config.agent.gateway is None or not config.data.eval_path or record is None:
        return []
    if record["step"] + 1 < config.trainer.steps:
        return []
    evaluations = MetricsTail(folder / "evaluations.jsonl").read()
    if any(evaluation["eval/step"] == record["version"] for evaluation in evaluations):
        return []
    return ["held-out: the final weights were not evaluated, as no agent program played (logs/trainer-0.log)"]


def away_text(report: StatusReport) -> str:
    """Say for how long no agent program has played."""
    return f"no program has asked for an episode for {report.unattended_s:.0f} s"


def newest_conversation(folder: Path) -> tuple[str, RecordedConversation] | None:
    """Return the newest trained step and its first recorded trajectory; None if there is none yet."""
    files = sorted(folder.glob("step-*.jsonl.gz"))
    if not files:
        return None
    with gzip.open(files[-1], "rb") as file:
        line = file.readline()
    if not line:
        return None
    step = files[-1].name.removeprefix("step-").partition("-")[0]
    return str(int(step) + 1), msgspec.json.decode(line, type=RecordedConversation)


def arguments_text(arguments: str) -> str:
    """Format the arguments of a tool call as ``name=value``, or as they are if they are no JSON object."""
    try:
        values = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if isinstance(values, dict) and isinstance(values.get("arguments"), dict):
        values = values["arguments"]  # the whole call was recorded
    if not isinstance(values, dict):
        return arguments
    return ", ".join(f"{name}={value}" for name, value in values.items())
