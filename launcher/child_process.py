"""Starts child processes, each with its own session, log file and lifeline, and lists them in a file.

The supervisor starts processes through an ``Executor``: ``ThisMachine`` here, ``ray_nodes.RayNodes`` on a cluster.
``RUN/processes.json`` shows their states to other programs; the run's timeline keeps earlier states.
"""

import asyncio
import os
import secrets
import signal
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from rl_async.concurrency import time_limit
from rl_async.errors import EXIT_FAILED, EXIT_USER, RlAsyncError, UserError
from rl_async.files import replace_file
from rl_async.launcher.plan.planning import HOST, THIS_MACHINE, ProcessSpec
from rl_async.process.kernel import read_stat
from rl_async.process.private_folder import RENDEZVOUS, SEGMENT_PREFIX, prefix_for, private_folder, sweep_segments
from rl_async.process.role import LIFELINE_FD, STACKS
from rl_async.process.run_files import ROSTER_FILE, ProcessRecord, ProcessState, describe_exit, enter, said_last

TAIL_LINES = 15
TAIL_BYTES = 16384


class Process(Protocol):
    """A process that was started here (``Child``) or on another node (``ray_keeper.RemoteChild``)."""

    name: str
    log: Path
    log_start: int

    @property
    def pid(self) -> int: ...
    @property
    def started(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    async def stop(self, timeout_s: float | None) -> int: ...
    async def kill(self) -> int: ...
    def kill_now(self) -> None: ...
    def output(self) -> str: ...
    def tail(self) -> str: ...


class RoleFailed(RlAsyncError):
    """A process failed and is not restarted. The message ends with its last words and the path of its log."""


class Lifeline:
    """A pipe whose write end only this process holds. However it dies, its children read end-of-file and exit."""

    def __enter__(self) -> Self:
        self.read_end, self._write_end = os.pipe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write_end)
        os.close(self.read_end)


class Child:
    """A running process. It leads its own session, so that a terminal's Ctrl-C only reaches the supervisor."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, log: Path, log_start: int, segments: str
    ) -> None:
        self.name, self.log, self.log_start = name, log, log_start
        self._process, self._segments = process, segments
        self._swept = False
        # An empty host is the supervisor's own machine.
        self.host = ""
        # Clock ticks since the machine booted.
        self.started = read_stat(process.pid).started

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        lifeline: Lifeline,
        stacks: Path,
        cwd: Path | None = None,
    ) -> Self:
        """Start ``argv`` in ``cwd`` with ``env`` added to this process's environment, and append its output to ``log``.

        On request, the process writes its Python stacks to the file ``stacks`` (``rl_async.process.role``).
        """
        segments = prefix_for(stacks)
        # An earlier process of this name may have been killed with its supervisor.
        sweep_segments(segments)
        with log.open("ab") as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    **env,
                    LIFELINE_FD: str(lifeline.read_end),
                    STACKS: str(stacks),
                    SEGMENT_PREFIX: segments,
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(lifeline.read_end,),
                start_new_session=True,
                cwd=cwd,
            )
        return cls(name, process, log, log_start, segments)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal that killed it; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the process has ended, then kill its descendants and remove its shared memory.

        The caller sets the deadline.
        """
        code = await self._process.wait()
        # The group is killed only once, since another group may get its id later.
        if not self._swept:
            self._swept = True
            self._signal_group(signal.SIGKILL)
            sweep_segments(self._segments)
        return code

    async def stop(self, timeout_s: float | None) -> int:
        """Send SIGTERM to the process and wait for it; with ``timeout_s``, kill it after that time."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            async with time_limit(timeout_s):
                return await self.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Kill the process and everything that it started."""
        self.kill_now()
        return await self.wait()

    def kill_now(self) -> None:
        """Kill the process without waiting until it has ended."""
        if self.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        # The group may be empty.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def output(self) -> str:
        """Return the end of this process's output, without that of earlier processes in the same log."""
        return tail_of(self.log, self.log_start)

    def tail(self) -> str:
        """Return the last lines of this process's output."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])


def tail_of(log: Path, start: int) -> str:
    """Return the last TAIL_BYTES of a log, without anything before ``start``."""
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - TAIL_BYTES))
        return file.read().decode(errors="replace")


def is_full(folder: Path) -> bool:
    """Whether a file in the folder cannot grow by a block."""
    try:
        return os.statvfs(folder).f_bavail == 0
    except FileNotFoundError:
        return False


def failure(child: Process, code: int, restarts: int) -> RlAsyncError:
    """Return the error for a process that is not restarted: a UserError if it reported a mistake of the user."""
    if code == EXIT_USER:
        mistakes = [line for line in child.output().splitlines() if line.startswith("error: ")]
        if mistakes:
            return UserError(f"{child.name}: {mistakes[-1].removeprefix('error: ')}")
    after = f" after {restarts} restarts" if restarts else ""
    more = "; launcher.max_restarts allows no more" if restarts and code != EXIT_FAILED else ""
    if is_full(child.log.parent):
        more += f"; the disk of {child.log} is full, so some of what it wrote is lost: make room there"
    lines = textwrap.indent(child.tail() or "(it wrote nothing)", "  ")
    said = said_last(child.output()) or "nothing"
    return RoleFailed(
        f"{child.name} failed ({describe_exit(code)}{after}){more}\nit wrote:\n{lines}\n"
        f"{child.name} said last: {said}\nits log: {child.log}"
    )


class Executor(Protocol):
    """Starts processes and knows their addresses: ``places()`` returns ports and hosts by name."""

    def open(self) -> None:
        """Acquire the resources that processes need; they may be started afterwards."""
        ...

    def close(self) -> None:
        """End every process that was started, and release the resources of ``open``."""
        ...

    async def allocate(self) -> None:
        """Choose host and ports for every process. Raises UserError if something is missing there."""
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
        """Open the pipe that tells processes, by its end, that this one is gone."""
        self._lifeline = self._exits.enter_context(Lifeline())

    def close(self) -> None:
        """Close the pipe, so that the remaining processes end."""
        self._exits.close()

    async def allocate(self) -> None:
        """Do nothing, since hosts and ports are known."""

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
        return self._ports, self._hosts


def url_of(executor: Executor, name: str) -> str:
    """Return the HTTP address of a process."""
    ports, hosts = executor.places()
    return f"http://{hosts.get(name, HOST)}:{ports[name]}"


class Roster:
    """Writes ``RUN/processes.json`` with the newest process of each name."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._started: dict[str, tuple[ProcessSpec, Process]] = {}
        # The pid and state of each process as the timeline has them.
        self._entered: dict[str, tuple[int, str]] = {}

    def add(self, spec: ProcessSpec, child: Process) -> None:
        """Enter a process that was started, in place of an earlier one of its name."""
        self._started[spec.name] = (spec, child)

    def write(self, states: Mapping[str, ProcessState]) -> None:
        """Replace the file. Processes without a given state are running or have ended."""
        records = []
        for name, (spec, child) in self._started.items():
            # The preparation is not among ``states``.
            unkept = "running" if child.returncode is None else "ended"
            known = states.get(name, ProcessState(name, unkept))
            records.append(
                ProcessRecord(
                    name=name,
                    role=spec.role,
                    pid=child.pid,
                    started=child.started,
                    host=child.host,
                    state=known.state,
                    restarts=known.restarts,
                    exit=child.returncode,
                )
            )
        replace_file(self._run / ROSTER_FILE, msgspec.json.encode(records) + b"\n")
        for record in records:
            if self._entered.get(record.name) != (record.pid, record.state):
                exited = "" if record.exit is None else f", {describe_exit(record.exit)}"
                enter(self._run, "launcher", record.name, record.state, about=f"pid {record.pid}{exited}")
                self._entered[record.name] = record.pid, record.state
