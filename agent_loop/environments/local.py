"""Environments in this process: that of the agent worker, or that of a host."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from rl_async.agent_loop.environments.calls import call_user
from rl_async.agent_loop.environments.game import GameSession, check_opponents
from rl_async.agent_loop.environments.registry import get_environment
from rl_async.agent_loop.environments.services import Services
from rl_async.agent_loop.environments.session import Session
from rl_async.errors import RlAsyncError
from rl_async.messages import Task


class LocalEnvironments:
    """Makes the environments of a config. ``start_limited``: the caller bounds the time of everything up to ``reset``.

    Raises ConfigError if there is no such environment, or its class names other roles than the opponents need.
    """

    def __init__(self, name: str, services: Services, *, start_limited: bool = False) -> None:
        self._name, self._services, self._start_limited = name, services, start_limited
        self._kind = get_environment(name)
        if self._kind.roles:
            check_opponents(self._kind.roles, services.config.agent.opponents)
        self._timeout_s = services.config.agent.environment_timeout_s

    @property
    def prepares(self) -> bool:
        """Whether ``prepare`` has something to do."""
        return self._kind.prepare is not None

    async def prepare(self) -> Any:
        """Do what can be done before an episode's task is known. Raises EnvironmentFailed."""
        assert self._kind.prepare is not None
        return await self._begin("prepare", self._kind.prepare, self._services)

    async def make(self, task: Task, *prepared: Any) -> Session | GameSession:
        """Make the environment of an episode, which its session will enter and close. Raises EnvironmentFailed."""
        if self._kind.may_block:
            environment = await self._begin("__init__", self._kind.make, task, self._services, *prepared)
        else:
            environment = self._kind.make(task, self._services, *prepared)
        kind = GameSession if getattr(environment, "roles", ()) else Session
        return kind(self._name, environment, self._timeout_s, start_limited=self._start_limited)

    async def discard(self, prepared: Any) -> None:
        """Release what ``prepare`` made and no environment got. Raises EnvironmentFailed."""
        if hasattr(prepared, "close"):
            what = f"environment {self._name}: close() of what prepare() made"
            await call_user(what, prepared.close, timeout_s=self._timeout_s)

    async def _begin(self, method: str, function: Any, *arguments: Any) -> Any:
        limit = None if self._start_limited else self._timeout_s
        return await call_user(f"environment {self._name}: {method}()", function, *arguments, timeout_s=limit)

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session | GameSession]:
        """Make an environment for an episode, and close it at the episode's end."""
        prepared = [await self.prepare()] if self.prepares else []
        try:
            session = await self.make(task, *prepared)
        except BaseException:
            with contextlib.suppress(RlAsyncError):  # the first error is the one to report
                for unused in prepared:
                    await self.discard(unused)
            raise
        async with session:
            yield session
