"""What an environment must have."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rl_async.agent_loop.tools.tool import Tool
from rl_async.messages import Task


class Environment(Protocol):
    """A world made from the task; entered before the first turn and left after the last, whatever happens between."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def tools(self) -> Sequence[Tool]:
        """Return this episode's tools, which the model gets in addition to the config's."""
        ...


EnvironmentFactory = Callable[[Task], Environment]
