"""The hosts of one worker and the environments in them: carries out what `plan.py` decides."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, NamedTuple, Self

from rl_async.agent_loop.environments.hosts import plan, wire
from rl_async.agent_loop.environments.hosts.hosted import HostedGame, HostedSession, begin
from rl_async.agent_loop.environments.hosts.link import HostLink
from rl_async.concurrency import outcomes, to_the_end
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, EnvironmentFailed, RlAsyncError
from rl_async.messages import Task

log = logging.getLogger("rl_async.agent_loop")


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
        self._plan = plan.HostPlan(
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
        self._prepares: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # known from the first host
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
        start_s = self._hosts.start_timeout_s
        try:
            session = await begin(*place, task, start_timeout_s=start_s, timeout_s=self._timeout_s)
            self._plan.opened(place.instance)
            self._act()
            yield session
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
        """Close an environment; return what closing it raised. One that is lost with its host is closed."""
        self._plan.ending(place.instance)
        limit = 2 * self._timeout_s  # of its close and of its __aexit__
        try:
            ended = await place.host.call(wire.End, place.instance, failure, answer=wire.Ended, within_s=limit)
        except EnvironmentFailed as error:
            log.warning("an environment was not closed: %s", error)
            ended = wire.Ended(stuck=True)  # if its host still lives, then not for long
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

    def _carry_out(self, action: plan.Action) -> None:
        match action:
            case plan.StartHost(host):
                link = self._links[host] = HostLink(host, self._log_path, self._lost(host))
                self._spawn(self._start(host, link))
            case plan.StopHost(host):
                link = self._links.pop(host)
                log.warning("environment host %d is replaced: a call in it never returned", host)
                link.kill("was replaced")
                self._spawn(link.close())
            case plan.Prepare(host, instance):
                self._spawn(self._prepare(_Place(self._links[host], instance)))
            case plan.Give(ticket, host, instance):
                future, place = self._waiting[ticket], _Place(self._links[host], instance)
                if future.cancelled():
                    self._spawn(self._end(place, "the episode was given up"))
                else:
                    future.set_result(place)
            case plan.Refuse(ticket, reason):
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
            await place.host.call(wire.Prepare, place.instance, answer=NoneType, within_s=limit)
        except RlAsyncError as error:
            log.warning("%s", error)
            self._plan.prepare_failed(place.instance, str(error), asyncio.get_running_loop().time())
            self._act()
            await self._end(place, str(error))
        else:
            self._plan.prepared(place.instance)
            self._act()

    async def _close(self) -> None:
        """End the hosts, which close what is left in them, and wait for the end of all that they started."""
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
        for link in links:  # those that had no process yet
            link.kill("was closed")
        await to_the_end(*(link.close() for link in links))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="environment hosts")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
