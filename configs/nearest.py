"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error message about an unknown name: the closest of ``names`` or, failing that, all.

    Up to three are all named: the closest by its letters may be the opposite of what was meant (cuda, cpu).
    """
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(known) > 3 else []
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known: {', '.join(known)}"
