"""The worker's end of an environment in a host: it is called like one in this process."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.hosts import wire
from rl_async.agent_loop.environments.session import OpenGame
from rl_async.agent_loop.step import Step
from rl_async.agent_loop.tools.tool import CallableTool, ToolResult
from rl_async.messages import Task
from rl_async.reward_loop.api import Score

T = TypeVar("T")


class Caller(Protocol):
    """The connection to a host."""

    async def call(self, request: type[Any], *arguments: Any, answer: type[T], within_s: float) -> T:
        """Send a request and return its answer. Raises what the host raised, or EnvironmentFailed if it is lost."""
        ...


class HostedTool:
    """A tool of an environment in a host."""

    def __init__(self, described: wire.Described, host: Caller, instance: int) -> None:
        self.name, self.schema = described.name, described.schema
        self._role, self._host, self._instance = described.role, host, instance

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the tool. Raises EnvironmentFailed if its host is lost."""
        request = (self._instance, self._role, self.name, arguments, timeout_s)
        return await self._host.call(wire.UseTool, *request, answer=ToolResult, within_s=timeout_s)


class _Hosted:
    """An environment that has begun, in use by one episode. Methods raise EnvironmentFailed, and what names a user's
    mistake."""

    def __init__(self, host: Caller, instance: int, begun: wire.Begun, timeout_s: float) -> None:
        self._host, self._instance, self._timeout_s = host, instance, timeout_s
        self._begun = begun

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the environment's answer to a turn; its observation is in the messages alone."""
        said = await self._host.call(wire.Say, self._instance, answer, answer=wire.Said, within_s=self._timeout_s)
        return said.step, said.messages

    def _tools(self, role: str) -> Sequence[CallableTool]:
        return [HostedTool(tool, self._host, self._instance) for tool in self._begun.tools if tool.role == role]

    async def _judged(self, kind: Any) -> Any:
        return await self._host.call(wire.Judge, self._instance, answer=kind, within_s=self._timeout_s)


class HostedSession(_Hosted):
    """An environment without roles."""

    async def reset(self) -> list[Message]:
        """Return what the environment said when it began."""
        return self._begun.messages

    def tools(self) -> Sequence[CallableTool]:
        """Return the environment's tools."""
        return self._tools("")

    async def reward(self) -> Score | None:
        """Return the episode's reward."""
        score: Score | None = await self._judged(Score | None)
        return score


class HostedGame(_Hosted, OpenGame):
    """A game of several roles."""

    def __init__(self, host: Caller, instance: int, begun: wire.Begun, timeout_s: float) -> None:
        super().__init__(host, instance, begun, timeout_s)
        self.roles = begun.roles

    async def reset(self) -> tuple[Step, list[Message]]:
        """Return who speaks first, and what the game said when it began."""
        return Step(to=self._begun.to), self._begun.messages

    def tools(self) -> Mapping[str, Sequence[CallableTool]]:
        """Return the tools of each role."""
        return {role: self._tools(role) for role in self.roles}

    async def reward(self) -> Mapping[str, Score]:
        """Return the reward of each role."""
        scores: dict[str, Score] = await self._judged(dict[str, Score])
        return scores


async def begin(
    host: Caller, instance: int, task: Task, *, start_timeout_s: float, timeout_s: float
) -> HostedSession | HostedGame:
    """Make the environment of a task and reset it. Raises EnvironmentFailed, and what names a user's mistake."""
    begun = await host.call(wire.Begin, instance, task, answer=wire.Begun, within_s=start_timeout_s)
    return (HostedGame if begun.roles else HostedSession)(host, instance, begun, timeout_s)
