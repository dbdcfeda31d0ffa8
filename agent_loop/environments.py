"""A world that lives for one episode and hands out tools acting on it."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, cast

from rl_async.agent_loop.data.tasks import NO_SUCH_ITEM
from rl_async.agent_loop.tools.tool import BUILT_IN, Tool
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Task
from rl_async.userload import is_user_reference, load_user_object


class Environment(Protocol):
    """Made from the task; entered before the first turn and left after the last, whatever happens between."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def tools(self) -> Sequence[Tool]:
        """The tools of this episode, in addition to the config's."""
        ...


EnvironmentFactory = Callable[[Task], Environment]


class Shop:
    """One item with a hidden price: ``lookup`` tells it, ``calculator`` computes with it."""

    def __init__(self, task: Task) -> None:
        try:
            self._item, self._price = str(task.extra["item"]), str(task.extra["price"])
        except KeyError as error:
            raise DataError(f"task {task.task_id}: environment shop needs extra_info.{error.args[0]}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def tools(self) -> Sequence[Tool]:
        """``lookup`` and ``calculator``."""
        return (_LOOKUP.bound(self.lookup), BUILT_IN["calculator"])

    def lookup(self, item: str) -> str:
        """The price of an item."""
        if item != self._item:
            raise ValueError(NO_SUCH_ITEM)
        return self._price


_LOOKUP = Tool(Shop.lookup, name="lookup", quick=True)
REGISTRY: dict[str, EnvironmentFactory] = {"shop": Shop}


def get_environment(name: str) -> EnvironmentFactory:
    """A built-in environment, or the user's class ``path.py:name``. Raises ConfigError when there is none."""
    if is_user_reference(name):
        factory = load_user_object(name, "agent.environment")
        if not callable(factory):
            raise ConfigError(f"agent.environment: {name} is not a class")
        return cast(EnvironmentFactory, factory)
    if name not in REGISTRY:
        raise ConfigError(
            f"agent.environment: no environment {name!r}; built in: {', '.join(REGISTRY)}; or path.py:class"
        )
    return REGISTRY[name]
