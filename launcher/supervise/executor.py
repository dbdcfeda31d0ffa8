"""What a supervisor needs of where its processes run, and the machine it runs on itself."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from rl_async.launcher.plan.ports import HOST
from rl_async.launcher.plan.spec import THIS_MACHINE, ProcessSpec
from rl_async.launcher.supervise.process import Child, Lifeline, Process


class Executor(Protocol):
    """Starts processes, and knows under which addresses they are reached: ``places()`` are ports and hosts by name."""

    def open(self) -> None:
        """From here on processes may be started."""
        ...

    def close(self) -> None:
        """Nothing that was started outlives this."""
        ...

    async def allocate(self) -> None:
        """Find a place for every process, so that ``places`` knows them. Raises UserError for what is missing there."""
        ...

    async def start(self, spec: ProcessSpec, *, restarts: int) -> Process:
        """Start one. It may come to another place than before."""
        ...

    def places(self) -> tuple[Mapping[str, int], Mapping[str, str]]: ...


class ThisMachine:
    """Processes beside the supervisor, with ports that were assigned before."""

    def __init__(self, ports: Mapping[str, int], folder: Path, hosts: Mapping[str, str] = THIS_MACHINE) -> None:
        self._ports, self._hosts, self._folder = ports, hosts, folder
        self._exits = ExitStack()

    def open(self) -> None:
        """Make the pipe that ties the processes to this one."""
        self._lifeline = self._exits.enter_context(Lifeline())

    def close(self) -> None:
        """Cut it."""
        self._exits.close()

    async def allocate(self) -> None:
        """They are all here."""

    async def start(self, spec: ProcessSpec, *, restarts: int) -> Child:
        """Start one; its log is ``RUN/logs/NAME.log``."""
        stacks = self._folder / "stacks" / f"{spec.name}.txt"
        stacks.parent.mkdir(exist_ok=True)
        return await Child.start(
            spec.name,
            spec.command(self._ports, self._hosts, restarted=restarts > 0),
            spec.environment(self._ports, self._hosts),
            self._folder / "logs" / f"{spec.name}.log",
            self._lifeline,
            stacks,
        )

    def places(self) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """As they were given."""
        return self._ports, self._hosts


def url_of(executor: Executor, name: str) -> str:
    """Where a process answers HTTP."""
    ports, hosts = executor.places()
    return f"http://{hosts.get(name, HOST)}:{ports[name]}"
