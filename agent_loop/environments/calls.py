"""Calls of users' environments: awaited or in a thread, with a deadline; errors name the method and the line."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from rl_async.concurrency import DaemonCalls
from rl_async.errors import EnvironmentFailed, RlAsyncError
from rl_async.userload import raised_at

KEY = "agent.environment_timeout_s"
_THREADS = DaemonCalls("environment", KEY)


async def call_user(what: str, function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Any:
    """Call a function of an environment, ``what``; a plain one in a thread. ``timeout_s`` None: it needs no deadline.

    Raises EnvironmentFailed if it raises or misses its deadline, except for errors of ours, which pass through.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await _THREADS.call(lambda: function(*arguments))
    except RlAsyncError:
        raise
    # An environment is the user's code and may raise anything; its sample fails and is given out again.
    except Exception as error:
        if deadline.expired():
            raise EnvironmentFailed(f"{what} did not finish within {timeout_s:g} s ({KEY})") from None
        raise EnvironmentFailed(f"{what} raised {type(error).__name__}: {error} ({raised_at(error)})") from error


def overdue_calls() -> int:
    """Return how many threads still run calls that nobody waits for any more."""
    return _THREADS.overdue
