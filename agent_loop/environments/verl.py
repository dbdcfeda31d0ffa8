"""`verl:FILE.yaml`: verl's interactions and tools (`verl.interactions`, `verl.tools`), unchanged.

FILE is the file of verl's `multi_turn.interaction_config_path` or `multi_turn.tool_config_path`: a list `interaction`
of `{name, class_name, config}`, or a list `tools` of `{class_name, config, tool_schema}`; two files are joined by a
comma. The columns of `extra_info` are verl's. `interaction_kwargs` has the `name` of the task's interaction and its
arguments; `tools_kwargs` has, for each tool by name, `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs` and
`release_kwargs`; `tool_selection` lists the task's tools, and without it a task has all.
"""

import contextlib
import functools
import importlib
import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.step import Step
from rl_async.agent_loop.tools.tool import ToolResult, failed
from rl_async.concurrency import outcomes, time_limit
from rl_async.errors import ConfigError, DataError
from rl_async.files import UNDECODABLE
from rl_async.messages import Task
from rl_async.userload import load_user_object


class EpisodeInteraction:
    """An episode with an interaction of verl. As there, its score is the sum of the turns' scores, and
    ``calculate_score`` is not called from outside."""

    def __init__(self, known: Mapping[str, Any], task: Task) -> None:
        given = task.extra.get("interaction_kwargs") or {}
        # Arrow fills in the keys of other rows.
        self._kwargs = {key: value for key, value in given.items() if value is not None}
        self._interaction = _chosen(known, self._kwargs.get("name"), task)
        self._id, self._scores = f"{task.task_id}.{uuid.uuid4().hex}", list[float]()
        self._messages: list[Message] = [dict(message) for message in task.prompt]

    async def start(self) -> None:
        """Begin the episode."""
        self._id = await self._interaction.start_interaction(self._id, **self._kwargs)

    async def step(self, answer: str) -> Step:
        """Answer a turn."""
        self._messages.append({"role": "assistant", "content": answer})
        done, text, score, _ = await self._interaction.generate_response(self._id, self._messages, **self._kwargs)
        self._messages.append({"role": "user", "content": text})
        self._scores.append(float(score))
        return Step(text, done=bool(done))

    def reward(self) -> dict[str, float]:
        """Return the episode's score, and the last turn's."""
        return {"score": sum(self._scores), "last": self._scores[-1] if self._scores else 0.0}

    async def finalize(self) -> None:
        """End the episode."""
        finalize = self._interaction.finalize_interaction
        # The base class takes no id.
        await (finalize(self._id) if inspect.signature(finalize).parameters else finalize())


def _chosen(known: Mapping[str, Any], name: str | None, task: Task) -> Any:
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None or name not in known:
        raise DataError(
            f"task {task.task_id}: extra_info.interaction_kwargs.name is {name!r}; known: {', '.join(known)}"
        )
    return known[name]


# The arguments of a task for a tool, by verl's names above.
Kwargs = dict[str, dict[str, Any]]


def make_tool(kind: Callable[..., Any], config: dict[str, Any], schema: dict[str, Any] | None) -> Any:
    """Make a tool of verl; without a schema it has its own."""
    if schema is None:
        return kind(config=config, tool_schema=None)
    # verl's tools are written for this class.
    schemas = importlib.import_module("verl.tools.schemas")
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
        # verl returns a response, too, since 0.5.
        self._id = made[0] if isinstance(made, tuple) else made

    async def call(self, arguments: dict[str, Any], *, timeout_s: float) -> ToolResult:
        """Execute the tool. As in verl, an error is the call's result."""
        try:
            async with time_limit(timeout_s):
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
        """Return the sum of all rewards: those of the calls, and each tool's final one, as ``tool_NAME``."""
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


class _Interaction(msgspec.Struct):
    class_name: str
    name: str = ""
    config: dict[str, Any] = {}


class _Tool(msgspec.Struct):
    class_name: str
    config: dict[str, Any] = {}
    tool_schema: dict[str, Any] | None = None


class _File(msgspec.Struct):
    interaction: list[_Interaction] = []
    tools: list[_Tool] = []


class Listed(NamedTuple):
    """The interactions and tools of verl's files by name. As in verl, they serve all episodes of a process."""

    interactions: Mapping[str, Any]
    tools: Mapping[str, Any]


class Verl:
    """An episode with verl's tools, its interaction, or both. Their scores add up to the episode's reward."""

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        listed = listed_in(name)
        self._tools = EpisodeTools(listed.tools, task)
        self._interaction = EpisodeInteraction(listed.interactions, task) if listed.interactions else None

    async def reset(self) -> None:
        await self._tools.create()
        if self._interaction is not None:
            await self._interaction.start()

    def tools(self) -> Sequence[VerlTool]:
        return self._tools.tools

    async def step(self, answer: str) -> Step:
        return Step(done=True) if self._interaction is None else await self._interaction.step(answer)

    async def reward(self) -> dict[str, float]:
        parts = await self._tools.reward()
        if self._interaction is not None:
            said = self._interaction.reward()
            parts |= said | {"score": parts["score"] + said["score"]}
        return parts

    async def close(self) -> None:
        # The stack calls both, even if one raises.
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._tools.release)
            if self._interaction is not None:
                stack.push_async_callback(self._interaction.finalize)


@functools.cache
def listed_in(files: str) -> Listed:
    """Make the objects that files of verl, joined by commas, list. Raises ConfigError naming the mistake in them."""
    key = f"agent.environment=verl:{files}"
    interactions, tools = dict[str, Any](), dict[str, Any]()
    for file in files.split(","):
        try:
            listed = msgspec.yaml.decode(Path(file).read_bytes(), type=_File)
        except (OSError, *UNDECODABLE) as error:
            raise ConfigError(f"{key}: {file}: {error}") from error
        if not listed.interaction and not listed.tools:
            raise ConfigError(f"{key}: {file} lists neither interactions nor tools")
        for entry in listed.interaction:
            name = entry.class_name.rpartition(".")[2].removesuffix("Interaction").lower()
            # verl derives a missing name from the class.
            called = entry.name or name
            interactions[called] = _class(entry.class_name, key)({"name": called, **entry.config})
        for declared in listed.tools:
            if (kind := declared.config.get("type", "native")) != "native":
                raise ConfigError(f"{key}: {file}: {declared.class_name} is of type {kind!r}; for MCP use agent.mcp")
            tool = make_tool(_class(declared.class_name, key), declared.config, declared.tool_schema)
            tools[tool.name] = tool
    return Listed(interactions, tools)


def _class(dotted: str, key: str) -> Callable[..., Any]:
    module, _, name = dotted.rpartition(".")
    kind: Callable[..., Any] = load_user_object(f"{module}:{name}", key)
    return kind
