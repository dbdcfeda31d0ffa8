"""``rl-async report``: the page with a part of a run's data in one file, to be sent to somebody and opened from disk.

The page's own script and style stand in the file, and a policy with their hashes keeps anything else from running and
the file from loading anything. The data is JSON, in which no ``<`` occurs.
"""

import base64
import hashlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_async.errors import RequestRefused, UserError
from rl_async.launcher.folder.token_texts import TokenTexts, tokenizer_of
from rl_async.launcher.view import evaluation, search
from rl_async.launcher.view.index import TrajectoryIndex
from rl_async.launcher.view.recorded import rows_in
from rl_async.launcher.view.runs import ViewedRun, ViewedRuns
from rl_async.launcher.view.server import STATIC
from rl_async.launcher.view.trajectory import story

STEPS = 50  # of which a group is in the file
COMPARED = 20  # tasks whose answers of two versions are
MOST_BYTES = 32 << 20  # of trajectories
MOST_NUMBERS = 1 << 20  # of metrics


def write_report(folder: Path, out: Path) -> str:
    """Write the report of the run in ``folder``, and say what it holds. Raises UserError if there is no such run."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no run folder; name one, such as runs/NAME")
    (run,) = ViewedRuns([folder]).all()
    run.refresh()
    index = TrajectoryIndex(run.folder)
    try:
        index.update(threading.Event())
        with index.connect() as connection:
            data = _data(run, connection)
            choices = search.choices(connection)
            data["choices"] = {**choices, **index.state()}
            (count,) = connection.execute(f"SELECT count(*) FROM rows WHERE {search.CURRENT}").fetchone()
            data["recorded"] = {"trajectories": count, "steps": len(run.metrics.steps)}
    finally:
        index.close()
    report = {"runs": [run.summary()], "run": {run.name: data}}
    try:
        out.write_text(page(msgspec.json.encode(report).decode()), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    shown = f"{len(data['metrics']['steps'])} of {len(run.metrics.steps)} steps"
    return f"{out}: {shown}, {len(data['rows'])} of {count} trajectories"


def page(data: str) -> str:
    """Return the file with this JSON."""
    style, script = ((STATIC / name).read_text(encoding="utf-8") for name in ("app.css", "app.js"))
    if "</script" in script.lower() or "</style" in style.lower():
        raise ValueError("the built page cannot stand inline")
    harmless = data.replace("<", "\\u003c")
    own = f"script-src {_hash(script)}; style-src {_hash(style)}"
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>rl-async report</title><style>{style}</style></head><body><div id="app"></div>'
        f'<script type="application/json" id="report">{harmless}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(run: ViewedRun, connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the answers that the page will ask for, under the names by which ``web/src/embedded.ts`` knows them."""
    table = evaluation.table(connection, run.solved)
    data: dict[str, Any] = {
        "config": run.config(),
        "metrics": {**_thinned(run.metrics.since(run.metrics.names, -1, 0)), "names": run.metrics.names},
        "evaluations": {"records": run.evaluations.records(), "solved": run.solved, "table": table},
        "rows": [],
        "trajectories": {},
    }
    steps = sorted({line["step"] for line in table})
    groups: dict[tuple[int, int], list[sqlite3.Row]] = {}  # the compared ones first; several roles share one
    if len(steps) > 1:
        data[f"compare {steps[0]} {steps[-1]}"] = compared = _compared(run, connection, steps[0], steps[-1])
        for place, step in enumerate((steps[0], steps[-1])):
            for group in dict.fromkeys(int(task["keys"][place].split("-")[2]) for task in compared["tasks"]):
                groups[step, group] = search.rows_of_group(connection, "eval", step, group)
    chosen = [*groups.values(), *_groups(connection)]
    tokenizer, size = tokenizer_of(run.folder, str(run.config().get("model.path", ""))), 0
    for rows in chosen:
        told = _told(run, rows, tokenizer)
        size += sum(len(msgspec.json.encode(one)) for one in told)
        if size > MOST_BYTES:
            break
        data["rows"] += map(search.listed, rows)
        data["trajectories"].update(zip(map(search.key_of, rows), told, strict=True))
    data["rows"].sort(key=lambda row: (-row["step"], row["grp"], row["sample"], row["segment"]))  # as ORDERS["newest"]
    return data


def _thinned(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave as many steps as make MOST_NUMBERS, evenly spread, with the last."""
    every = -(-len(metrics["steps"]) * len(metrics["columns"]) // MOST_NUMBERS) or 1
    kept = slice((len(metrics["steps"]) - 1) % every if metrics["steps"] else 0, None, every)
    columns = {name: column[kept] for name, column in metrics["columns"].items()}
    return {**metrics, "steps": metrics["steps"][kept], "columns": columns}


def _compared(run: ViewedRun, connection: sqlite3.Connection, before: int, after: int) -> dict[str, Any]:
    """Return the tasks that became worse most between two versions; none if these have none in common."""
    sides = [evaluation.recorded(connection, run.name, step) for step in (before, after)]
    try:
        found = evaluation.compared(*sides)
    except RequestRefused:
        return {"sources": [], "tasks": [], "count": 0, "left_out": 0, "unscored": [0, 0]}
    return {**found, "tasks": found["tasks"][:COMPARED]}


def _told(run: ViewedRun, rows: Sequence[sqlite3.Row], tokenizer: TokenTexts) -> list[dict[str, Any]]:
    recorded = rows_in(run.folder / "trajectories", [(row["file"], row["place"]) for row in rows])
    return [
        {
            **search.listed(row),
            **story(one, row["step"] if row["partition"] == "train" else None, tokenizer.decode),
            "problem": tokenizer.problem,
        }
        for row, one in zip(rows, recorded, strict=True)
    ]


def _groups(connection: sqlite3.Connection) -> Iterator[list[sqlite3.Row]]:
    """Yield the rows of one group of each of STEPS steps, evenly spread, the newest first.

    It is the one whose rewards differ most, and of those the one with the most masked tokens.
    """
    found = connection.execute(
        f"SELECT step, grp FROM rows WHERE partition = 'train' AND {search.CURRENT} GROUP BY step, grp "
        f"ORDER BY step DESC, max({search.TOTAL}) - min({search.TOTAL}) DESC, sum(masked) DESC"
    )
    groups: dict[int, int] = {}
    for step, group in found:
        groups.setdefault(step, group)
    steps = list(groups)
    gaps = max(1, min(STEPS, len(steps)) - 1)
    for step in sorted(
        {steps[gap * (len(steps) - 1) // gaps] for gap in range(gaps + 1)} if steps else (), reverse=True
    ):
        yield search.rows_of_group(connection, "train", step, groups[step])
