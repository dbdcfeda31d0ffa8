"""The answer of an environment, a simulated user or a tool to a turn of the policy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

# A user's message as text, or chat messages; None says nothing.
Observation = str | Sequence[dict[str, Any]] | None


class Step(NamedTuple):
    """An answer to one turn, or to one tool call in it.

    ``reward`` is the turn's, and ``reason`` says why; both are recorded, and the reward counts in training beside the
    episode's. ``done`` ends the episode, and so does an environment with nothing to say. In a game of several roles,
    ``to`` names the one that is told the observation and speaks next.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    reason: str = ""
    to: str = ""
