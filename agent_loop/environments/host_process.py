"""A host: makes and calls environments for the worker at the other end of its standard input.

    worker --Prepare, Begin, Say, UseTool, Judge, End, Cancel--> host --Answer, Failure--> worker

Started by ``host_pool.HostLink`` as ``python -m rl_async.agent_loop.environments.host_process``, under the guard.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rl_async.agent_loop.environments import host_wire
from rl_async.agent_loop.environments.environment_registry import LocalEnvironments
from rl_async.agent_loop.environments.session import USER_CALLS, GameSession, Services, Session
from rl_async.agent_loop.tools.tool import CallableTool, Step, Tool, ToolResult
from rl_async.concurrency import time_limit, to_the_end
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EnvironmentFailed, RlAsyncError
from rl_async.process.role import setup_logging
from rl_async.userload import raised_at

log = logging.getLogger("rl_async.agent_loop")


class _Instance:
    """An environment, from its preparation to its end."""

    def __init__(self) -> None:
        # The result of prepare(), until the environment gets it.
        self.prepared: list[Any] = []
        self.session: Session | GameSession | None = None
        # By role, under "" if the environment has no roles.
        self.tools: Mapping[str, Sequence[CallableTool]] = {}
        self.calls: set[asyncio.Task[None]] = set()


class EnvironmentHost:
    """Answers the calls of one worker. ``send`` writes a frame. Raises ConfigError for an unknown environment."""

    def __init__(self, config: RunConfig, send: Callable[[bytes], None]) -> None:
        agent = config.agent
        assert agent.environment is not None and agent.environment_hosts is not None
        self._name, self._start_timeout_s = agent.environment, agent.environment_hosts.start_timeout_s
        self._environments = LocalEnvironments(agent.environment, Services(config), start_limited=True)
        self._send = send
        self._instances: dict[int, _Instance] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        # Tools of closed environments with a call that never returned.
        self._stuck_tools: list[Tool] = []

    @property
    def prepares(self) -> bool:
        """Whether environments can be prepared."""
        return self._environments.prepares

    def receive(self, request: host_wire.Request) -> None:
        """Begin to work on a request."""
        if isinstance(request, host_wire.Cancel):
            if request.call in self._calls:
                self._calls[request.call].cancel()
            return
        assert not isinstance(request, host_wire.Setup)
        task = asyncio.create_task(self._answer(request), name=type(request).__name__)
        self._calls[request.call] = task
        task.add_done_callback(lambda _: self._calls.pop(request.call))
        if not isinstance(request, host_wire.End):
            instance = self._instances.setdefault(request.instance, _Instance())
            instance.calls.add(task)
            task.add_done_callback(instance.calls.discard)

    async def _answer(self, request: Any) -> None:
        """Carry out a request and send the answer, or the error. A cancelled one is not answered."""
        try:
            value = await self._do(request)
            answer = host_wire.frame(host_wire.Answer(request.call, msgspec.Raw(msgspec.msgpack.encode(value))))
        except RlAsyncError as error:
            answer = host_wire.frame(host_wire.failure_of(request.call, error))
        # A user's environment may raise anything, and may return an object that cannot be encoded.
        except Exception as error:
            log.exception("%s of environment %s", type(request).__name__, self._name)
            what = f"environment {self._name}: {type(error).__name__}: {error} ({raised_at(error)})"
            answer = host_wire.frame(host_wire.Failure(request.call, "EnvironmentFailed", what))
        self._send(answer)

    async def _do(self, request: Any) -> Any:
        match request:
            case host_wire.Prepare():
                instance = self._instances[request.instance]
                instance.prepared.append(await self._in_time("prepare()", self._environments.prepare()))
            case host_wire.Begin():
                return await self._in_time("its start", self._begin(self._instances[request.instance], request))
            case host_wire.Say():
                step, messages = await self._session(request.instance).step(request.answer)
                # The messages have the observation.
                return host_wire.Said(_plain(step)._replace(observation=None), messages)
            case host_wire.UseTool():
                tools = self._instances[request.instance].tools[request.role]
                tool = next(tool for tool in tools if tool.name == request.name)
                return _plain(await tool.call(request.arguments, timeout_s=request.timeout_s))
            case host_wire.Judge():
                return await self._session(request.instance).reward()
            case host_wire.End():
                return await self._end(request)
        return None

    async def _in_time(self, what: str, work: Any) -> Any:
        limit = self._start_timeout_s
        try:
            async with time_limit(limit) as deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            key = "agent.environment_hosts.start_timeout_s"
            raise EnvironmentFailed(
                f"environment {self._name}: {what} did not finish within {limit:g} s ({key})"
            ) from None

    async def _begin(self, instance: _Instance, request: host_wire.Begin) -> host_wire.Begun:
        session = await self._environments.make(request.task, *instance.prepared)
        instance.prepared.clear()
        instance.session = await session.__aenter__()
        if isinstance(session, GameSession):
            first, messages = await session.reset()
            instance.tools = session.tools()
            return host_wire.Begun(messages, _described(instance.tools), list(session.roles), first.to)
        messages = await session.reset()
        instance.tools = {"": session.tools()}
        return host_wire.Begun(messages, _described(instance.tools))

    async def _end(self, request: host_wire.End) -> host_wire.Ended:
        """Cancel an environment's calls and close it."""
        instance, failure = self._instances.pop(request.instance, None) or _Instance(), ""
        for call in instance.calls:
            call.cancel()
        if instance.calls:
            await asyncio.wait(instance.calls)
        try:
            if instance.session is not None:
                error = EnvironmentFailed(request.failure) if request.failure else None
                await instance.session.__aexit__(type(error) if error else None, error, None)
            for prepared in instance.prepared:
                await self._environments.discard(prepared)
        except RlAsyncError as error:
            failure = str(error)
        tools = [tool for of_role in instance.tools.values() for tool in of_role]
        self._stuck_tools += [tool for tool in tools if isinstance(tool, Tool) and tool.overdue]
        stuck = USER_CALLS.overdue > 0 or any(tool.overdue for tool in self._stuck_tools)
        return host_wire.Ended(stuck, failure)

    async def close(self) -> None:
        """Close all environments, prepared ones included."""
        await to_the_end(*(self._end(host_wire.End(0, number, "the worker ended")) for number in list(self._instances)))

    def _session(self, number: int) -> Session | GameSession:
        session = self._instances[number].session
        assert session is not None, "the worker begins before it calls"
        return session


def _described(tools: Mapping[str, Sequence[CallableTool]]) -> list[host_wire.Described]:
    return [host_wire.Described(role, tool.name, tool.schema) for role, of_role in tools.items() for tool in of_role]


T = TypeVar("T", Step, ToolResult)


def _plain(given: T) -> T:
    """Convert the numbers of a step or a result, which may be NumPy's, to Python's own."""
    reward = None if given.reward is None else float(given.reward)
    return given._replace(reward=reward, done=bool(given.done))


async def serve(control: socket.socket) -> None:
    """Answer the worker until it closes the socket."""
    reader, writer = await asyncio.open_connection(sock=control)
    setup = msgspec.msgpack.decode(await host_wire.read_frame(reader), type=host_wire.Setup)
    try:
        host = EnvironmentHost(setup.config, writer.write)
    except RlAsyncError as error:
        writer.write(host_wire.frame(host_wire.failure_of(0, error)))
        writer.close()
        await writer.wait_closed()
        return
    writer.write(host_wire.frame(host_wire.Welcome(host.prepares)))
    requests = msgspec.msgpack.Decoder(host_wire.Request)
    while True:
        try:
            frame = await host_wire.read_frame(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            await host.close()
            return
        host.receive(requests.decode(frame))


def main() -> int:
    """Serve the worker; return the exit code."""
    setup_logging("environments")
    # Processes of the user's code must not inherit the socket: its end tells the worker that the host ended.
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    asyncio.run(serve(control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
