"""Numbers that requests give."""

import math

from rl_async.errors import RequestRefused

MOST = (1 << 63) - 1  # SQLite's largest whole number


def integer(name: str, text: str) -> int:
    """Parse the whole number that ``name`` gives. Raises RequestRefused for what is none that SQLite has."""
    try:
        found = int(text)
    except ValueError:
        raise _refused(name, text, "whole number") from None
    if abs(found) > MOST:
        raise _refused(name, text, "whole number of 64 bits")
    return found


def number(name: str, text: str) -> float:
    """Parse the number that ``name`` gives. Raises RequestRefused for what is none, infinite or NaN."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise _refused(name, text, "finite number")
    return found


def _refused(name: str, text: str, kind: str) -> RequestRefused:
    return RequestRefused(f"{name}: {text[:100]!r} is no {kind}", code="no_number", param=name)
