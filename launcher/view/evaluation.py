"""Evaluations of a run by data source: avg@k and pass@k with intervals, and two versions side by side."""

import math
import sqlite3
from collections.abc import Sequence
from itertools import groupby
from statistics import NormalDist
from typing import Any, NamedTuple

Z = NormalDist().inv_cdf(0.975)  # of a 95 % interval
SHOWN = 500  # tasks of a comparison


class Answered(NamedTuple):
    """One held-out episode."""

    step: int
    source: str
    task: str
    reward: float


def answered(connection: sqlite3.Connection) -> list[Answered]:
    """Return all held-out episodes by step, source and task. An episode of several rows has their turns' rewards."""
    rows = connection.execute(
        "SELECT step, source, task, min(reward) + sum(turn_reward) FROM rows WHERE partition = 'eval' AND scored "
        "GROUP BY step, source, task, grp, sample ORDER BY step, source, task"
    )
    return [Answered(*row) for row in rows]


def table(episodes: Sequence[Answered], solved: float) -> list[dict[str, Any]]:
    """Return one line per step and source. An episode passes with a reward of ``solved`` or more.

    ``k`` is the smallest number of samples of a task. ``average`` (avg@k) and ``passed`` (pass@1, and pass@k if k > 1)
    are [value, low, high].
    """
    lines = []
    for (step, source), part in groupby(episodes, key=lambda episode: (episode.step, episode.source)):
        tasks = [[e.reward for e in task] for _, task in groupby(part, key=lambda episode: episode.task)]
        k = min(map(len, tasks))
        averages = [sum(rewards) / len(rewards) for rewards in tasks]
        passes = {}
        for tries in sorted({1, k}):
            chances = [pass_at(tries, len(r), sum(reward >= solved for reward in r)) for r in tasks]
            passes[str(tries)] = _interval(chances)
        lines.append(
            {
                "step": step,
                "source": source,
                "tasks": len(tasks),
                "episodes": sum(map(len, tasks)),
                "k": k,
                "average": _interval(averages),
                "passed": passes,
            }
        )
    return lines


def pass_at(k: int, samples: int, passed: int) -> float:
    """Estimate the chance that one of ``k`` samples passes from ``samples``, of which ``passed`` did, without bias.

    1 - C(n - c, k) / C(n, k): Chen et al. (arXiv:2107.03374), section 2.1.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share ``mean`` of ``count`` trials: Wilson (1927), without continuity correction.

    For the mean of ``count`` numbers between 0 and 1 it is not too narrow, as none of that mean varies more than a
    share does.
    """
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _interval(values: Sequence[float]) -> list[float]:
    """Return mean, low and high of one number per task: each task counts once, however often it was sampled.

    Wilson's interval for numbers between 0 and 1, and the normal one for others.
    """
    mean = sum(values) / len(values)
    if all(0.0 <= value <= 1.0 for value in values):
        return [mean, *wilson(min(max(mean, 0.0), 1.0), len(values))]
    return _normal(values, mean)


def _normal(values: Sequence[float], mean: float) -> list[float]:
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    half = Z * math.sqrt(variance / len(values))
    return [mean, mean - half, mean + half]


def compare(connection: sqlite3.Connection, before: int, after: int) -> dict[str, Any]:
    """Lay the answers of two evaluated versions side by side, one line per task that both have, regressions first."""
    sides = []
    for step in (before, after):
        rows = connection.execute(
            "SELECT task, source, prompt, answer, avg(reward + turn_reward) AS reward, count(*) AS rows, grp, "
            "min(sample) AS sample FROM rows WHERE partition = 'eval' AND step = ? AND segment = 0 GROUP BY task",
            (step,),
        )
        sides.append({row["task"]: dict(row) for row in rows})
    first, second = sides
    both = sorted(first.keys() & second.keys(), key=lambda task: (second[task]["reward"] - first[task]["reward"], task))
    changes = [second[task]["reward"] - first[task]["reward"] for task in both]
    return {
        "tasks": len(both),
        "better": sum(change > 0 for change in changes),
        "worse": sum(change < 0 for change in changes),
        "mean": _normal(changes, sum(changes) / len(changes)) if changes else None,
        "rows": [{"before": first[task], "after": second[task]} for task in both[:SHOWN]],
    }
