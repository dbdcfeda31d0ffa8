"""The agent loops: who speaks when, and why an episode ends.

A loop is ``async def loop(episode: Episode) -> str``. It drives the episode and returns the finish reason: ``stop``,
``length``, ``max_turns``, ``tool_calls`` or ``abort``. Users give their own as ``path.py:name``.
"""

import contextlib
import functools
import inspect
import logging
import random
from collections.abc import Awaitable, Callable
from typing import cast

from rl_async.agent_loop.chat_formats.hermes import parse_hermes
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.environments import EnvironmentFactory, get_environment
from rl_async.agent_loop.episodes.episode import Episode
from rl_async.agent_loop.tools.tool import get_tool
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.messages import LeasedGroup, Trajectory
from rl_async.rollout_server.api import Generator
from rl_async.userload import is_user_reference, load_user_object

log = logging.getLogger("rl_async.agent_loop")

Loop = Callable[[Episode], Awaitable[str]]


async def single_turn(episode: Episode) -> str:
    """One answer, whatever it says."""
    return await episode.generate()


async def tool_agent(episode: Episode) -> str:
    """Answer tool calls until the model speaks without one, or the turns or tokens are used up."""
    for turns_left in reversed(range(episode.config.agent.max_turns)):
        reason = await episode.generate()
        if reason != "stop":
            return reason
        calls = parse_hermes(episode.text)
        if not calls:
            return "stop"
        if not turns_left:
            break
        if not episode.add(await episode.call(calls)):
            return "length"
    return "max_turns"


# The names ending in _agent are those that verl's data sets use.
LOOPS: dict[str, Loop] = {"single_turn": single_turn, "single_turn_agent": single_turn, "tool_agent": tool_agent}


@functools.cache
def get_loop(name: str) -> Loop:
    """A built-in loop, or the user's coroutine function. Raises ConfigError when there is none."""
    if is_user_reference(name):
        loop = load_user_object(name, "agent.loop")
        if not inspect.iscoroutinefunction(loop):
            raise ConfigError(f"agent.loop: {name} is not an `async def` taking an Episode")
        return cast(Loop, loop)
    if name not in LOOPS:
        raise ConfigError(f"agent.loop: no loop {name!r}; built in: {', '.join(LOOPS)}; or path.py:name")
    return LOOPS[name]


class EpisodeRunner:
    """Runs episodes of one config. Raises ConfigError at once for loops, tools or environments that do not exist."""

    def __init__(self, config: RunConfig, renderer: ChatRenderer, generator: Generator) -> None:
        self._config, self._renderer, self._generator = config, renderer, generator
        self._random = random.Random(config.seed)  # chooses which episodes are checked
        get_loop(config.agent.loop)
        for name in config.agent.tools:
            get_tool(name)
        environment = config.agent.environment
        self._environment: EnvironmentFactory | None = get_environment(environment) if environment else None

    async def run(self, group: LeasedGroup, sample: int) -> Trajectory:
        """One episode, from the prompt to a trajectory without a reward.

        Raises what the engines raise (EngineError), what a user's loop or environment raises, and ConfigError or
        DataError when the task asks for what does not exist.
        """
        task = group.task
        loop = get_loop(task.agent or self._config.agent.loop)
        names = self._config.agent.tools if task.tools is None else task.tools
        tools = [get_tool(name) for name in names]
        async with contextlib.AsyncExitStack() as stack:
            if self._environment is not None:
                environment = await stack.enter_async_context(self._environment(task))
                tools += environment.tools()
            episode = Episode(
                group,
                sample,
                config=self._config,
                renderer=self._renderer,
                generator=self._generator,
                tools=tools,
            )
            reason = await loop(episode)
        if self._random.random() < self._config.agent.check_rendering:
            self._check(episode)
        return episode.trajectory(reason)

    def _check(self, episode: Episode) -> None:
        at = episode.drift()
        if at is not None:
            log.warning(
                "task %s: from token %d on, the turns as sampled differ from the chat template of the whole "
                "conversation; the model is trained on what was sampled",
                episode.task.task_id,
                at,
            )
