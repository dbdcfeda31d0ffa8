"""``rl-async launch`` whose processes live by clocks and in network namespaces of their own.

``python -m tests.chaos.host.launcher FILE FOLDER launch ...``: the file has, by the name of a process, the words before
its command, its variables and its address. FOLDER/proxy has the address at which all others find one of the engines,
and FOLDER/engine-0 gets the engine's own.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from rl_async.files import replace_file
from rl_async.launcher import supervisor
from rl_async.launcher.cli.__main__ import main as rl_async
from rl_async.launcher.plan import machine
from rl_async.launcher.plan.planning import Plan, ProcessSpec
from rl_async.launcher.supervisor import Executor

PROXIED = "engine-0"


class Place(NamedTuple):
    """Where a process lives. ``host`` is empty for one on loopback."""

    before: list[str]
    environment: dict[str, str]
    host: str


def placed(planned: Plan, places: dict[str, Place]) -> Plan:
    """Return the plan with every process where it belongs."""

    def at(spec: ProcessSpec) -> ProcessSpec:
        place = places[spec.name]
        return dataclasses.replace(spec, argv=(*place.before, *spec.argv), env={**spec.env, **place.environment})

    return dataclasses.replace(
        planned,
        queue=at(planned.queue),
        shards=tuple(map(at, planned.shards)),
        engines=tuple(map(at, planned.engines)),
        workers=tuple(map(at, planned.workers)),
        trainers=tuple(map(at, planned.trainers)),
        hosts={**planned.hosts, **{name: place.host for name, place in places.items() if place.host}},
    )


def main() -> int:
    """Launch; return the exit code."""
    places = {name: Place(*place) for name, place in json.loads(Path(sys.argv[1]).read_text()).items()}
    planned, url_of, targets = machine.plan, supervisor.url_of, Path(sys.argv[2])

    def plan(*arguments: Any, **named: Any) -> Plan:
        return placed(planned(*arguments, **named), places)

    def told(executor: Executor, name: str) -> str:
        url = url_of(executor, name)
        if name != PROXIED:
            return url
        replace_file(targets / name, url.encode())
        return (targets / "proxy").read_text()

    with patch.object(machine, "plan", plan), patch.object(supervisor, "url_of", told):
        return rl_async(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
