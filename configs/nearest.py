"""What a person who wrote an unknown name may have meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """The end of an error's sentence: the closest of ``names``, or all of them."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known: {', '.join(known)}"
