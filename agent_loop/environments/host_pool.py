"""Environments outside the agent worker's process: its host processes (`agent.environment_hosts`), from its side.

    HostedEnvironments --HostPlan: which host, when--> HostLink --host_wire--> host_process

The worker enters ``HostedEnvironments``, which starts the hosts and gives each episode an environment in one of them;
it is called like one in this process. ``HostPlan``, which is pure, decides which host prepares environments, which
episode gets one, and when to replace a host. Hosts and the processes that they start end with the worker
(`rl_async/process/guard.py`).
"""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar

import msgspec

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments import host_wire
from rl_async.agent_loop.environments.session import OpenGame
from rl_async.agent_loop.tools.tool import CallableTool, Step, ToolResult
from rl_async.concurrency import outcomes, time_limit, to_the_end
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, EnvironmentFailed, RlAsyncError
from rl_async.files import UNDECODABLE
from rl_async.messages import Task
from rl_async.process import guard
from rl_async.process.role import own_module
from rl_async.process.run_files import kill_marked
from rl_async.reward_loop.api import Score

# After so many failures of hosts in a row, waiting episodes are told.
MOST_FAILURES = 3
# The pause after the second failure in a row; each further one doubles it up to the longest.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
log = logging.getLogger("rl_async.agent_loop")

T = TypeVar("T")


class StartHost(NamedTuple):
    """Start a process; report ``host_started`` or ``host_lost``."""

    host: int


class StopHost(NamedTuple):
    """End a process that nobody uses; it is forgotten already."""

    host: int


class Prepare(NamedTuple):
    """Prepare an environment; report ``prepared``, or ``prepare_failed`` and then ``ended``."""

    host: int
    instance: int


class Give(NamedTuple):
    """Let the episode that waits with ``ticket`` have an environment; report ``opened``, ``ending``, ``ended``."""

    ticket: int
    host: int
    instance: int


class Refuse(NamedTuple):
    """Tell the episode that waits with ``ticket`` why it gets none."""

    ticket: int
    reason: str


Action = StartHost | StopHost | Prepare | Give | Refuse


@dataclass
class _Host:
    """A host. ``stuck`` counts environments that were given up with a call that never returned; a host with such a call
    is ``draining``: it gets nothing new."""

    started: bool = False
    draining: bool = False
    stuck: int = 0


@dataclass
class _Instance:
    host: int
    phase: Literal["preparing", "ready", "opening", "open", "ending"]


class HostPlan:
    """The event methods record events; ``decide`` then returns each due action once.

    There are at most ``most`` environments at once, prepared and stuck ones included. At most ``starting`` of them are
    being prepared (or opened, where nothing can be prepared), and ``ready`` are kept prepared. Time comes as ``now``.
    """

    def __init__(self, *, hosts: int, most: int, ready: int, starting: int) -> None:
        self._wanted, self._most, self._starting = hosts, most, starting
        self._ready, self._prepares = ready, False
        self._hosts: dict[int, _Host] = {}
        self._instances: dict[int, _Instance] = {}
        self._tickets: deque[int] = deque()
        self._refused: list[Refuse] = []
        self._host_numbers, self._instance_numbers = itertools.count(), itertools.count()
        # Hosts and preparations that failed in a row.
        self._lost = self._failed = 0
        self._no_host_before = self._no_prefetch_before = 0.0

    def ask(self, ticket: int) -> None:
        """An episode waits for an environment."""
        self._tickets.append(ticket)

    def withdraw(self, ticket: int) -> None:
        """An episode waits no longer; it may have been given one or refused meanwhile."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)

    def host_started(self, host: int, *, prepares: bool) -> None:
        """A host can be used. ``prepares``: whether its environments can be prepared, which is the same for all."""
        self._hosts[host].started, self._prepares = True, prepares

    def host_lost(self, host: int, reason: str, now: float) -> None:
        """A host ended, or never started, and its environments with it."""
        # A stopped host is forgotten already.
        if self._hosts.pop(host, None) is None:
            return
        gone = [number for number, instance in self._instances.items() if instance.host == host]
        phases = [self._instances.pop(number).phase for number in gone]
        for _ in range(phases.count("preparing")):
            self._count_failure(reason, now)
        self._lost += 1
        self._no_host_before = now + _pause(self._lost)
        if self._lost >= MOST_FAILURES:
            self._refused += [Refuse(ticket, reason) for ticket in self._tickets]
            self._tickets.clear()

    def prepared(self, instance: int) -> None:
        """An environment is ready to be given to an episode."""
        if instance in self._instances:
            self._instances[instance].phase = "ready"
            self._lost = self._failed = 0

    def prepare_failed(self, instance: int, reason: str, now: float) -> None:
        """An environment could not be prepared; it is ``ending``."""
        if instance in self._instances:
            self._instances[instance].phase = "ending"
            self._count_failure(reason, now)

    def opened(self, instance: int) -> None:
        """An episode begins in its environment."""
        if instance in self._instances:
            self._instances[instance].phase = "open"
            self._lost = 0

    def ending(self, instance: int) -> None:
        """Note that an environment is being closed."""
        if instance in self._instances:
            self._instances[instance].phase = "ending"

    def ended(self, instance: int, *, stuck: bool = False) -> None:
        """An environment is closed. If ``stuck``, a call in its host never returned, and only the host's end helps."""
        if instance not in self._instances:
            return
        host = self._hosts[self._instances.pop(instance).host]
        if stuck:
            host.stuck += 1
            host.draining = True

    def _count_failure(self, reason: str, now: float) -> None:
        """Let one waiting episode know of a failed preparation, and prepare ahead again after a pause."""
        self._failed += 1
        self._no_prefetch_before = now + _pause(self._failed)
        if self._tickets:
            self._refused.append(Refuse(self._tickets.popleft(), reason))

    def decide(self, now: float) -> list[Action]:
        """Return what to do now."""
        actions: list[Action] = [*self._refused]
        self._refused.clear()
        actions += self._stop_drained()
        if now >= self._no_host_before:
            while sum(not host.draining for host in self._hosts.values()) < self._wanted:
                host = next(self._host_numbers)
                self._hosts[host] = _Host()
                actions.append(StartHost(host))
        actions += self._give()
        if self._prepares:
            actions += self._prepare(now)
        return actions

    def wake_at(self, now: float) -> float | None:
        """Return when ``decide`` may have more to do without an event, or None."""
        waits = []
        if sum(not host.draining for host in self._hosts.values()) < self._wanted:
            waits.append(self._no_host_before)
        if self._missing() > 0:
            waits.append(self._no_prefetch_before)
        return min((at for at in waits if at > now), default=None)

    def _stop_drained(self) -> list[Action]:
        used = {instance.host for instance in self._instances.values()}
        drained = [number for number, host in self._hosts.items() if host.draining and number not in used]
        for number in drained:
            del self._hosts[number]
        return [StopHost(number) for number in drained]

    def _give(self) -> list[Action]:
        """Give prepared environments to those who wait; without preparation, the right to open one."""
        given: list[Action] = []
        while self._tickets:
            if self._prepares:
                ready = [number for number, instance in self._instances.items() if instance.phase == "ready"]
                # Those of a draining host come first, so that it can end.
                number = min(ready, key=lambda n: not self._hosts[self._instances[n].host].draining, default=None)
            else:
                number = self._begin("opening")
            if number is None:
                break
            self._instances[number].phase = "opening"
            given.append(Give(self._tickets.popleft(), self._instances[number].host, number))
        return given

    def _prepare(self, now: float) -> list[Action]:
        """Prepare for those who wait, and ahead of those who will."""
        begun: list[Action] = []
        while self._missing() > 0 and (now >= self._no_prefetch_before or self._unserved() > 0):
            if (number := self._begin("preparing")) is None:
                break
            begun.append(Prepare(self._instances[number].host, number))
        return begun

    def _begin(self, phase: Literal["preparing", "opening"]) -> int | None:
        """Begin an environment in the host with the fewest, or return None if hosts or limits do not allow one."""
        hosts = [number for number, host in self._hosts.items() if host.started and not host.draining]
        alive = len(self._instances) + sum(host.stuck for host in self._hosts.values())
        if not hosts or alive >= self._most or self._count(phase) >= self._starting:
            return None
        loads = {host: sum(instance.host == host for instance in self._instances.values()) for host in hosts}
        number = next(self._instance_numbers)
        self._instances[number] = _Instance(min(hosts, key=loads.__getitem__), phase)
        return number

    def _missing(self) -> int:
        """How many to prepare, besides those that are prepared."""
        return self._unserved() + self._ready - self._count("ready") if self._prepares else 0

    def _unserved(self) -> int:
        """How many episodes wait without a preparation in progress."""
        return len(self._tickets) - self._count("preparing")

    def _count(self, phase: str) -> int:
        return sum(instance.phase == phase for instance in self._instances.values())


def _pause(failures: int) -> float:
    """How long to wait after that many failures in a row: not at all after the first."""
    return 0.0 if failures < 2 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 2, 16))


class HostedTool:
    """A tool of an environment in a host."""

    def __init__(self, described: host_wire.Described, host: "HostLink", instance: int) -> None:
        self.name, self.schema = described.name, described.schema
        self._role, self._host, self._instance = described.role, host, instance

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the tool. Raises EnvironmentFailed if its host is lost."""
        request = (self._instance, self._role, self.name, arguments, timeout_s)
        return await self._host.call(host_wire.UseTool, *request, answer=ToolResult, within_s=timeout_s)


class _Hosted:
    """An environment that has begun, in use by one episode. Methods raise EnvironmentFailed, and errors that name a
    user's mistake."""

    def __init__(self, host: "HostLink", instance: int, begun: host_wire.Begun, timeout_s: float) -> None:
        self._host, self._instance, self._timeout_s = host, instance, timeout_s
        self._begun = begun

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the environment's answer to a turn; its observation is in the messages alone."""
        said = await self._host.call(
            host_wire.Say, self._instance, answer, answer=host_wire.Said, within_s=self._timeout_s
        )
        return said.step, said.messages

    def _tools(self, role: str) -> Sequence[CallableTool]:
        return [HostedTool(tool, self._host, self._instance) for tool in self._begun.tools if tool.role == role]

    async def _judged(self, kind: Any) -> Any:
        return await self._host.call(host_wire.Judge, self._instance, answer=kind, within_s=self._timeout_s)


class HostedSession(_Hosted):
    """An episode of an environment without roles, in its host process."""

    async def reset(self) -> list[Message]:
        return self._begun.messages

    def tools(self) -> Sequence[CallableTool]:
        return self._tools("")

    async def reward(self) -> Score | None:
        score: Score | None = await self._judged(Score | None)
        return score


class HostedGame(_Hosted, OpenGame):
    """An episode of an environment with roles, in its host process."""

    def __init__(self, host: "HostLink", instance: int, begun: host_wire.Begun, timeout_s: float) -> None:
        super().__init__(host, instance, begun, timeout_s)
        self.roles = begun.roles

    async def reset(self) -> tuple[Step, list[Message]]:
        return Step(to=self._begun.to), self._begun.messages

    def tools(self) -> Mapping[str, Sequence[CallableTool]]:
        return {role: self._tools(role) for role in self.roles}

    async def reward(self) -> Mapping[str, Score]:
        scores: dict[str, Score] = await self._judged(dict[str, Score])
        return scores


MODULE = "agent_loop.environments.host_process"
# How long a host may stay silent after a call's deadline, which it holds itself, and a process may take to end.
GRACE_S = 30.0
# This variable marks the processes of a host; each host has another value.
MARK = "RL_ASYNC_ENVIRONMENTS_FOLDER"
# Importing an environment's packages from a slow disk takes a minute.
START_S = 180.0
# The guard's exit code for SIGKILL.
KILLED = 256 - 9


class HostLink:
    """One process. ``lost`` is called once, with the reason, when it has ended, however it did."""

    def __init__(self, number: int, log_path: Path, lost: Callable[[str], None]) -> None:
        self._number, self._log_path, self._lost = number, log_path, lost
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._numbers = itertools.count(1)
        # The guard makes this folder, and removes it.
        self._folder = Path(tempfile.gettempdir()) / f"rl-async-environments-{os.urandom(8).hex()}"
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        # Why we ended the process.
        self._why = ""

    async def start(self, config: RunConfig) -> host_wire.Welcome:
        """Start the process and wait until it can be called.

        Raises ConfigError for an environment that cannot be made, and EnvironmentFailed if the process ends.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        guarded = ["-I", "-S", guard.__file__, str(os.getpid()), str(self._folder), *own_module(MODULE)]
        with theirs, self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *guarded,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=os.environ | {MARK: str(self._folder), "TMPDIR": str(self._folder)},
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(host_wire.frame(host_wire.Setup(config)))
        try:
            async with time_limit(START_S):
                first = msgspec.msgpack.decode(await host_wire.read_frame(reader), type=host_wire.Reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvironmentFailed(await self._ended()) from None
        except UNDECODABLE as error:
            self.kill(f"was killed: it sent what cannot be read: {error}")
            raise EnvironmentFailed(await self._ended()) from None
        except TimeoutError:
            self.kill(f"did not start within {START_S:g} s")
            raise EnvironmentFailed(await self._ended()) from None
        if isinstance(first, host_wire.Failure):
            raise host_wire.error_of(first)
        assert isinstance(first, host_wire.Welcome)
        self._reading = asyncio.create_task(self._read(reader), name=f"environment host {self._number}")
        return first

    async def call(self, request: type[Any], *arguments: Any, answer: type[T], within_s: float) -> T:
        """Send a request and return its answer; a caller that is cancelled cancels the call in the host, too.

        Raises the error that the host answers with, and EnvironmentFailed if the host is lost, or is silent for GRACE_S
        after the deadline that it holds itself: then nothing in it can be trusted to end, and it is killed.
        """
        if self._writer is None or self._reading is None or self._reading.done():
            raise EnvironmentFailed(f"environment host {self._number} has ended")
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(request(number, *arguments))
            async with time_limit(within_s + GRACE_S):
                return msgspec.msgpack.decode(await future, type=answer)
        except TimeoutError:
            self.kill(f"was killed: it had not answered {request.__name__} within {within_s:g} s")
            raise EnvironmentFailed(f"environment host {self._number} {self._why}") from None
        except UNDECODABLE as error:
            self.kill(f"was killed: its answer to {request.__name__} cannot be read: {error}")
            raise EnvironmentFailed(f"environment host {self._number} {self._why}") from None
        except asyncio.CancelledError:
            self._send(host_wire.Cancel(number))
            raise
        finally:
            del self._calls[number]

    def _send(self, request: host_wire.Request) -> None:
        assert self._writer is not None
        frame = host_wire.frame(request)
        # If the writer is closing, the end of the process soon fails all calls.
        if not self._writer.is_closing():
            self._writer.write(frame)

    def kill(self, why: str) -> None:
        """End the process and all that it started, soon."""
        self._why = self._why or why
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def close(self) -> None:
        """Let the process end by itself, else kill it, and wait for the end of all that it started."""
        self._why = self._why or "was closed"
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await self._ended()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand answers to those who wait for them, until the process ends. Waits for the host."""
        replies = msgspec.msgpack.Decoder(host_wire.Reply)
        try:
            while True:
                self._settle(replies.decode(await host_wire.read_frame(reader)))
        # The process has ended.
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (*UNDECODABLE, ValueError) as error:
            self.kill(f"was killed: it sent what cannot be read: {error}")
        assert self._writer is not None
        self._writer.close()
        reason = await self._ended()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EnvironmentFailed(reason))
        self._lost(reason)

    def _settle(self, reply: host_wire.Reply) -> None:
        assert not isinstance(reply, host_wire.Welcome)
        future = self._calls.get(reply.call)
        if future is None or future.done():
            return
        if isinstance(reply, host_wire.Failure):
            future.set_exception(host_wire.error_of(reply))
        else:
            future.set_result(reply.value)

    async def _ended(self) -> str:
        """Wait for the end of the process and all that it started; return the reason for callers that needed it."""
        assert self._process is not None
        try:
            async with time_limit(GRACE_S):
                code = await self._process.wait()
        except TimeoutError:
            self.kill("did not end")
            code = await self._process.wait()
        # The guard itself was killed.
        if code < 0:
            await asyncio.to_thread(self._sweep)
        how = self._why or ("was killed" if code == KILLED else f"ended with {code}")
        return f"environment host {self._number} {how}; its log is {self._log_path}"

    def _sweep(self) -> None:
        """Clean up in place of the guard, which was killed."""
        kill_marked(MARK, str(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)


class _Place(NamedTuple):
    """Where an environment is."""

    host: HostLink
    instance: int


class HostedEnvironments:
    """Opens environments in ``agent.environment_hosts.processes`` host processes, which it replaces when they end.

    Entering it starts the hosts, and raises ConfigError for an environment that cannot be made. They write to a log
    called after ``owner``.
    """

    def __init__(self, config: RunConfig, log_folder: Path, owner: str) -> None:
        hosts = config.agent.environment_hosts
        assert hosts is not None
        self._config, self._hosts, self._timeout_s = config, hosts, config.agent.environment_timeout_s
        self._log_path = log_folder / f"environments-{owner}.log"
        self._plan = HostPlan(
            hosts=hosts.processes,
            most=config.agent.concurrency + hosts.ready,
            ready=hosts.ready,
            starting=hosts.starting,
        )
        self._links: dict[int, HostLink] = {}
        self._waiting: dict[int, asyncio.Future[_Place]] = {}
        self._tickets = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        # The first host tells.
        self._prepares: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            self._act()
            prepares = await self._prepares
            if self._hosts.ready and not prepares:
                raise ConfigError(
                    f"agent.environment_hosts.ready={self._hosts.ready}: {self._config.agent.environment} has no "
                    "prepare(), so nothing can be made ready before an episode wants it; leave ready out"
                )
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[HostedSession | HostedGame]:
        """Have an environment for an episode, and close it at the episode's end. Raises EnvironmentFailed."""
        place, failure = await self._acquire(), ""
        limit = self._hosts.start_timeout_s
        try:
            begun = await place.host.call(host_wire.Begin, place.instance, task, answer=host_wire.Begun, within_s=limit)
            self._plan.opened(place.instance)
            self._act()
            yield (HostedGame if begun.roles else HostedSession)(*place, begun, self._timeout_s)
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            unclosed = await asyncio.shield(self._spawn(self._end(place, failure)))
            if unclosed and not failure:
                raise EnvironmentFailed(unclosed)

    async def _acquire(self) -> _Place:
        """Wait for an environment, or for the right to make one."""
        ticket = next(self._tickets)
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._plan.ask(ticket)
        self._act()
        try:
            return await future
        except asyncio.CancelledError:
            self._plan.withdraw(ticket)
            if future.done() and not future.cancelled() and future.exception() is None:
                self._spawn(self._end(future.result(), "the episode was given up"))
            raise
        finally:
            del self._waiting[ticket]

    async def _end(self, place: _Place, failure: str) -> str:
        """Close an environment; return the error of closing it. One that is lost with its host is closed."""
        self._plan.ending(place.instance)
        # Its close and its __aexit__ have a deadline each.
        limit = 2 * self._timeout_s
        try:
            ended = await place.host.call(
                host_wire.End, place.instance, failure, answer=host_wire.Ended, within_s=limit
            )
        except EnvironmentFailed as error:
            log.warning("an environment was not closed: %s", error)
            # If its host is still alive, then not for long.
            ended = host_wire.Ended(stuck=True)
        self._plan.ended(place.instance, stuck=ended.stuck)
        self._act()
        return ended.failure

    def _act(self) -> None:
        """Carry out what is due, now and when time has passed."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        for action in self._plan.decide(now):
            self._carry_out(action)
        if self._timer is not None:
            self._timer.cancel()
        at = self._plan.wake_at(now)
        self._timer = loop.call_at(at, self._act) if at is not None else None

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartHost(host):
                link = self._links[host] = HostLink(host, self._log_path, self._lost(host))
                self._spawn(self._start(host, link))
            case StopHost(host):
                link = self._links.pop(host)
                log.warning("environment host %d is replaced: a call in it never returned", host)
                link.kill("was replaced")
                self._spawn(link.close())
            case Prepare(host, instance):
                self._spawn(self._prepare(_Place(self._links[host], instance)))
            case Give(ticket, host, instance):
                future, place = self._waiting[ticket], _Place(self._links[host], instance)
                if future.cancelled():
                    self._spawn(self._end(place, "the episode was given up"))
                else:
                    future.set_result(place)
            case Refuse(ticket, reason):
                if not self._waiting[ticket].cancelled():
                    self._waiting[ticket].set_exception(EnvironmentFailed(reason))

    async def _start(self, host: int, link: HostLink) -> None:
        try:
            welcome = await link.start(self._config)
        except RlAsyncError as error:
            await link.close()
            if self._prepares.done() or self._closed:
                self._lost(host)(str(error))
            else:
                self._prepares.set_exception(error)
            return
        self._plan.host_started(host, prepares=welcome.prepares)
        if not self._prepares.done():
            self._prepares.set_result(welcome.prepares)
        self._act()

    def _lost(self, host: int) -> Callable[[str], None]:
        def lost(reason: str) -> None:
            if self._links.pop(host, None) is not None and not self._closed:
                log.warning("%s; it is started again", reason)
            self._plan.host_lost(host, reason, asyncio.get_running_loop().time())
            self._act()

        return lost

    async def _prepare(self, place: _Place) -> None:
        limit = self._hosts.start_timeout_s
        try:
            await place.host.call(host_wire.Prepare, place.instance, answer=NoneType, within_s=limit)
        except RlAsyncError as error:
            log.warning("%s", error)
            self._plan.prepare_failed(place.instance, str(error), asyncio.get_running_loop().time())
            self._act()
            await self._end(place, str(error))
        else:
            self._plan.prepared(place.instance)
            self._act()

    async def _close(self) -> None:
        """End the hosts, which close their environments, and wait for the end of all that they started."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiting.values():
            future.cancel()
        links = list(self._links.values())
        await to_the_end(*(link.close() for link in links))
        for task in self._tasks:
            task.cancel()
        await outcomes(*self._tasks)
        # Some had no process before.
        for link in links:
            link.kill("was closed")
        await to_the_end(*(link.close() for link in links))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="environment hosts")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
