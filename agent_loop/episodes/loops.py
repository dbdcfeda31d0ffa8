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
    """Sample one answer, whatever it says, and tell the environment."""
    reason = await episode.generate()
    if reason == "stop":
        await episode.step()
    return reason


async def tool_agent(episode: Episode) -> str:
    """Answer tool calls, and turns without any with what the environment says, until the episode is done.

    It is when a tool or the environment says so or has nothing to say, and when turns or tokens are used up. Calls in
    the last turn are not run.
    """
    for turns_left in reversed(range(episode.config.agent.max_turns)):
        reason = await episode.generate()
        if reason != "stop":
            return reason
        calls = episode.tool_calls()
        if calls and not turns_left:
            break
        messages = await episode.call(calls) if calls else await episode.step()
        if episode.done:
            return "stop"
        if turns_left and not episode.add(messages):
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
