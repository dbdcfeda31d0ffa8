"""Environments by name: the built-in ones, other projects' by their prefix, users' own; and how to make them here.

``LocalEnvironments`` makes and opens them in this process: an agent worker, or one of its hosts. An adapter is made
from the NAME in `agent.environment=PROJECT:NAME`, a task and `agent.environment_options`. To add one, write its class
in ``adapters.py``, or in a file of this folder, and add a line to ``ADAPTERS``.
"""

import contextlib
import importlib.util
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rl_async.agent_loop.environments.adapters import (
    Gymnasium,
    OpenEnv,
    PettingZoo,
    ReasoningGym,
    Verifiers,
    Verl,
    text_arena,
)
from rl_async.agent_loop.environments.built_in import (
    CollaborativeUser,
    Customer,
    Grid,
    ScriptedUser,
    Shop,
    SimulatedUser,
)
from rl_async.agent_loop.environments.harbor import harbor_tasks
from rl_async.agent_loop.environments.session import GameSession, Services, Session, call_user, check_opponents
from rl_async.errors import ConfigError, RlAsyncError
from rl_async.messages import Task
from rl_async.userload import find_neighbours, is_user_reference, load_user_object

# Makes an interface.Environment, or an object with some of its methods.
EnvironmentFactory = Callable[[Task, Services], Any]


class Adapter(NamedTuple):
    """A project's environments: ``factory`` is called with the name after the colon. They import ``package`` when they
    begin, or when they are made, if that may ``block``. With ``by_seed``, their worlds need only a seed of a task."""

    factory: Callable[[str], EnvironmentFactory]
    package: str = ""
    install: str = ""
    by_seed: bool = False
    may_block: bool = False


def _with_name(kind: Callable[[str, Task, Mapping[str, Any]], Any]) -> Callable[[str], EnvironmentFactory]:
    """Return the ``factory`` of an adapter that is made from a name, a task and the environment's options."""
    return lambda name: lambda task, services: kind(name, task, services.config.agent.environment_options)


ENVIRONMENTS: dict[str, EnvironmentFactory] = {
    "shop": Shop,
    "grid": Grid,
    "order": Customer,
    "scripted_user": ScriptedUser,
    "simulated_user": SimulatedUser,
    "collaborative_user": CollaborativeUser,
}
ADAPTERS = {
    "gymnasium": Adapter(_with_name(Gymnasium), "gymnasium", "pip install gymnasium", by_seed=True),
    "harbor": Adapter(harbor_tasks),
    "openenv": Adapter(_with_name(OpenEnv), "openenv", "pip install openenv-core", by_seed=True),
    "pettingzoo": Adapter(
        _with_name(PettingZoo), "pettingzoo", "pip install 'pettingzoo[classic]'", by_seed=True, may_block=True
    ),
    "reasoning_gym": Adapter(_with_name(ReasoningGym), "reasoning_gym", "pip install reasoning-gym", by_seed=True),
    "textarena": Adapter(_with_name(text_arena), "textarena", "pip install textarena", by_seed=True),
    "verifiers": Adapter(_with_name(Verifiers), "verifiers.envs", "pip install 'verifiers<0.2'"),
    "verl": Adapter(_with_name(Verl)),
}


class EnvironmentKind(NamedTuple):
    """How to make environments of one name: ``make(task, services)``, or with ``prepare`` ``make(task, services,
    prepared)``, where ``prepared`` is an earlier result of ``prepare(services)``. Users' own may ``block``. If a class
    names no ``roles``, each environment says itself whether it has some.
    """

    make: Callable[..., Any]
    prepare: Callable[[Services], Any] | None = None
    may_block: bool = False
    roles: Sequence[str] = ()


def get_environment(name: str) -> EnvironmentKind:
    """Return a built-in environment, an adapter's, or the user's class ``path.py:name``.

    Raises ConfigError for an unknown name, or if its package is missing.
    """
    project, _, rest = name.partition(":")
    if rest and project in ADAPTERS:
        return EnvironmentKind(_adapted(name, ADAPTERS[project], rest), may_block=ADAPTERS[project].may_block)
    if is_user_reference(name):
        return _of_user(name)
    if name not in ENVIRONMENTS:
        raise ConfigError(
            f"agent.environment: no environment {name!r}; built in: {', '.join(ENVIRONMENTS)}; "
            f"{', '.join(f'{prefix}:NAME' for prefix in ADAPTERS)}; or path.py:class"
        )
    return EnvironmentKind(ENVIRONMENTS[name])


def by_seed(name: str) -> bool:
    """Whether environments of this name need nothing of a task but a seed."""
    project, _, rest = name.partition(":")
    return bool(rest) and project in ADAPTERS and ADAPTERS[project].by_seed


def _of_user(name: str) -> EnvironmentKind:
    factory = load_user_object(name, "agent.environment")
    if not callable(factory):
        raise ConfigError(f"agent.environment: {name} is not a class")
    prepare = getattr(factory, "prepare", None)
    if prepare is not None and not callable(prepare):
        raise ConfigError(f"agent.environment: prepare of {name} is not a static method")

    def make(task: Task, services: Services, *prepared: Any) -> Any:
        return factory(task, *prepared, **services.config.agent.environment_options)

    # On a class, a property is not a list yet.
    roles = getattr(factory, "roles", ())
    roles = roles if isinstance(roles, Sequence) else ()
    return EnvironmentKind(make, None if prepare is None else _with_options(prepare), may_block=True, roles=roles)


def _with_options(prepare: Callable[..., Any]) -> Callable[[Services], Any]:
    """Return ``prepare`` called with the options of the environment, a coroutine function if it is one."""

    async def awaited(services: Services) -> Any:
        return await prepare(**services.config.agent.environment_options)

    def plain(services: Services) -> Any:
        return prepare(**services.config.agent.environment_options)

    return awaited if inspect.iscoroutinefunction(prepare) else plain


def _adapted(name: str, adapter: Adapter, rest: str) -> EnvironmentFactory:
    # Looking for a module raises an error if its package is missing.
    parent = adapter.package.partition(".")[0]
    if parent and not (importlib.util.find_spec(parent) and importlib.util.find_spec(adapter.package)):
        raise ConfigError(f"agent.environment: {name} needs `{adapter.install}`")
    # The name may be that of a module there, which the package imports.
    find_neighbours()
    return adapter.factory(rest)


class LocalEnvironments:
    """Makes the environments of a config. With ``start_limited``, the caller bounds the time up to ``reset``.

    Raises ConfigError for an unknown environment, and if its class names other roles than the opponents need.
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
        """Prepare an environment before an episode's task is known. Raises EnvironmentFailed."""
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
        """Release a result of ``prepare`` that no environment got. Raises EnvironmentFailed."""
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
            # The first error is the one to report.
            with contextlib.suppress(RlAsyncError):
                for unused in prepared:
                    await self.discard(unused)
            raise
        async with session:
            yield session
