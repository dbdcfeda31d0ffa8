"""Evaluations of a run by data source: avg@k and pass@k with intervals, and two versions side by side."""

import sqlite3
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from rl_async.launcher.evaluation.statistics import mean_change_of
from rl_async.launcher.evaluation.summary import Answer, summarize

SHOWN = 500  # tasks of a comparison


class Answered(NamedTuple):
    """One held-out episode."""

    step: int
    answer: Answer


def answered(connection: sqlite3.Connection) -> list[Answered]:
    """Return all held-out episodes by step, source and task. An episode of several rows has their turns' rewards;
    one that could not be scored has 0."""
    rows = connection.execute(
        "SELECT step, source, task, iif(min(scored), min(reward) + sum(turn_reward), 0.0) FROM rows "
        "WHERE partition = 'eval' GROUP BY step, source, task, grp, sample ORDER BY step, source, task"
    )
    return [Answered(step, Answer(source, task, reward)) for step, source, task, reward in rows]


def table(episodes: Sequence[Answered], solved: float) -> list[dict[str, Any]]:
    """Return one line per step and source (``Summary``). An episode passes with a reward of ``solved`` or more."""
    return [
        {"step": step, **msgspec.structs.asdict(summary)}
        for step, part in groupby(episodes, key=lambda episode: episode.step)
        for summary in summarize((episode.answer for episode in part), solved)
    ]


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
        "mean": mean_change_of(changes) if changes else None,
        "rows": [{"before": first[task], "after": second[task]} for task in both[:SHOWN]],
    }
