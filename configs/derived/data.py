"""The data sets of ``data.path`` by name, and what share of the tasks each of them has at a step: pure functions."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rl_async.configs.schema.data import DataConfig, DataSource

Points = tuple[tuple[int, float], ...]  # (step, weight) by step


def parts(data: DataConfig) -> tuple[DataSource, ...]:
    """The data sets in their order."""
    return (DataSource(path=data.path),) if isinstance(data.path, str) else data.path


def label_of(path: str) -> str:
    """The name that a data set has in task ids, where there is only one."""
    return path.replace(":", ".") if path.startswith("reasoning_gym:") else Path(path).stem


def labels(data: DataConfig) -> list[str]:
    """The names of the data sets, all different: ``Task.source`` of their tasks."""
    paths = [part.path for part in parts(data)]
    return [label_of(path) if len(paths) == 1 else f"{n}-{label_of(path)}" for n, path in enumerate(paths)]


def points_of(source: DataSource) -> Points:
    """A data set's weights by step; without a schedule it has the same always."""
    return source.schedule or ((0, source.weight),)


def weight_at(points: Points, step: int) -> float:
    """On the straight line between the two points around ``step``; that of the first before, of the last behind."""
    for (before, low), (after, high) in pairwise(points):
        if before <= step < after:
            return low + (high - low) * (step - before) / (after - before)
    return points[0][1] if step < points[0][0] else points[-1][1]


def shares_at(weights: Sequence[Points], step: int) -> list[float]:
    """What part of the tasks each data set has at ``step``; together 1."""
    now = [weight_at(points, step) for points in weights]
    total = sum(now)
    return [weight / total for weight in now]


def shares_by_label(weights: Mapping[str, Points], step: int) -> dict[str, float]:
    """The same by name."""
    return dict(zip(weights, shares_at(list(weights.values()), step), strict=True))
