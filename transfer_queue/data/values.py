"""Values of rows as text, and their limits: what a row holds must be text, or become text in one way only."""

import datetime
import json
import math
import sys
import uuid
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, TypeGuard

DEEPEST = 64  # levels of lists and mappings in a row
_WHOLE = (-(2**63), 2**64 - 1)  # the integers that MessagePack holds


def as_text(value: Any) -> str:
    """Write a value as text: a text as it is, decimal numbers in digits, dates as ISO 8601 has them, the rest as JSON.

    Raises ValueError, saying why, for a value that has no such text: NaN, bytes, a duration.
    """
    plain = plain_value(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def plain_value(value: Any) -> Any:
    """Convert a value to what JSON holds. Raises ValueError, saying why, for one that JSON does not hold."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a number that JSON holds; write it as text, or leave the row out")
        return value
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a mapping with keys that are not text; write them as text")
        return {key: plain_value(part) for key, part in value.items()}
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value} is not a finite number; write it as text, or leave the row out")
        return f"{value:f}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    hint = "; decode them to text" if isinstance(value, bytes) else "; write it as text"
    raise ValueError(f"a value of type {type(value).__name__} has no text of its own{hint}")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; an integer that no float holds is not, and neither is a truth value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def short(value: Any) -> str:
    """Show the beginning of a value in an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def without_nulls(value: Any) -> Any:
    """Drop keys without a value: Arrow gives every struct all keys that any struct of its column has."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def depth_problem(value: Any) -> str | None:
    """Say that a value is nested too deeply for those that read it by recursion; None if it is not."""
    level, depth = [value], 0
    while level := [inside for part in level for inside in _inside(part)]:
        depth += 1
        if depth > DEEPEST:
            return f"nested more than {DEEPEST} levels deep; write its inside as text"
    return None


def message_problem(value: Any) -> str | None:
    """Say why no message can carry a value: an integer beyond 64 bits, a key that is not text; None if one can."""
    if isinstance(value, int) and not _WHOLE[0] <= value <= _WHOLE[1]:
        return "an integer of more than 64 bits; write it as text"
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return "a mapping with keys that are not text; write them as text"
    return next((problem for part in _inside(value) if (problem := message_problem(part))), None)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
