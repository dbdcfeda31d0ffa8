"""The methods of environments. All are optional, and may be ``async def`` or plain, which runs in a thread."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_async.agent_loop.tools.tool import Observation, Step, Tool


class Environment:
    """A world or a simulated user that lives for one episode. Made from the episode's task; deriving is optional.

    ``prepare``, a static method, may do work beforehand that does not depend on the task; see
    ``environment_registry.EnvironmentKind``. Called in this order: ``reset``, ``tools``, then ``step`` after every turn
    without tool calls until one is done, ``reward``, and always ``close``. The optional ``__aenter__`` and
    ``__aexit__`` enclose them all. One with ``roles`` is a game, whose methods are those of ``Game``.
    """

    def reset(self) -> Observation:
        """Begin; return the observation to append to the task's prompt."""
        return None

    def tools(self) -> Sequence[Tool]:
        """Return this episode's tools, which the model gets in addition to the config's. Must not block."""
        return ()

    def step(self, answer: str) -> Step:
        """Answer a turn of the model without tool calls. ``answer`` is the turn without its reasoning."""
        return Step()

    def reward(self) -> float | Mapping[str, Any]:
        """Return the episode's reward beyond its turns' rewards: the value of the scorer ``environment``.

        A mapping has it as ``score``, and further numbers to record.
        """
        return 0.0

    def close(self) -> None:
        """Release what the episode holds."""


class Game:
    """An environment of several roles, which speak in turn. Deriving is optional; ``roles`` makes a game of it.

    Each role has a conversation of its own, which begins with the task's prompt and the first messages to the role. If
    these begin with a system message, they replace the prompt.
    """

    roles: Sequence[str] = ()

    def reset(self) -> Step:
        """Begin; the step's observation goes ``to`` the role that speaks first."""
        return Step(to=self.roles[0])

    def tools(self) -> Sequence[Tool] | Mapping[str, Sequence[Tool]]:
        """Return the tools of all roles, or those of each. Must not block."""
        return ()

    def step(self, answer: str) -> Step:
        """Answer the turn of a role. The reward is that role's; ``to`` is the role that speaks next."""
        return Step(done=True)

    def reward(self) -> float | Mapping[str, Any]:
        """Return the reward of each role beyond its turns' rewards, by role, or one reward for all of them."""
        return 0.0

    def close(self) -> None:
        """Release what the episode holds."""
