"""Starts the processes of a plan, restarts them as it allows, and ends them all.

The executor decides where they run: on this machine (``ThisMachine``), or on Ray's nodes (``ray_nodes``).
``Children`` keeps processes of any role: it restarts them with a backoff, lists them in a file, and ends them on a
signal. To add a role, add a ``_keep_...`` method to the supervisor and start it in ``run``.

queue ──> payload shards
      ──> engines (healthy -> registered)  ──┐
      ──> reward model (healthy) ──> workers ├──> the trainer's end, or a role failing for good, or a signal
      ──> trainer ranks                      ┘              ──> everything is stopped

A child has its own session, log file and lifeline. ``RUN/processes.json`` shows the children's states to other
programs; the run's timeline keeps earlier states.
"""

import asyncio
import logging
import os
import secrets
import signal
import textwrap
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import msgspec

from rl_async.concurrency import outcomes, time_limit, to_the_end
from rl_async.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER, EngineLost, QueueLost, RlAsyncError, UserError
from rl_async.files import replace_file
from rl_async.insight.tail import LineTail
from rl_async.launcher.plan.planning import HOST, THIS_MACHINE, Plan, ProcessSpec, fill
from rl_async.messages import EngineRecord, Status
from rl_async.process.private_folder import RENDEZVOUS, SEGMENT_PREFIX, prefix_for, private_folder, sweep_segments
from rl_async.process.role import LIFELINE_FD, NO_ROOM, STACKS, heeded, ignore_alone
from rl_async.process.run_files import (
    ROSTER_FILE,
    ProcessRecord,
    ProcessState,
    Target,
    describe_exit,
    enter,
    listed,
    read_stat,
    said_last,
    write_targets,
)
from rl_async.rollout_server.http import EngineHttp
from rl_async.transfer_queue.auth import ClientKeys
from rl_async.transfer_queue.client import QueueClient

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


FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0
ROSTER_AGAIN_S = 1.0
# After this long the restarts of a process are forgiven, so that a few spread over weeks do not end a run.
HEALTHY_S = 6 * 3600.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

log = logging.getLogger("rl_async.launcher")
# Called with the number of the signal that asks the run to end.
StopHook = Callable[[int], None]


class Interrupted(Exception):
    """A signal, ``number``, asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Children:
    """Keeps the newest process of each name. Signals are handled, and processes live, only inside its ``with`` block.

    A first signal calls ``on_stop`` and raises Interrupted in ``beside``, so that the owner can end the processes in
    order. A Ctrl-C after it kills them all; other signals may be repeated, as schedulers do. Signals that this process
    was started to ignore, as by ``nohup``, stay ignored. ``states`` covers the processes in ``lasting``, which live as
    long as the run.
    """

    def __init__(
        self, executor: Executor, folder: Path, lasting: Iterable[ProcessSpec], on_stop: StopHook | None = None
    ) -> None:
        self.executor = executor
        self.states = {spec.name: ProcessState(spec.name, "waiting", since=time.time()) for spec in lasting}
        self._newest: dict[str, Process] = {}
        # When the newest process of each name began, in monotonic seconds.
        self._began: dict[str, float] = {}
        self._roster = Roster(folder)
        self._roster_again: asyncio.TimerHandle | None = None
        self._on_stop = on_stop
        # Whether a second Ctrl-C ended the processes.
        self.ended_at_once = False
        self._signals: list[int] = []
        self._signalled = asyncio.Event()

    def __enter__(self) -> Self:
        self.executor.open()
        self._heeded = heeded(*SIGNALS)
        ignore_alone(signal.SIGTERM)
        for number in self._heeded:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._heeded:
            asyncio.get_running_loop().remove_signal_handler(number)
        if self._roster_again is not None:
            self._roster_again.cancel()
        self._kill_now()
        self.executor.close()

    def __getitem__(self, name: str) -> Process:
        return self._newest[name]

    async def start(self, spec: ProcessSpec, *, restarts: int = 0) -> Process:
        """Start a process, for the first time or, with ``restarts``, as that restart."""
        child = await self.executor.start(spec, restarts=restarts)
        self._newest[spec.name], self._began[spec.name] = child, time.monotonic()
        self._roster.add(spec, child)
        self.set_state(spec.name, "running", restarts)
        log.info("%s started, pid %d%s", spec.name, child.pid, f" on {child.host}" if child.host else "")
        return child

    async def before_restart(self, spec: ProcessSpec, child: Process, code: int, restarts: int) -> int:
        """Wait, longer each time, and return the new number of restarts; earlier ones are forgiven after HEALTHY_S.

        Calls ``give_up`` if the process must not be started again.
        """
        if time.monotonic() - self._began[spec.name] > HEALTHY_S:
            restarts = 0
        if code in (EXIT_USER, EXIT_FAILED) or restarts >= spec.max_restarts:
            self.set_state(spec.name, "failed", restarts)
            self.give_up(child, code, restarts)
        said = said_last(child.output()) or "it wrote nothing"
        log.warning("%s ended (%s), starting it again; it said last: %s", child.name, describe_exit(code), said)
        self.set_state(spec.name, "restarting", restarts)
        await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(restarts, 16)))
        return restarts + 1

    def give_up(self, child: Process, code: int, restarts: int) -> NoReturn:
        """Record that a process failed. Raises UserError if it reported a mistake of the user, else RoleFailed."""
        self.set_state(child.name, "failed", restarts)
        raise failure(child, code, restarts)

    async def keep_together(
        self,
        specs: Sequence[ProcessSpec],
        is_over: Callable[[], Awaitable[bool]] | None = None,
        on_failure: Callable[[Process], Awaitable[None]] | None = None,
    ) -> None:
        """Run all ranks to their end. If one fails, or they end before ``is_over``, kill the others and restart all.

        ``on_failure`` is awaited with the failed rank while the others still run. Raises as ``give_up`` does.
        """
        restarts = 0
        while True:
            ranks = [await self.start(spec, restarts=restarts) for spec in specs]
            failed = await self._first_failure(ranks)
            if failed is None and (is_over is None or await is_over()):
                return
            failed = failed or ranks[0]
            if on_failure is not None:
                await on_failure(failed)
            for child in ranks:
                if child is not failed:
                    await child.kill()
            restarts = await self.before_restart(specs[ranks.index(failed)], failed, failed.returncode or 0, restarts)

    async def _first_failure(self, ranks: Sequence[Process]) -> Process | None:
        """Wait until a rank fails, and return it, or until all have ended with 0 or on request, and return None."""
        pending = {asyncio.ensure_future(child.wait()): child for child in ranks}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = pending.pop(task)
                    self.set_state(child.name, "ended", self.states[child.name].restarts)
                    if task.result() not in (0, *EXIT_STOPPED):
                        return child
            return None
        finally:
            for task in pending:
                task.cancel()

    async def beside(self, main: Awaitable[None], keepers: Sequence[Coroutine[Any, Any, None]] = ()) -> None:
        """Run ``main`` to its end beside ``keepers``, whose errors end it. Raises Interrupted on a signal.

        Returns or raises once all of them have ended.
        """
        main_task = asyncio.ensure_future(main)
        tasks = [main_task, *(asyncio.create_task(keeper) for keeper in (*keepers, self._watch_signals()))]
        pending = set(tasks)
        try:
            while not main_task.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            # The first error is already being raised.
            await outcomes(*tasks)

    async def stop(self, names: Iterable[str], timeout_s: float) -> None:
        """Send SIGTERM to all named processes, and kill those that have not ended after ``timeout_s``."""
        children = [self._newest[name] for name in names if name in self._newest]
        await to_the_end(*(child.stop(timeout_s) for child in children))

    async def finish(self, names: Iterable[str]) -> None:
        """Send SIGTERM to ranks and wait until all have ended, or one has failed, so that the others cannot finish."""
        ranks = [self._newest[name] for name in names if name in self._newest]
        asked = [asyncio.create_task(child.stop(None)) for child in ranks]
        try:
            await self._first_failure(ranks)
        finally:
            for task in asked:
                task.cancel()
            await outcomes(*asked)

    def mark_ended(self) -> None:
        """Record the end of all processes; failed ones keep that state."""
        for name, state in self.states.items():
            if state.state != "failed":
                self.set_state(name, "ended", state.restarts)

    @property
    def names(self) -> list[str]:
        """The names of all processes that were ever started."""
        return list(self._newest)

    def set_state(self, name: str, state: str, restarts: int) -> None:
        """Record the state of a process, unless it is not one of ``lasting``."""
        if name in self.states:
            new = ProcessState(name, state, restarts, time.time())
            if new != self.states[name]:
                self.states[name] = new
            self.write_roster()

    def write_roster(self) -> None:
        """Update ``processes.json``; on a full disk, log that and try again later.

        The file only informs other programs, so the run goes on while it is out of date.
        """
        if self._roster_again is not None:
            self._roster_again.cancel()
        try:
            self._roster.write(self.states)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("%s: %s; trying again", error.filename or ROSTER_FILE, error.strerror)
            self._roster_again = asyncio.get_running_loop().call_later(ROSTER_AGAIN_S, self.write_roster)

    async def _watch_signals(self) -> None:
        await self._signalled.wait()
        raise Interrupted(self._signals[0])

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        if self._signalled.is_set():
            if number == signal.SIGINT:
                self.ended_at_once = True
                self._kill_now()
            return
        self._signalled.set()
        if self._on_stop is not None:
            self._on_stop(number)

    def _kill_now(self) -> None:
        for child in self._newest.values():
            child.kill_now()


# --- ranks of a fine-tuning -------------------------------------------------------------------------------------------


async def keep_ranks(
    specs: Sequence[ProcessSpec], executor: Executor, folder: Path, stop_timeout_s: float, on_stop: StopHook
) -> None:
    """Run trainer ranks without a queue or engines, and start them again when one is lost.

    A first signal calls ``on_stop`` and asks the ranks to end their step and to save, which has no deadline; a Ctrl-C
    after it kills them. Raises Interrupted on a signal, and as ``Children.give_up`` does. All ranks have ended when it
    returns or raises.
    """
    with Children(executor, folder, specs, on_stop) as children:
        try:
            await children.beside(children.keep_together(specs))
        except Interrupted:
            await children.finish(children.names)
            raise
        finally:
            await children.stop(children.names, stop_timeout_s)
            children.mark_ended()


# --- a run ------------------------------------------------------------------------------------------------------------

HEALTH_POLL_S = 0.2
REGISTRY_WAIT_S = 10.0
# Trainers may take this share of launcher.stop_timeout_s; the rest is left for the processes that end after them.
TRAINERS_SHARE = 0.8

EngineHook = Callable[[EngineRecord], Awaitable[None]]
# Called with a description of the trouble, before any process is ended because of it.
TroubleHook = Callable[[str], Awaitable[None]]


class Supervisor:
    """Runs the processes of a plan. Signals are handled, and processes live, only inside its ``with`` block."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        folder: Path,
        keys: ClientKeys | None = None,
        on_trouble: TroubleHook | None = None,
        on_stop: StopHook | None = None,
    ) -> None:
        self._plan, self._executor, self._folder, self._keys = plan, executor, folder, keys
        self._on_trouble, self._reported_restart = on_trouble, -1
        self.children = Children(executor, folder, plan.processes, on_stop)
        # The event of a registered engine is set when another process removes it from the registry.
        self._cut_off: dict[str, asyncio.Event] = {}
        self._client: QueueClient | None = None
        self._queue_answered = asyncio.Event()
        # Set once episodes can be scored: when the reward model is healthy, or at once if the plan has none.
        self._scorable = asyncio.Event()

    def __enter__(self) -> Self:
        self.children.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.children.__exit__(kind, error, trace)

    @property
    def queue(self) -> QueueClient:
        """A client of the run's queue. Raises QueueLost outside ``run``."""
        if self._client is None:
            raise QueueLost("the queue is not running")
        return self._client

    @property
    def address(self) -> str:
        """The ZeroMQ address of the queue."""
        return fill(self._plan.queue_address, *self._executor.places())

    async def run_once(self, spec: ProcessSpec, report: Callable[[str], None]) -> None:
        """Run a process to its end, and report its lines as it prints them.

        Raises UserError or RoleFailed if it fails, Interrupted on a signal.
        """
        child = await self.children.start(spec)
        await self.children.beside(self._follow(child, report))
        if child.returncode:
            self.children.give_up(child, child.returncode, 0)

    async def run(self, work: Callable[[], Awaitable[None]] | None = None, on_engine: EngineHook | None = None) -> None:
        """Start all processes, wait for the trainer, or ``work`` in its place, and end them all.

        ``on_engine`` is awaited for each engine after its registration. Raises UserError if a role reported a mistake
        of the user, RoleFailed if one failed for good, and Interrupted on a signal.
        """
        asked = False
        try:
            async with QueueClient(self.address, role="launcher", name="launcher", keys=self._keys) as self._client:
                await self.children.start(self._plan.queue)
                await self.children.beside(
                    self._once_the_queue_answers(work or self._keep_trainers),
                    [
                        self._keep_queue(),
                        self._watch_registry(),
                        *(self._keep_shard(spec) for spec in self._plan.shards),
                        *(self._spare(spec, self._keep_engine(spec, on_engine)) for spec in self._plan.engines),
                        self._keep_reward_model(self._plan.reward_model),
                        *(self._spare(spec, self._keep_worker(spec)) for spec in self._plan.workers),
                    ],
                )
        except (RoleFailed, QueueLost) as error:
            await self._report_trouble(str(error).partition("\n")[0])
            raise
        except Interrupted:
            asked = True
            raise
        finally:
            await self._stop_all(asked)
            self._client = None

    async def _follow(self, child: Process, report: Callable[[str], None]) -> None:
        lines = LineTail(child.log, child.log_start)
        ended = False
        while not ended:
            # The exit code is taken before reading, so that the last lines are not missed.
            ended = child.returncode is not None
            for line in lines.read():
                report(line.decode(errors="replace"))
            await asyncio.sleep(0 if ended else HEALTH_POLL_S)
        await child.wait()

    # --- the roles --------------------------------------------------------------------------------------------------

    async def _once_the_queue_answers(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the queue's first answer, release its clients, which wait for it, and do ``work``."""
        await self.queue.exchange(Status(), timeout_s=self._plan.start_timeout_s)
        self._queue_answered.set()
        await work()

    async def _keep_queue(self) -> None:
        """Produces one running queue. Waits for its end, after which the run goes on if its journal survives.

        With a journal in memory (``max_restarts`` is 0) the state is lost, and the run ends with the queue.
        """
        spec = self._plan.queue
        # A queue that ended before its first answer may not have cleared its journal yet, so it starts as a new one.
        again_new = replace(spec, restart_argv=spec.first_argv)
        while True:
            child, restarts = self.children[spec.name], self.children.states[spec.name].restarts
            code = await child.wait()
            restarts = await self.children.before_restart(spec, child, code, restarts)
            await self.children.start(spec if self._queue_answered.is_set() else again_new, restarts=restarts)

    async def _keep_shard(self, spec: ProcessSpec) -> None:
        """Produces one running payload shard, which registers itself. Waits for its end. Runs until cancelled."""
        restarts = 0
        await self._queue_answered.wait()
        while True:
            child = await self.children.start(spec, restarts=restarts)
            restarts = await self.children.before_restart(spec, child, await child.wait(), restarts)

    async def _spare(self, spec: ProcessSpec, kept: Coroutine[Any, Any, None]) -> None:
        """Keep an engine or a worker; when it has used up its restarts, the run goes on with the others of its role.

        Raises the error of ``kept`` if no other is left, or if the error is not due to this process.
        """
        try:
            await kept
        except RoleFailed as error:
            alike = [*self._plan.engines, *self._plan.workers]
            left = [s.name for s in alike if s.role == spec.role and self.children.states[s.name].state != "failed"]
            if self.children.states[spec.name].state != "failed" or not left:
                raise
            log.error("%s; the run goes on without it, with %s", str(error).partition("\n")[0], ", ".join(left))

    async def _keep_worker(self, spec: ProcessSpec) -> None:
        """Produces one running agent worker. Waits for its end; returns when the queue reports that the run is over.

        It starts once the queue answers and episodes can be scored.
        """
        restarts = 0
        await self._queue_answered.wait()
        await self._scorable.wait()
        while True:
            child = await self.children.start(spec, restarts=restarts)
            code = await child.wait()
            if code == 0 and (await self.queue.status()).finished:
                self.children.set_state(spec.name, "ended", restarts)
                return
            restarts = await self.children.before_restart(spec, child, code, restarts)

    async def _keep_reward_model(self, spec: ProcessSpec | None) -> None:
        """Produces one healthy reward model, if the plan has one. Waits for its end. Runs until cancelled."""
        restarts = 0
        while spec is not None:
            child = await self.children.start(spec, restarts=restarts)
            self.children.set_state(spec.name, "starting", restarts)
            if await self._is_healthy(child, url_of(self._executor, spec.name)):
                self.children.set_state(spec.name, "running", restarts)
                self._scorable.set()
                target = Target.at(url_of(self._executor, spec.name), spec.role, spec.name)
                with listed(self._plan.prometheus, self._folder, target):
                    await child.wait()
            restarts = await self.children.before_restart(spec, child, await child.kill(), restarts)
        self._scorable.set()

    async def _keep_engine(self, spec: ProcessSpec, on_engine: EngineHook | None) -> None:
        """Produces one healthy, registered engine. Waits for its end, or for the registry to lose it.

        The processes of an engine of several nodes are one engine: if one of them ends, all start again.
        """
        restarts = 0
        while True:
            engine_id = f"{spec.name}.{restarts}" if restarts else spec.name
            child = await self.children.start(spec, restarts=restarts)
            nodes = [child, *[await self.children.start(other, restarts=restarts) for other in spec.followers]]
            url = url_of(self._executor, spec.name)
            self.children.set_state(spec.name, "starting", restarts)
            registered = await self._is_healthy(child, url, nodes)
            failed = next((node for node in nodes if node.returncode is not None), child)
            if not registered and failed.returncode is None:
                await self._report_trouble(f"{spec.name} did not answer within {self._plan.start_timeout_s:g} s")
            if registered:
                await self._queue_answered.wait()
                await self.queue.register_engine(engine_id, url, spec.engine_kind)
                cut_off = self._cut_off[engine_id] = asyncio.Event()
                if on_engine is not None:
                    await on_engine(EngineRecord(engine_id=engine_id, url=url, kind=spec.engine_kind))
                self.children.set_state(spec.name, "running", restarts)
                failed = await self._until_gone(nodes, cut_off)
                del self._cut_off[engine_id]
            code = await failed.kill()
            await to_the_end(*(node.kill() for node in nodes))
            for other in spec.followers:
                self.children.set_state(other.name, "ended", restarts)
            if registered:
                await self.queue.remove_engine(engine_id, f"its process ended: {describe_exit(code)}")
            restarts = await self.children.before_restart(spec, failed, code, restarts)

    async def _is_healthy(self, child: Process, url: str, needed: Sequence[Process] = ()) -> bool:
        """Whether the process answered its probe before it, or one that it ``needed``, ended, and before the deadline.

        Raises RoleFailed if it serves requests that carry no token.
        """
        probe = EngineHttp(url, timeout_s=None)
        try:
            async with time_limit(self._plan.start_timeout_s):
                while all(one.returncode is None for one in (child, *needed)):
                    if await probe.healthy():
                        # If the process is lost between the two requests, the next round notices it.
                        with suppress(EngineLost):
                            if not await probe.needs_token():
                                raise RoleFailed(f"{child.name} at {url} takes requests without the run's token")
                            return True
                    await asyncio.sleep(HEALTH_POLL_S)
        except TimeoutError:
            pass
        finally:
            await probe.close()
        return False

    async def _until_gone(self, nodes: Sequence[Process], cut_off: asyncio.Event) -> Process:
        """Wait until a process of an engine ends, or the registry loses it; return the ended one, or else the first."""
        waiting = [asyncio.create_task(cut_off.wait()), *(asyncio.ensure_future(node.wait()) for node in nodes)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        return next((node for node in nodes if node.returncode is not None), nodes[0])

    async def _watch_registry(self) -> None:
        """Consumes the registry; produces restarts of engines that other processes removed from it, and the list of
        engines for Prometheus.

        Waits for a change, REGISTRY_WAIT_S at a time. Runs until cancelled.
        """
        revision = -1
        await self._queue_answered.wait()
        while True:
            revision = (await self.queue.engines(revision, REGISTRY_WAIT_S)).revision
            ours = dict(self._cut_off)
            engines = (await self.queue.engines()).engines
            if self._plan.prometheus:
                targets = [Target.at(record.url, "engine", record.engine_id) for record in engines]
                write_targets(self._folder, "engines", targets)
            for engine_id in ours.keys() - {record.engine_id for record in engines}:
                log.warning("%s was cut off; its process is replaced", engine_id)
                ours[engine_id].set()

    async def _keep_trainers(self) -> None:
        """Produces all trainer ranks. Waits until all have ended; if one fails, all start again."""

        async def is_over() -> bool:
            return (await self.queue.status()).finished

        async def report(failed: Process) -> None:
            code = failed.returncode or 0
            if code not in (0, EXIT_USER, *EXIT_STOPPED):
                await self._report_trouble(f"{failed.name} ended ({describe_exit(code)})")

        await self.children.keep_together(self._plan.trainers, is_over, report)

    # --- endings ----------------------------------------------------------------------------------------------------

    async def _report_trouble(self, what: str) -> None:
        """Call ``on_trouble`` before any process is ended, at most once until the trainer restarts."""
        restart = max((self.children.states[spec.name].restarts for spec in self._plan.trainers), default=0)
        if self._on_trouble is not None and restart != self._reported_restart:
            self._reported_restart = restart
            self.children.write_roster()
            await self._on_trouble(what)

    async def _stop_all(self, asked: bool) -> None:
        """End all processes: trainers first, since they save and need the queue for it, and the queue last.

        If a signal ``asked`` for it, trainers end their step and save without a deadline, since a step may take
        minutes; a second Ctrl-C, or the scheduler that sent the signal, cuts this short. After a failure they have a
        share of the deadline, and the others have the rest.
        """
        timeout = self._plan.stop_timeout_s
        queue, shards = self._plan.queue.name, [spec.name for spec in self._plan.shards]
        trainers = [spec.name for spec in self._plan.trainers]
        others = [name for name in self.children.names if name not in (queue, *shards, *trainers)]
        if asked:
            await self.children.finish(trainers)
        began = time.monotonic()
        for names, share in ((trainers, TRAINERS_SHARE), (others, 1.0), (shards, 1.0), ([queue], 1.0)):
            await self.children.stop(names, max(0.0, began + share * timeout - time.monotonic()))
        self.children.mark_ended()
        write_targets(self._folder, "engines", [])
