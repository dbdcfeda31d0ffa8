"""The agent loops: who speaks when, and why an episode ends.

A loop is ``async def loop(episode: Episode) -> str``. It drives the episode and returns the finish reason: ``stop``,
``length``, ``max_turns``, ``tool_calls`` or ``abort``. Users give their own as ``path.py:name``.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import cast

from rl_async.agent_loop.episodes.episode import Episode
from rl_async.errors import ConfigError
from rl_async.userload import is_user_reference, load_user_object

Loop = Callable[[Episode], Awaitable[str]]


async def single_turn(episode: Episode) -> str:
    """Sample one answer, whatever it says."""
    return await episode.generate()


async def tool_agent(episode: Episode) -> str:
    """Answer tool calls until a turn has none, or turns or tokens are used up."""
    for turns_left in reversed(range(episode.config.agent.max_turns)):
        reason = await episode.generate()
        if reason != "stop":
            return reason
        calls = episode.tool_calls()
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
    """Return a built-in loop or the user's coroutine function. Raises ConfigError if there is none."""
    if is_user_reference(name):
        loop = load_user_object(name, "agent.loop")
        if not inspect.iscoroutinefunction(loop):
            raise ConfigError(f"agent.loop: {name} is not an `async def` taking an Episode")
        return cast(Loop, loop)
    if name not in LOOPS:
        raise ConfigError(f"agent.loop: no loop {name!r}; built in: {', '.join(LOOPS)}; or path.py:name")
    return LOOPS[name]
