"""verl's tools (`verl.tools.base_tool.BaseTool`) in use by one episode.

The column `extra_info.tools_kwargs` of a task has, for each tool by name, `create_kwargs`, `execute_kwargs`,
`calc_reward_kwargs` and `release_kwargs`; `extra_info.tool_selection` lists the tools that the task has, else all.
"""

import asyncio
import importlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from rl_async.agent_loop.tools.tool import ToolResult, failed
from rl_async.concurrency import outcomes
from rl_async.errors import DataError
from rl_async.messages import Task

Kwargs = dict[str, dict[str, Any]]  # of a task and a tool, by verl's names above


def make_tool(kind: Callable[..., Any], config: dict[str, Any], schema: dict[str, Any] | None) -> Any:
    """Make a tool of verl; without a schema it has its own."""
    if schema is None:
        return kind(config=config, tool_schema=None)
    schemas = importlib.import_module("verl.tools.schemas")  # the class that its tools are written for
    return kind(config=config, tool_schema=schemas.OpenAIFunctionToolSchema.model_validate(schema))


class VerlTool:
    """A tool of verl with the instance of one episode, a ``CallableTool``."""

    def __init__(self, tool: Any, kwargs: Kwargs) -> None:
        self.name: str = tool.name
        self.schema: dict[str, Any] = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        self._tool, self._kwargs = tool, kwargs
        self._id, self.earned = uuid.uuid4().hex, 0.0

    async def create(self) -> None:
        """Make the instance."""
        given = self._kwargs.get("create_kwargs", {})
        # Tools read them as arguments, as verl documents, or from `create_kwargs`, as its agent loop calls them.
        made = await self._tool.create(self._id, **{"create_kwargs": given, **given})
        self._id = made[0] if isinstance(made, tuple) else made  # with a response since verl 0.5

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Execute it. As in verl, whatever it raises is the call's result."""
        try:
            async with asyncio.timeout(timeout_s):
                given = self._kwargs.get("execute_kwargs", {})
                response, reward, _ = await self._tool.execute(self._id, arguments, **given)
            text, earned = _text(response), float(reward or 0.0)
        except TimeoutError:
            return failed("timeout")
        # A tool is the user's code and may raise anything.
        except Exception as error:
            return failed(str(error) or type(error).__name__)
        self.earned += earned
        return ToolResult(text)

    async def reward(self) -> float:
        """Return what the tool says of the episode."""
        return float(await self._tool.calc_reward(self._id, **self._kwargs.get("calc_reward_kwargs", {})))

    async def release(self) -> None:
        """End the instance."""
        await self._tool.release(self._id, **self._kwargs.get("release_kwargs", {}))


class EpisodeTools:
    """The tools of a task, each with one instance for the episode. Raises DataError for one that does not exist."""

    def __init__(self, known: Mapping[str, Any], task: Task) -> None:
        kwargs = _without_none(task.extra.get("tools_kwargs") or {})
        selected = task.extra.get("tool_selection") or list(known)
        if unknown := [name for name in selected if name not in known]:
            raise DataError(f"task {task.task_id}: extra_info.tool_selection: no tool {unknown[0]!r}: {list(known)}")
        self.tools = [VerlTool(known[name], kwargs.get(name, {})) for name in selected]
        self._created: list[VerlTool] = []

    async def create(self) -> None:
        """Make the instances."""
        for tool in self.tools:
            await tool.create()
            self._created.append(tool)

    async def reward(self) -> dict[str, float]:
        """Return the sum of all rewards: those of the calls, and what each tool says in the end, as ``tool_NAME``."""
        final = {f"tool_{tool.name}": await tool.reward() for tool in self.tools}
        calls = sum(tool.earned for tool in self.tools)
        return {"score": sum(final.values()) + calls, **final, **({"calls": calls} if final else {})}

    async def release(self) -> None:
        """End the instances; raises the first error, after all were tried."""
        ended = await outcomes(*(tool.release() for tool in self._created))
        for error in ended:
            if isinstance(error, BaseException):
                raise error


def _without_none(given: Any) -> Any:
    """Return mappings without the keys that Arrow fills in for other rows' sake."""
    if not isinstance(given, dict):
        return given
    return {key: _without_none(value) for key, value in given.items() if value is not None}


def _text(response: Any) -> str:
    """Read a response: a text, or verl's ToolResponse, whose images and videos are named only."""
    if isinstance(response, str):
        return response
    left_out = [f"[{kind}s are not shown]" for kind in ("image", "video") if getattr(response, kind, None)]
    return "\n".join([response.text or "", *left_out]).strip() if left_out else response.text or ""
