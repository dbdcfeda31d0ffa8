"""Evaluations of runs by data source: avg@k and pass@k with intervals, and two of them side by side."""

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from rl_async.errors import RequestRefused, UserError
from rl_async.evaluation.summary import Answer, line_of, summarize
from rl_async.launcher.evaluation.compare import compare
from rl_async.launcher.evaluation.recorded import Evaluation, TaskKey
from rl_async.launcher.view import search

SHOWN = 500  # tasks of a comparison


class Answered(NamedTuple):
    """One held-out episode."""

    step: int
    answer: Answer


def answered(connection: sqlite3.Connection, step: int | None = None) -> list[Answered]:
    """Return the held-out episodes of a step, or all, role by role, by step, source and task.

    As ``role_rewards`` has it: a role of several rows has the rewards of all their turns, rows that could not be scored
    left out, and one without a scored row has 0.
    """
    rows = connection.execute(
        "SELECT step, source, task, "
        "coalesce(min(iif(scored, reward, NULL)) + sum(iif(scored, turn_reward, 0.0)), 0.0), role, "
        "max(scored) FROM rows WHERE partition = 'eval' AND step = coalesce(?, step) "
        "GROUP BY step, source, role, task, grp, sample ORDER BY step, source, role, task",
        (step,),
    )
    return [
        Answered(step, Answer(source, task, reward, role, bool(scored)))
        for step, source, task, reward, role, scored in rows
    ]


def table(episodes: Sequence[Answered], solved: float) -> list[dict[str, Any]]:
    """Return one line per step and source (``Summary``). An episode passes with a reward of ``solved`` or more."""
    return [
        {"step": step, **msgspec.structs.asdict(summary)}
        for step, part in groupby(episodes, key=lambda episode: episode.step)
        for summary in summarize((episode.answer for episode in part), solved)
    ]


class Recorded(NamedTuple):
    """An evaluation with the key of each task's trajectory: of the first row of its first sample."""

    evaluation: Evaluation
    keys: Mapping[TaskKey, str]


def recorded(connection: sqlite3.Connection, name: str, step: int) -> Recorded:
    """Return what the version after ``step`` of the run ``name`` answered. Questions and answers are previews."""
    first, replies = dict[TaskKey, sqlite3.Row](), dict[TaskKey, str]()
    rows = connection.execute(
        "SELECT * FROM rows WHERE partition = 'eval' AND step = ? ORDER BY sample, segment", (step,)
    )
    for row in rows:
        key = row["source"], row["role"], row["task"]
        if row["sample"] == first.setdefault(key, row)["sample"]:
            replies[key] = row["answer"]
    answers = [one.answer for one in answered(connection, step)]
    asked, questions = ({key: row[column] for key, row in first.items()} for column in ("asked", "prompt"))
    keys = {key: search.key_of(row) for key, row in first.items()}
    return Recorded(Evaluation(f"{name}@{step}", answers, asked, questions, replies), keys)


def compared(before: Recorded, after: Recorded) -> dict[str, Any]:
    """Return a ``Comparison``, of which ``tasks`` are the SHOWN that became worse most; ``keys`` of a task are those of
    its trajectories before and after. Raises RequestRefused (409) if both have no task in common."""
    try:
        found = compare(before.evaluation, after.evaluation)
    except UserError as error:
        raise RequestRefused(str(error), code="nothing_to_compare", status=409) from error
    first, second = (
        {(line_of(*key[:2]), key[2]): place for key, place in side.keys.items()} for side in (before, after)
    )
    tasks = [
        {**msgspec.structs.asdict(task), "keys": [side[task.source, task.task] for side in (first, second)]}
        for task in found.tasks[:SHOWN]
    ]
    return {**msgspec.structs.asdict(found), "tasks": tasks, "count": len(found.tasks)}
