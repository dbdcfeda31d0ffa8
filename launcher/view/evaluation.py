"""Evaluations of runs by data source: avg@k and pass@k with intervals, and two of them side by side.

SQLite adds up the episodes, by an index: what is held here grows with the tasks of an evaluation, not with episodes.
"""

import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from rl_async.errors import RequestRefused, UserError
from rl_async.evaluation import ROUNDING, Tried, line_of, summary
from rl_async.launcher.evaluation.compare import compare
from rl_async.launcher.evaluation.recorded import Evaluation, TaskKey

SHOWN = 500  # tasks of a comparison
# What each role of each held-out episode earned, as ``role_rewards`` has it: a role of several rows has the rewards of
# all their turns, rows that could not be scored left out, and one without a scored row has 0.
EPISODES = (
    "SELECT step, source, role, task, max(scored) AS scored, "
    "coalesce(min(iif(scored, reward, NULL)) + sum(iif(scored, turn_reward, 0.0)), 0.0) AS earned "
    "FROM rows INDEXED BY rows_by_episode "
    "WHERE partition = 'eval' AND {condition} GROUP BY step, source, role, task, grp, sample"
)


def table(connection: sqlite3.Connection, solved: float) -> list[dict[str, Any]]:
    """Return one line per step and source (``Summary``). An episode passes with a reward of ``solved`` or more."""
    rows = connection.execute(
        "SELECT step, source, role, count(*), avg(earned), sum(earned >= ?) "
        f"FROM ({EPISODES.format(condition='TRUE')}) GROUP BY step, source, role, task ORDER BY step, source, role",
        (solved - ROUNDING,),
    )
    lines = [
        {"step": step, **msgspec.structs.asdict(summary(line_of(source, role), [Tried(*row[3:]) for row in part]))}
        for (step, source, role), part in groupby(rows, key=lambda row: tuple(row[:3]))
    ]
    return sorted(lines, key=lambda line: (line["step"], line["source"]))


class Place(NamedTuple):
    """Where the first answer to a task is: ids of the first and the last row of its first sample."""

    key: str  # of the first row's trajectory
    first: int
    last: int


class Recorded(NamedTuple):
    """An evaluation with the place of each task's first answer; its texts are still in the index."""

    evaluation: Evaluation
    places: Mapping[TaskKey, Place]
    connection: sqlite3.Connection


def recorded(connection: sqlite3.Connection, name: str, step: int) -> Recorded:
    """Return what the version after ``step`` of the run ``name`` answered, without questions and answers."""
    if not connection.in_transaction:
        connection.execute("BEGIN")  # all reads see one state, while files are indexed or forgotten
    means, unscored = dict[TaskKey, float](), 0
    for source, role, task, mean, failed in connection.execute(
        "SELECT source, role, task, avg(earned), sum(NOT scored) "
        f"FROM ({EPISODES.format(condition='step = ?')}) GROUP BY source, role, task",
        (step,),
    ):
        means[source, role, task] = mean
        unscored += failed
    asked, places = dict[TaskKey, int](), dict[TaskKey, Place]()
    rows = connection.execute(
        "SELECT source, role, task, grp, sample, segment, asked, id FROM rows WHERE partition = 'eval' AND step = ? "
        "ORDER BY source, role, task, sample, segment",
        (step,),
    )
    for key, of_task in groupby(rows, key=lambda row: (row["source"], row["role"], row["task"])):
        first, last = _first_sample(of_task)
        asked[key] = first["asked"]
        named = f"eval-{step}-{first['grp']}-{first['sample']}-{first['segment']}"
        places[key] = Place(named, first["id"], last["id"])
    return Recorded(Evaluation(f"{name}@{step}", means, unscored, asked, {}, {}), places, connection)


def _first_sample(rows: Iterable[sqlite3.Row]) -> tuple[sqlite3.Row, sqlite3.Row]:
    """Return the first and the last row of the first sample; the others are passed over."""
    _, sample = next(groupby(rows, key=lambda row: row["sample"]))
    first = next(sample)
    newest = deque(sample, maxlen=1)
    return first, newest[0] if newest else first


def compared(before: Recorded, after: Recorded) -> dict[str, Any]:
    """Return a ``Comparison``, of which ``tasks`` are the SHOWN that became worse most, with previews of their texts;
    ``keys`` of a task are those of its trajectories before and after.

    Raises RequestRefused (409) if both have no task in common.
    """
    try:
        found = compare(before.evaluation, after.evaluation)
    except UserError as error:
        raise RequestRefused(str(error), code="nothing_to_compare", status=409) from error
    sides = [{(line_of(*key[:2]), key[2]): place for key, place in side.places.items()} for side in (before, after)]
    tasks = []
    for task in found.tasks[:SHOWN]:
        first, second = (side[task.source, task.task] for side in sides)
        texts = {
            "question": _text(before.connection, "prompt", first.first),
            "replied_before": _text(before.connection, "answer", first.last),
            "replied_after": _text(after.connection, "answer", second.last),
        }
        tasks.append({**msgspec.structs.asdict(task), **texts, "keys": [first.key, second.key]})
    return {**msgspec.structs.asdict(found), "tasks": tasks, "count": len(found.tasks)}


def _text(connection: sqlite3.Connection, column: str, row: int) -> str:
    """Return a preview; empty if the row's file has been read anew since."""
    found = connection.execute(f"SELECT {column} FROM rows WHERE id = ?", (row,)).fetchone()
    return "" if found is None else str(found[0])
