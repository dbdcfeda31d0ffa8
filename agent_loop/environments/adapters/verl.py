"""`verl:FILE.yaml`: verl's interactions and tools (`verl.interactions`, `verl.tools`), unchanged.

FILE is what verl's `multi_turn.interaction_config_path` or `multi_turn.tool_config_path` names: a list `interaction` of
`{name, class_name, config}`, or a list `tools` of `{class_name, config, tool_schema}`; with both, two files joined by a
comma. The columns of `extra_info` are verl's: `interaction_kwargs`, `tools_kwargs`, `tool_selection`.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.agent_loop.environments.adapters.verl_interaction import EpisodeInteraction
from rl_async.agent_loop.environments.adapters.verl_tools import EpisodeTools, VerlTool, make_tool
from rl_async.agent_loop.step import Step
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE
from rl_async.messages import Task
from rl_async.userload import load_user_object


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
    """What files of verl list, by name: objects that serve all episodes of a process, as in verl."""

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
        async with contextlib.AsyncExitStack() as stack:  # each of them, whatever another one raises
            stack.push_async_callback(self._tools.release)
            if self._interaction is not None:
                stack.push_async_callback(self._interaction.finalize)


@functools.cache
def listed_in(files: str) -> Listed:
    """Make what files of verl, joined by commas, list. Raises ConfigError naming what is wrong with them."""
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
            called = entry.name or name  # as verl names those without a name
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
