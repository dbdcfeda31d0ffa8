"""Collects the warnings and errors in the logs of a run's processes, each kind once with its count.

Processes log as ``rl_async.process.role`` sets it: ``time role level message``. Two lines are of one kind if they begin
alike except for their numbers, in whichever process.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rl_async.insight.tail import LineTail
from rl_async.insight.terminal import printable

# The launcher's own log, which its process writes as well, names no role.
_LINE = re.compile(r"\d\d:\d\d:\d\d (?:\S+ )?(WARNING|ERROR|CRITICAL) (.+)")
_NUMBER = re.compile(r"\d+(?:[.:_-]?\d+)*")
# A process that thins out its own repetitions ends the line with their number.
_TIMES = re.compile(r"(\d+) times\)$")
# So many characters, without numbers, tell kinds apart.
KIND = 200
# Further kinds are counted as one.
MOST_KINDS = 200
OTHERS = "other warnings"
# The output of the launcher repeats the warnings that are shown.
NOT_READ = ("output.log",)


@dataclass
class RepeatedWarning:
    """One kind of warning, with its newest text, its number of occurrences in each log, and when it was last read.

    ``told`` is the number of occurrences when it was last printed.
    """

    level: str
    text: str
    last: float
    counts: dict[str, int] = field(default_factory=dict)
    told: int = 0

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    @property
    def processes(self) -> str:
        """The names of the processes, at most three."""
        names = list(self.counts)
        return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")

    @property
    def line(self) -> str:
        """Describe the warning, its processes and its count on one line."""
        times = f" ({self.count:,} times so far)" if self.count > 1 else ""
        return f"{self.processes}{times}: {self.text}"


class LogWarnings:
    """Follows all logs of a run from their present ends, and those that appear later from their beginnings."""

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._logs, self._clock = run / "logs", clock
        self._tails = {path: LineTail(path, path.stat().st_size) for path in self._found()}
        self._kinds: dict[str, RepeatedWarning] = {}

    def _found(self) -> list[Path]:
        return [path for path in sorted(self._logs.glob("*.log")) if path.name not in NOT_READ]

    def read(self) -> list[RepeatedWarning]:
        """Read what was logged since the last call, and return the kinds that occurred, in order."""
        seen: dict[str, RepeatedWarning] = {}
        for path in self._found():
            tail = self._tails.setdefault(path, LineTail(path))
            for line in tail.read():
                if match := _LINE.match(line.decode(errors="replace")):
                    kind, found = self._add(path.stem, match[1], printable(match[2]))
                    seen[kind] = found
        return list(seen.values())

    def _add(self, process: str, level: str, text: str) -> tuple[str, RepeatedWarning]:
        kind = f"{level} {_NUMBER.sub('#', text)[:KIND]}"
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            kind, text = OTHERS, f"{OTHERS}; the newest: {text}"
        found = self._kinds.setdefault(kind, RepeatedWarning(level, text, self._clock()))
        found.text, found.last = text, self._clock()
        found.counts[process] = found.counts.get(process, 0) + 1
        if times := _TIMES.search(text):
            found.counts[process] = max(found.counts[process], int(times[1]))
        return kind, found

    @property
    def newest_first(self) -> list[RepeatedWarning]:
        """All kinds, the one that occurred last first."""
        return sorted(self._kinds.values(), key=lambda found: -found.last)
