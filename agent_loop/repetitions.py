"""Which of many failures that are alike are worth a line in the log."""

import re
from collections import Counter

FIRST_LINES, KINDS = 3, 1000  # lines of each kind before they become fewer; kinds that are counted


class Repetitions:
    """Counts failures by kind. Worth a line are the first few, then each power of two.

    Of more than KINDS kinds it begins to count again.
    """

    def __init__(self) -> None:
        self._times = Counter[str]()

    def another(self, kind: str) -> int:
        """Return how many of its kind there were with this one, if it is worth a line; else 0."""
        if len(self._times) > KINDS:
            self._times.clear()
        self._times[kind] += 1
        times = self._times[kind]
        return times if times <= FIRST_LINES or times.bit_count() == 1 else 0


def beginning(text: str) -> str:
    """Return how an error begins, without its numbers: what errors that one line of code raises have in common."""
    return re.sub(r"\d+", "", text)[:80]
