"""How far are the planner's predictions from what was measured?

    python -m benchmarks.planned [--json FILE]                      published runs of other systems
    python -m benchmarks.planned --runs FOLDER [--json FILE]        ten runs of a preset on this machine

Some rows of the published tables (``published.json``, with their addresses) give costs, and the others are predicted
from them; ``published.py`` says which. The errors are those of the seconds of a step, and for runs here also those of
the same predicted with the time that the run's own trainer computed. Goal: 15 %.

Runs here stay in FOLDER and are used again; measure them on an idle machine. Eleven of some 15 steps take about a
quarter of an hour on two cores. The file is written after each, so that an interrupted run leaves what it has found.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.planned import here
from benchmarks.planned.published import engine_latency, predict, tables

GOAL = 0.15
Line = dict[str, Any]


def shown(run: str, step_s: float, recorded_s: float, own_error: float | None) -> Line:
    """Print a prediction, and return it."""
    error = step_s / recorded_s - 1
    own = "" if own_error is None else f"{own_error:+8.0%} with its own training time"
    print(f"  {run:36}{step_s:8.1f} s, recorded{recorded_s:8.1f} s{error:+8.0%}{own}", flush=True)
    return {"run": run, "step_s": step_s, "recorded_step_s": recorded_s, "error": error, "own_error": own_error}


def published() -> Iterator[Line]:
    """The runs of others."""
    (fitted,) = (table for table in tables() if table.decoded is not None)
    latency_s = engine_latency(fitted)
    print(f"an iteration takes {latency_s * 1e6:.0f} us for each layer besides reading memory: {fitted.source}")
    for table in tables():
        print(f"{table.source}: {table.model} on {table.device.name}")
        for p in predict(table, latency_s):
            yield shown(p.run, p.step_s, p.published_step_s, None) | {"source": table.source}


def local(runs: Path, preset: str, names: list[str]) -> Iterator[Line]:
    """Runs on this machine."""
    for name, found in here.compare(runs, preset, names):
        yield shown(name, found.step_s, found.recorded_step_s, found.own_step_s / found.recorded_step_s - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="FOLDER")
    parser.add_argument("--config", default="calculator", metavar="PRESET", help="of the runs here")
    parser.add_argument("--only", nargs="+", choices=here.OTHERS, default=list(here.OTHERS), metavar="RUN")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    lines: list[Line] = []
    met, began = 0, time.monotonic()
    for line in local(arguments.runs, arguments.config, arguments.only) if arguments.runs else published():
        lines.append(line)
        met = sum(abs(line["error"]) <= GOAL for line in lines)
        if arguments.json:
            arguments.json.write_text(json.dumps({"runs": lines, "within_goal": met}, indent=2) + "\n")
    minutes = (time.monotonic() - began) / 60
    print(f"within {GOAL:.0%}: {met} of {len(lines)} predicted runs, after {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
