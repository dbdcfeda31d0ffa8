"""Reads files that another process appends to, continuing where the last call ended: records, and warnings in logs.

Processes log as ``rl_async.process.role`` sets it: ``time role level message``. Two lines are of one kind if they begin
alike except for their numbers, in whichever process.
"""

import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl_async.files import last_line, undamaged
from rl_async.process.role import printable

# One line of metrics.jsonl or evaluations.jsonl.
Record = dict[str, float]


def record_of(line: bytes) -> Record:
    """Decode one line of metrics. NaN is written as null, since JSON lacks it."""
    found = msgspec.json.decode(line, type=dict[str, float | None])
    return {key: math.nan if value is None else value for key, value in found.items()}


def last_record(metrics: Path) -> Record:
    """Return the last record of a run's metrics; empty before the first. Raises UserError if it is damaged."""
    with undamaged(metrics):
        return record_of(last_line(metrics) or b"{}")


class LineTail:
    """Reads the complete lines added since the last call, starting over when another file has replaced this one.

    ``count`` is the number of lines read from the present file, ``replacements`` the number of replaced files.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset
        self._inode: int | None = None
        self.count = self.replacements = 0

    def read(self) -> list[bytes]:
        """Return the new lines without their newlines, oldest first; none while the file does not exist."""
        return list(self.each())

    def records(self) -> list[Record]:
        """Return the new lines of metrics or evaluations, oldest first. Raises UserError if the file is damaged."""
        with undamaged(self._path):
            return list(map(record_of, self.each()))

    def each(self) -> Iterator[bytes]:
        """Yield the new lines one by one, so that a long file need not fit in memory."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._inode not in (None, inode):
                self._offset = self.count = 0
                self.replacements += 1
            self._inode = inode
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self.count += 1
                yield line[:-1]


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

    def __init__(self, run: Path) -> None:
        self._logs = run / "logs"
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
        found = self._kinds.setdefault(kind, RepeatedWarning(level, text, time.time()))
        found.text, found.last = text, time.time()
        found.counts[process] = found.counts.get(process, 0) + 1
        if times := _TIMES.search(text):
            found.counts[process] = max(found.counts[process], int(times[1]))
        return kind, found

    @property
    def newest_first(self) -> list[RepeatedWarning]:
        """All kinds, the one that occurred last first."""
        return sorted(self._kinds.values(), key=lambda found: -found.last)
