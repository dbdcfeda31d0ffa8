"""The data sets of ``data.path``: their names and files, and each one's share of the tasks at a step."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rl_async.configs.schema.data import DataConfig, DataSource

GENERATED_PREFIX = "reasoning_gym:"
Points = tuple[tuple[int, float], ...]  # (step, weight) by step


def parts(data: DataConfig) -> tuple[DataSource, ...]:
    """List the data sets of ``data.path``, also if it is a single path."""
    return (DataSource(path=data.path),) if isinstance(data.path, str) else data.path


def eval_parts(data: DataConfig) -> tuple[DataSource, ...]:
    """List the data sets of ``data.eval_path``; empty without held-out tasks."""
    if data.eval_path is None:
        return ()
    return (DataSource(path=data.eval_path),) if isinstance(data.eval_path, str) else data.eval_path


def label_of(path: str) -> str:
    """Return the name in task ids of a data set that is the only one."""
    return path.replace(":", ".") if path.startswith(GENERATED_PREFIX) else Path(path).stem.rstrip("-*")


def files_of(path: str) -> list[Path]:
    """List the files of a data set: a file, whether it exists or not, a folder's, or those that a pattern matches."""
    given = Path(path)
    if given.is_dir():
        return sorted(given.glob("*.parquet")) or sorted(given.glob("*.jsonl"))
    return sorted(given.parent.glob(given.name)) if "*" in given.name else [given]


def labels(data: DataConfig) -> list[str]:
    """Return a unique name for each data set: ``Task.source`` of its tasks."""
    paths = [part.path for part in parts(data)]
    return [label_of(path) if len(paths) == 1 else f"{n}-{label_of(path)}" for n, path in enumerate(paths)]


def points_of(source: DataSource) -> Points:
    """Return a data set's weights by step: its schedule, or its constant weight."""
    return source.schedule or ((0, source.weight),)


def weight_at(points: Points, step: int) -> float:
    """Interpolate linearly between the points around ``step``; constant before the first and after the last."""
    for (before, low), (after, high) in pairwise(points):
        if before <= step < after:
            return low + (high - low) * (step - before) / (after - before)
    return points[0][1] if step < points[0][0] else points[-1][1]


def shares_at(weights: Sequence[Points], step: int) -> list[float]:
    """Return each data set's share of the tasks at ``step``; they sum to 1."""
    now = [weight_at(points, step) for points in weights]
    total = sum(now)
    return [weight / total for weight in now]


def shares_by_label(weights: Mapping[str, Points], step: int) -> dict[str, float]:
    """Return ``shares_at`` as a mapping from the data sets' names."""
    return dict(zip(weights, shares_at(list(weights.values()), step), strict=True))
