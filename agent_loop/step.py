"""The answer of an environment, a simulated user or a tool to a turn of the policy."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rl_async.reward_loop.api import finite_number
from rl_async.userload import encodable

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


def checked(step: Step) -> Step:
    """Return the step of a user's environment or tool with Python's own numbers.

    Raises ValueError, which names the value, for a reward that is no finite number and a ``done`` that is no bool.
    """
    reward = None if step.reward is None else finite_number(step.reward)
    if step.reward is not None and reward is None:
        raise ValueError(f"returned {step.reward!r:.80}, not a reward that is a finite number")
    # NumPy's truth values are of another type.
    done: Any = step.done
    if getattr(done, "size", None) == 1:
        done = done.item()
    if not isinstance(done, bool):
        raise ValueError(f"returned done={step.done!r:.80}, not a bool")
    return step._replace(reward=reward, done=done, reason=encodable(str(step.reason)))
