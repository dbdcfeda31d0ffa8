"""What an environment may have. Every method is optional, and may be ``async def`` or plain, which runs in a thread."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_async.agent_loop.step import Observation, Step
from rl_async.agent_loop.tools.tool import Tool


class Environment:
    """A world or a simulated user that lives for one episode. Made from the episode's task; deriving is optional.

    ``prepare``, a static method, may do beforehand what does not depend on the task; see ``registry.EnvironmentKind``.
    Called in this order: ``reset``, ``tools``, then ``step`` after every turn without tool calls until one is done,
    ``reward``, and ``close`` whatever happened. ``__aenter__`` and ``__aexit__``, if there are any, enclose them all.
    """

    def reset(self) -> Observation:
        """Begin; return what to append to the task's prompt."""
        return None

    def tools(self) -> Sequence[Tool]:
        """Return this episode's tools, which the model gets in addition to the config's. Must not block."""
        return ()

    def step(self, answer: str) -> Step:
        """Answer what the model said in a turn without tool calls. ``answer`` is without its reasoning."""
        return Step()

    def reward(self) -> float | Mapping[str, Any]:
        """Return what the episode has earned beyond its turns' rewards: the value of the scorer ``environment``.

        A mapping has it as ``score``, and further numbers to record.
        """
        return 0.0

    def close(self) -> None:
        """Release what the episode holds."""
