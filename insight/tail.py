"""Reads files that another process appends to, continuing where the last call ended."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rl_async.files import last_line, undamaged

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


class MetricsTail:
    """Reads the records added to ``metrics.jsonl`` or ``evaluations.jsonl`` since the last call.

    Like ``LineTail``, it starts over with a file that replaced the last one.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, LineTail(path)

    def read(self) -> list[Record]:
        """Return the new records, oldest first. Raises UserError if the file is damaged."""
        with undamaged(self._path):
            return list(map(record_of, self._lines.read()))
