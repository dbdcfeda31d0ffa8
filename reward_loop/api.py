"""The contract of scorers: a Conversation in, a Score out."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from rl_async.errors import RlAsyncError
from rl_async.messages import Turn

# The scorer that returns the reward of the episode's environment.
ENVIRONMENT = "environment"
# The key in ``Trajectory.reward_reasons`` of the total reward that an agent program gave.
REWARD = "reward"
# Limits on the parts of a reward that are recorded: characters of a reason, numbers, characters of a number's name.
MOST_REASON = 4096
MOST_PARTS, PART_NAME = 100, 200


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A finished episode as text. The names are those of verl's reward functions.

    ``solution_str`` is the last turn of the model, without the token that ended it. The chat format splits it into
    ``reasoning`` and ``answer``; built-in scorers get the latter as their ``solution_str``. ``environment`` is the
    reward of the episode's environment: ``score``, and further numbers.
    """

    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any] = {}
    turns: list[Turn] = []
    finish_reason: str = "stop"
    reasoning: str = ""
    answer: str = ""
    environment: dict[str, float] = {}

    @property
    def place(self) -> str:
        """Name the ground truth of the row in errors."""
        return f"{self.data_source or 'data'}, row {self.extra_info.get('index', '?')}: ground_truth"


class Score(msgspec.Struct, frozen=True):
    """``value`` enters the reward; ``extra`` and ``reason``, for people, are only recorded.

    ``turns`` are the parts of it that belong to the assistant's turns before the last one, in order.
    """

    value: float
    extra: dict[str, float] = {}
    reason: str = ""
    turns: tuple[float, ...] = ()

    def named(self, name: str) -> dict[str, float]:
        """Return all numbers as entries of ``Trajectory.reward_parts``, below the scorer's name."""
        return {name: self.value} | {f"{name}/{key}": number for key, number in self.extra.items()}

    def reasons(self, name: str) -> dict[str, str]:
        """Return the reason as an entry of ``Trajectory.reward_reasons``, cut to MOST_REASON characters."""
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


def to_score(answer: object) -> Score:
    """Convert the result of a reward function: a number, or verl's mapping with ``score``, other numbers, and an
    optional text ``reason``.

    Raises ScorerFailed for anything else and for a score that is not finite.
    """
    extra: dict[str, float] = {}
    given, reason = answer, ""
    if isinstance(answer, Mapping):
        given = answer.get("score")
        if isinstance(text := answer.get("reason"), str):
            # A lone surrogate could not be sent.
            reason = text[:MOST_REASON].encode(errors="replace").decode()
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
    """Return why a reward has too many parts or too long names to be recorded, or None."""
    if len(parts) > MOST_PARTS:
        return f"{len(parts)} numbers beside the reward; at most {MOST_PARTS} are recorded"
    if long := next((name for name in parts if len(name) > PART_NAME), None):
        return f"a number whose name has {len(long)} characters ({long[:40]}...); at most {PART_NAME} are recorded"
    return None


def finite_number(value: object) -> float | None:
    """Return ``value`` as a finite float, or None; truth values and NumPy arrays of one element are numbers."""
    if getattr(value, "size", None) == 1 and callable(item := getattr(value, "item", None)):
        value = item()
    convert = getattr(value, "__float__", None)
    if isinstance(value, str | bytes) or convert is None:
        return None
    try:
        number = float(convert())
    except (TypeError, ValueError, OverflowError):
        # An array of several elements, or a number beyond all floats.
        return None
    return number if math.isfinite(number) else None
