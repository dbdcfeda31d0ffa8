"""Evaluations of a run by data source: avg@k and pass@k with intervals, and two versions side by side."""

import sqlite3
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from rl_async.launcher.evaluation.recorded import TaskKey
from rl_async.launcher.evaluation.statistics import mean_change_of
from rl_async.launcher.evaluation.summary import Answer, summarize

SHOWN = 500  # tasks of a comparison


class Answered(NamedTuple):
    """One held-out episode."""

    step: int
    answer: Answer


def answered(connection: sqlite3.Connection) -> list[Answered]:
    """Return all held-out episodes, role by role, by step, source and task.

    As ``role_rewards`` has it: a role of several rows has the rewards of all their turns, rows that could not be scored
    left out, and one without a scored row has 0.
    """
    rows = connection.execute(
        "SELECT step, source, task, "
        "coalesce(min(iif(scored, reward, NULL)) + sum(iif(scored, turn_reward, 0.0)), 0.0), role, "
        "max(scored) FROM rows WHERE partition = 'eval' GROUP BY step, source, role, task, grp, sample "
        "ORDER BY step, source, role, task"
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


def compare(connection: sqlite3.Connection, before: int, after: int) -> dict[str, Any]:
    """Lay the answers of two evaluated versions side by side, one line per task and role, regressions first.

    Tasks that only one of both has, or that have another prompt in each, are ``left_out``.
    """
    first, second = (_sides(connection, step) for step in (before, after))
    both = [key for key in first.keys() & second.keys() if first[key]["asked"] == second[key]["asked"]]
    both.sort(key=lambda key: (second[key]["reward"] - first[key]["reward"], key[::-1]))
    changes = [second[key]["reward"] - first[key]["reward"] for key in both]
    return {
        "tasks": len(both),
        "left_out": len(first.keys() | second.keys()) - len(both),
        "better": sum(change > 0 for change in changes),
        "worse": sum(change < 0 for change in changes),
        "mean": mean_change_of(changes) if changes else None,
        "rows": [{"before": first[key], "after": second[key]} for key in both[:SHOWN]],
    }


def _sides(connection: sqlite3.Connection, step: int) -> dict[TaskKey, dict[str, Any]]:
    """Return what one version answered: the mean reward of each task's samples, and the first one's last answer."""
    rewards: dict[TaskKey, list[float]] = {}
    for at, answer in answered(connection):
        if at == step:
            rewards.setdefault((answer.source, answer.role, answer.task), []).append(answer.reward)
    sides: dict[TaskKey, dict[str, Any]] = {}
    for row in connection.execute(
        "SELECT source, role, task, prompt, answer, asked, grp, sample, segment FROM rows "
        "WHERE partition = 'eval' AND step = ? ORDER BY sample, segment",
        (step,),
    ):
        key = row["source"], row["role"], row["task"]
        earned = rewards[key]
        side = sides.setdefault(key, {**dict(row), "reward": sum(earned) / len(earned), "rows": len(earned)})
        if side["sample"] == row["sample"]:
            side["answer"] = row["answer"]
    return sides
