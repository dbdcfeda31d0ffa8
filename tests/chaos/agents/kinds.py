"""The kinds of runs, and whom a round may kill in each.

To add one: an entry in KINDS with its settings, and in VICTIMS what its processes look like.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rl_async.agent_loop.environments.host_pool import MODULE as HOST
from rl_async.launcher import play_keeper
from rl_async.process import guard
from tests.chaos.agents.leftovers import Process

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
TASKS = "artifacts/calculator/tasks.jsonl"  # where the preset's other files are made
PROGRAM = HERE / "program.py"
SERVER = ROOT / "examples" / "mcp_calculator.py"
# A server that leaves a process behind, in a session of its own, before it becomes the server. (Not by bash, which
# reads ~/.bashrc where its input is a socket, and whatever that starts is killed in the middle, too.)
START_SERVER = f"[sh, -c, 'setsid sleep 600 <&- >&- 2>&- & exec \"$@\"', sh, {sys.executable}, {SERVER}"

Processes = dict[int, Process]
IsVictim = Callable[[Process, Processes], bool]


class Kind(NamedTuple):
    """``played``: by agent programs, with ``rl-async play``. ``victims``: whom rounds kill, each as often."""

    settings: tuple[str, ...]
    victims: tuple[str, ...]
    played: bool = False


def _module(name: str) -> IsVictim:
    return lambda process, _: process.argv[1:4] == ("-P", "-m", name)


def _kept(by: str, *, last: str = "") -> IsVictim:
    """What a keeper or guard of ours started; ``last``: within its last argument."""

    def kept(process: Process, everyone: Processes) -> bool:
        parent = everyone.get(process.parent)
        return parent is not None and by in parent.argv and last in process.argv[-1:][0] and process.name != "sleep"

    return kept


def _in_sandbox(process: Process, everyone: Processes) -> bool:
    parent = everyone.get(process.parent)
    return parent is not None and _first_of_sandbox(parent, everyone)


def _first_of_sandbox(process: Process, _: Processes) -> bool:
    return process.name != "bwrap" and process.argv[1:4] == ("-I", "-S", "/inside.py")


def _guarded(server: Callable[[Process], bool]) -> IsVictim:
    """The guard of such a server."""
    return lambda process, _: guard.__file__ in process.argv and server(process)


def _of_host(process: Process, everyone: Processes) -> bool:
    parent = everyone.get(process.parent)
    return parent is not None and VICTIMS["environment host"](parent, everyone)


VICTIMS: dict[str, IsVictim] = {
    "agent worker": _module("rl_async.agent_loop"),
    "gateway": _module("rl_async.agent_loop.gateway"),
    "MCP server of a worker": _kept(guard.__file__, last="shared"),
    "MCP server of an episode": _kept(guard.__file__, last="own"),
    "guard of an MCP server": _guarded(lambda process: f"rl_async.{HOST}" not in process.argv),
    "environment host": _module(f"rl_async.{HOST}"),
    "guard of an environment host": _guarded(lambda process: f"rl_async.{HOST}" in process.argv),
    "container of an environment": _of_host,
    "sandbox": lambda process, _: process.name == "bwrap",
    "first process of a sandbox": _first_of_sandbox,
    "program in a sandbox": _in_sandbox,
    "agent program": _kept(play_keeper.__file__),
    "keeper of an agent program": lambda process, _: play_keeper.__file__ in process.argv,
    "rl-async play": lambda process, _: process.argv[1:4] == ("-m", "rl_async.launcher.cli", "play"),
}
LOOP = f"agent.loop={HERE / 'loop.py'}:play"
WORKERS = (LOOP, f"data.path={TASKS}", "agent.workers=2", "agent.concurrency=4")
KINDS = {
    "mcp": Kind(
        (
            *WORKERS,
            "agent.tools=[]",
            f"agent.mcp=[{{command: {START_SERVER}, shared], scope: worker, name: shared}}, "
            f"{{command: {START_SERVER}, '{{workspace}}/own'], scope: episode, name: own}}]",
        ),
        ("MCP server of a worker", "MCP server of an episode", "guard of an MCP server", "agent worker"),
    ),
    "environments": Kind(
        (
            *WORKERS,
            "agent.tools=[]",
            f"agent.environment={HERE / 'container.py'}:InContainer",
            "agent.environment_hosts={ready: 2, processes: 2}",
            "reward.functions=[{name: environment}]",
        ),
        ("environment host", "guard of an environment host", "container of an environment", "agent worker"),
    ),
    "sandbox": Kind(
        (*WORKERS, "agent.tools=[python, bash]"),
        ("sandbox", "first process of a sandbox", "program in a sandbox", "agent worker"),
    ),
    "gateway": Kind(
        ("agent.gateway={idle_timeout_s: 5}",),
        ("agent program", "keeper of an agent program", "rl-async play", "gateway"),
        played=True,
    ),
}


def victims(role: str, running: list[Process]) -> list[Process]:
    """Return the processes of a role."""
    everyone = {process.pid: process for process in running}
    return [process for process in running if process.argv and VICTIMS[role](process, everyone)]
