"""The worker's end of an environment in a host: it is called like one in this process."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.hosts import wire
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
        self._host, self._instance = host, instance

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Call the tool. Raises EnvironmentFailed if its host is lost."""
        request = (self._instance, self.name, arguments, timeout_s)
        return await self._host.call(wire.UseTool, *request, answer=ToolResult, within_s=timeout_s)


class HostedSession:
    """An environment in use by one episode. Methods raise EnvironmentFailed, and what names a user's mistake."""

    def __init__(self, host: Caller, instance: int, begun: wire.Begun, timeout_s: float) -> None:
        self._host, self._instance, self._timeout_s = host, instance, timeout_s
        self._begun = begun

    @classmethod
    async def begin(
        cls, host: Caller, instance: int, task: Task, *, start_timeout_s: float, timeout_s: float
    ) -> "HostedSession":
        """Make the environment and reset it."""
        begun = await host.call(wire.Begin, instance, task, answer=wire.Begun, within_s=start_timeout_s)
        return cls(host, instance, begun, timeout_s)

    async def reset(self) -> list[Message]:
        """Return what the environment said when it began."""
        return self._begun.messages

    def tools(self) -> Sequence[CallableTool]:
        """Return the environment's tools."""
        return [HostedTool(tool, self._host, self._instance) for tool in self._begun.tools]

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the environment's answer to a turn; its observation is in the messages alone."""
        said = await self._host.call(wire.Say, self._instance, answer, answer=wire.Said, within_s=self._timeout_s)
        return said.step, said.messages

    async def reward(self) -> Score | None:
        """Return the episode's reward."""
        kind: Any = Score | None
        score: Score | None = await self._host.call(wire.Judge, self._instance, answer=kind, within_s=self._timeout_s)
        return score
