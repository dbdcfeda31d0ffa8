"""Where processes run: the interface that a supervisor needs, and the implementation for its own machine."""

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from rl_async.launcher.plan.ports import HOST
from rl_async.launcher.plan.spec import THIS_MACHINE, ProcessSpec
from rl_async.launcher.supervise.process import Child, Lifeline, Process
from rl_async.process.private_folder import RENDEZVOUS, private_folder


class Executor(Protocol):
    """Starts processes and knows their addresses: ``places()`` returns ports and hosts by name."""

    def open(self) -> None:
        """Acquire what processes need; they may be started afterwards."""
        ...

    def close(self) -> None:
        """End every process that was started, and release what ``open`` acquired."""
        ...

    async def allocate(self) -> None:
        """Choose host and ports for every process. Raises UserError for what is missing there."""
        ...

    async def start(self, spec: ProcessSpec, *, restarts: int) -> Process:
        """Start a process, perhaps on another host than before."""
        ...

    def places(self) -> tuple[Mapping[str, int], Mapping[str, str]]: ...


class ThisMachine:
    """Runs processes on the supervisor's machine, with ports that were assigned before.

    Trainer ranks meet by a file in the run's private folder. Its name differs between their starts, so that a rank of
    an earlier one, still ending, cannot write into it.
    """

    def __init__(self, ports: Mapping[str, int], folder: Path, hosts: Mapping[str, str] = THIS_MACHINE) -> None:
        self._ports, self._hosts, self._folder = ports, hosts, folder
        self._exits = ExitStack()
        self._ranks_meet = private_folder(folder) / f"ranks-{secrets.token_hex(8)}"

    def open(self) -> None:
        """Open the pipe by whose end the processes notice that this one is gone."""
        self._lifeline = self._exits.enter_context(Lifeline())

    def close(self) -> None:
        """Close the pipe, which ends the processes that still run."""
        self._exits.close()

    async def allocate(self) -> None:
        """Do nothing: hosts and ports are known."""

    async def start(self, spec: ProcessSpec, *, restarts: int) -> Child:
        """Start a process that writes to ``RUN/logs/NAME.log``."""
        stacks = self._folder / "stacks" / f"{spec.name}.txt"
        stacks.parent.mkdir(exist_ok=True)
        return await Child.start(
            spec.name,
            spec.command(self._ports, self._hosts, restarted=restarts > 0),
            spec.environment(self._ports, self._hosts) | {RENDEZVOUS: f"{self._ranks_meet}-{restarts}"},
            self._folder / "logs" / f"{spec.name}.log",
            self._lifeline,
            stacks,
        )

    def places(self) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """Return the ports and hosts that were given."""
        return self._ports, self._hosts


def url_of(executor: Executor, name: str) -> str:
    """Return the HTTP address of a process."""
    ports, hosts = executor.places()
    return f"http://{hosts.get(name, HOST)}:{ports[name]}"
