"""Queries over the index of a run's trajectories: filters, order and pages."""

import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_async.errors import RequestRefused
from rl_async.launcher.view.numbers import integer, number

MOST_TERMS = 64  # of a search, each of which is looked up
PAGE = 100  # rows of a page at most
TOTAL = "rows.reward + rows.turn_reward"
# Trained rows that a later lineage trained again are left out.
CURRENT = "NOT EXISTS (SELECT 1 FROM lineages l WHERE l.lineage > rows.lineage AND l.first_step <= rows.step)"
KEY = ("partition", "step", "grp", "sample", "segment")
LISTED = (
    *("partition", "step", "lineage", "grp", "sample", "segment", "role", "task"),
    *("source", "reward", "turn_reward", "scored"),
    *("finish", "error", "tokens", "sampled", "masked", "min_weight", "advantage", "difference", "staleness", "turns"),
    *("calls", "failed_calls", "seconds", "prompt", "answer"),
)

# What a filter demands, with one value. A range is two filters.
FILTERS: dict[str, str] = {
    "partition": "rows.partition = ?",
    "step": "rows.step = ?",
    "step_from": "rows.step >= ?",
    "step_to": "rows.step <= ?",
    "group": "rows.grp = ?",
    "sample": "rows.sample = ?",
    "task": "rows.task = ?",
    "source": "rows.source = ?",
    "reward_from": f"{TOTAL} >= ?",
    "reward_to": f"{TOTAL} <= ?",
    "finish": "rows.finish = ?",
    "tool": "EXISTS (SELECT 1 FROM tools WHERE tools.row = rows.id AND tools.name = ?)",
    "failed_tool": "EXISTS (SELECT 1 FROM tools WHERE tools.row = rows.id AND tools.failed > 0 AND tools.name = ?)",
    "rule": "EXISTS (SELECT 1 FROM rules WHERE rules.row = rows.id AND rules.name = ?)",
    "staleness_from": "rows.staleness >= ?",
}
NUMBERS = {
    "step",
    "step_from",
    "step_to",
    "group",
    "sample",
    "reward_from",
    "reward_to",
    "staleness_from",
}
# What a flag demands; it has no value.
FLAGS: dict[str, str] = {
    "error": "rows.error",
    "failed_call": "rows.failed_calls > 0",
    "masked": "rows.masked > 0",
    "unscored": "NOT rows.scored",
}
ORDERS: dict[str, str] = {
    "newest": "rows.step DESC, rows.grp, rows.sample, rows.segment",
    "oldest": "rows.step, rows.grp, rows.sample, rows.segment",
    "reward_low": f"{TOTAL}, rows.step DESC",
    "reward_high": f"{TOTAL} DESC, rows.step DESC",
    "masked": "rows.masked DESC, rows.step DESC",
    "difference": "rows.difference DESC, rows.step DESC",
    "weight": "rows.min_weight IS NULL, rows.min_weight, rows.step DESC",
    "tokens": "rows.tokens DESC, rows.step DESC",
    "seconds": "rows.seconds DESC, rows.step DESC",
    "failed_calls": "rows.failed_calls DESC, rows.step DESC",
}
OTHERS = {"text", "order", "offset", "limit"}


class Query(NamedTuple):
    """What is asked for: conditions of SQL with their values."""

    where: str
    values: list[Any]


def query(given: Mapping[str, str]) -> Query:
    """Translate filters, such as ``{"tool": "shell", "reward_to": "0.5", "error": "1"}``.

    Raises RequestRefused, naming the filter, for one that does not exist and for a number that is none.
    """
    conditions, values = [CURRENT], list[Any]()
    for name, value in given.items():
        if name in FLAGS:
            conditions.append(FLAGS[name])
        elif name in FILTERS:
            conditions.append(FILTERS[name])
            values.append(number(name, value) if name in NUMBERS else value)
        elif name == "text":
            conditions.append("rows.id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
            values.append(words(value))
        elif name not in OTHERS:
            raise RequestRefused(f"there is no filter {name[:100]!r}", code="no_filter", param=name)
    return Query(" AND ".join(conditions), values)


def words(text: str) -> str:
    """Return the full-text query for rows that contain each of these words, the last also as a beginning.

    What stands in quotes, and what has punctuation inside such as ``total_price``, must occur in that order. Nothing of
    it is an operator. Raises RequestRefused for a text without a letter or digit, or of too many words.
    """
    parts = text.replace("\0", " ").split('"')  # SQLite's query would end there
    quoted = [part.strip() for part in parts[1::2]]
    plain = [word for part in parts[::2] for word in part.split()]
    terms = [term for term in (*quoted, *plain) if any(character.isalnum() for character in term)]
    if not terms:
        raise RequestRefused("text: give a word with letters or digits", code="no_words", param="text")
    if len(terms) > MOST_TERMS:
        raise RequestRefused(f"text: give at most {MOST_TERMS} words", code="too_many_words", param="text")
    prefix = "*" if plain and terms[-1] == plain[-1] and terms[-1][-1].isalnum() else ""
    return " AND ".join(f'"{term}"' for term in terms) + prefix


def find(connection: sqlite3.Connection, given: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of the rows that match, and how many match. Raises RequestRefused as ``query`` does."""
    wanted = query(given)
    order = given.get("order", "newest")
    if order not in ORDERS:
        raise RequestRefused(f"order: there is none called {order[:100]!r}", code="no_order", param="order")
    offset = integer("offset", given.get("offset", "0"))
    limit = integer("limit", given.get("limit", str(PAGE)))
    (count,) = connection.execute(f"SELECT count(*) FROM rows WHERE {wanted.where}", wanted.values).fetchone()
    rows = connection.execute(
        f"SELECT * FROM rows WHERE {wanted.where} ORDER BY {ORDERS[order]} LIMIT ? OFFSET ?",
        [*wanted.values, max(0, min(limit, PAGE)), max(0, offset)],
    )
    return {"count": count, "offset": offset, "rows": [listed(row) for row in rows]}


def listed(row: sqlite3.Row) -> dict[str, Any]:
    """Return what a list shows of a row."""
    return {name: row[name] for name in LISTED}


def choices(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the values that filters may take: each with how many rows have it, the most frequent first.

    Rows that were trained again do not count, as they are not found either.
    """

    def counted(column: str) -> list[dict[str, Any]]:
        found = connection.execute(
            f"SELECT {column} AS value, count(*) AS rows FROM rows WHERE {CURRENT} AND {column} != '' GROUP BY 1 "
            "ORDER BY 2 DESC LIMIT 200"
        )
        return [dict(row) for row in found]

    tools = connection.execute(
        "SELECT name AS value, count(*) AS rows, sum(tools.calls) AS calls, sum(failed) AS failed FROM tools "
        f"JOIN rows ON rows.id = tools.row WHERE {CURRENT} GROUP BY 1 ORDER BY 4 DESC, 3 DESC LIMIT 200"
    )
    rules = connection.execute(
        "SELECT name AS value, count(*) AS rows, sum(rules.tokens) AS tokens FROM rules "
        f"JOIN rows ON rows.id = rules.row WHERE {CURRENT} GROUP BY 1 ORDER BY 3 DESC"
    )
    trained = f"SELECT min(step), max(step) FROM rows WHERE partition = 'train' AND {CURRENT}"
    (first, last) = connection.execute(trained).fetchone()
    return {
        "source": counted("source"),
        "finish": counted("finish"),
        "partition": counted("partition"),
        "tool": [dict(row) for row in tools],
        "rule": [dict(row) for row in rules],
        "steps": [first, last],
    }


def key_of(row: sqlite3.Row) -> str:
    """Return the key of a row, such as ``train-5-48-0-0``."""
    return "-".join(str(row[name]) for name in KEY)


def row_of_key(connection: sqlite3.Connection, key: str) -> sqlite3.Row:
    """Return the row of a key such as ``train-5-48-0-0``: partition, step, group, sample and segment.

    Raises RequestRefused, 404 if there is none and 400 if a part of the key is no number.
    """
    partition, *numbers = key.split("-")
    found = None
    if len(numbers) == 4:
        found = connection.execute(
            "SELECT * FROM rows WHERE partition = ? AND step = ? AND grp = ? AND sample = ? AND segment = ? "
            "ORDER BY lineage DESC LIMIT 1",
            (partition, *(integer("key", part) for part in numbers)),
        ).fetchone()
    if found is None:
        raise RequestRefused(f"there is no trajectory {key[:100]!r}", code="no_trajectory", status=404)
    return found


def rows_of_group(connection: sqlite3.Connection, partition: str, step: int, group: int) -> list[sqlite3.Row]:
    """Return the rows of a group by sample and segment. Raises RequestRefused (404) if there are none."""
    found = connection.execute(
        f"SELECT * FROM rows WHERE {CURRENT} AND partition = ? AND step = ? AND grp = ? ORDER BY sample, segment",
        (partition, step, group),
    ).fetchall()
    if not found:
        raise RequestRefused(f"there is no group {group} of step {step}", code="no_group", status=404)
    return found
