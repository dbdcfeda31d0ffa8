"""What a scorer gets, a Conversation, and what it returns, a Score."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, SupportsFloat

import msgspec

from rl_async.errors import RlAsyncError
from rl_async.messages import Turn

ENVIRONMENT = "environment"  # the scorer that returns what the episode's environment gave
REWARD = "reward"  # in ``Trajectory.reward_reasons``: the whole of a reward that an agent program gave
MOST_REASON = 4096  # characters of a reason that are recorded
MOST_PARTS, PART_NAME = 100, 200  # numbers beside a reward, and characters of their names


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode as text. The names are those of verl's reward functions."""

    data_source: str
    solution_str: str  # what the model said last, without the token that ended the turn
    ground_truth: str
    extra_info: dict[str, Any] = {}
    turns: list[Turn] = []
    finish_reason: str = "stop"
    reasoning: str = ""  # of that turn, as the chat format reads it
    answer: str = ""  # what follows the reasoning, which built-in scorers get as solution_str
    environment: dict[str, float] = {}  # what the episode's environment gave: ``score``, and further numbers

    @property
    def place(self) -> str:
        """Name the ground truth of the row in errors."""
        return f"{self.data_source or 'data'}, row {self.extra_info.get('index', '?')}: ground_truth"


class Score(msgspec.Struct, frozen=True):
    """``value`` enters the reward; ``extra`` and ``reason``, for people, are only recorded."""

    value: float
    extra: dict[str, float] = {}
    reason: str = ""

    def named(self, name: str) -> dict[str, float]:
        """Return all numbers as entries of ``Trajectory.reward_parts``, below the scorer's name."""
        return {name: self.value} | {f"{name}/{key}": number for key, number in self.extra.items()}

    def reasons(self, name: str) -> dict[str, str]:
        """Return the reason as an entry of ``Trajectory.reward_reasons``, whose beginning it is if it is long."""
        return {name: self.reason[:MOST_REASON]} if self.reason else {}


def is_time(part: str) -> bool:
    """Whether an entry of ``Trajectory.reward_parts`` beside a score is a measured time: it ends in `_s` or `seconds`.

    Times differ from one scoring to the next; nothing else may.
    """
    return "/" in part and part.endswith(("_s", "seconds"))


class ScorerFailed(RlAsyncError):
    """A scorer raised, died, missed its deadline or returned no usable score; the message does not name the scorer."""


class ScorerUnreachable(ScorerFailed):
    """The server behind a scorer, which had answered before, does not answer now."""


class Scorer(Protocol):
    """Scores one conversation. Raises ScorerFailed; anything else it raises counts as a failure too."""

    async def score(self, conversation: Conversation) -> Score: ...


def to_score(answer: object) -> Score:
    """Convert what a reward function returned: a number, or verl's mapping with ``score``, other numbers, and a text
    ``reason`` if there is one.

    Raises ScorerFailed for anything else and for a score that is not finite.
    """
    extra: dict[str, float] = {}
    given, reason = answer, ""
    if isinstance(answer, Mapping):
        given = answer.get("score")
        if isinstance(text := answer.get("reason"), str):
            reason = text[:MOST_REASON].encode(errors="replace").decode()  # half a character could not be sent
        numbers = {
            str(key).encode(errors="replace").decode(): finite_number(value)
            for key, value in answer.items()
            if key != "score"
        }
        extra = {key: number for key, number in numbers.items() if number is not None}
    if problem := too_many(extra):
        raise ScorerFailed(f"gave {problem}")
    value = finite_number(given)
    if value is None:
        raise ScorerFailed(f"gave {answer!r:.80}, which is neither a finite number nor a mapping with such a `score`")
    return Score(value, extra, reason)


def too_many(parts: Mapping[str, float]) -> str | None:
    """Say why these are more parts of a reward than are recorded; None if they are not."""
    if len(parts) > MOST_PARTS:
        return f"{len(parts)} numbers beside the reward; at most {MOST_PARTS} are recorded"
    if long := next((name for name in parts if len(name) > PART_NAME), None):
        return f"a number whose name has {len(long)} characters ({long[:40]}...); at most {PART_NAME} are recorded"
    return None


def finite_number(value: object) -> float | None:
    """Return ``value`` as a finite float, or None; truth values and NumPy arrays of one element are numbers."""
    if getattr(value, "size", None) == 1 and callable(item := getattr(value, "item", None)):
        value = item()
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        # An array of several elements, or a number beyond all floats.
        return None
    return number if math.isfinite(number) else None
