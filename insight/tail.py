"""Reads files that another process appends to, from where the last call ended."""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rl_async.files import last_line, undamaged

Record = dict[str, float]  # one line of metrics.jsonl or evaluations.jsonl


def record_of(line: bytes) -> Record:
    """Read one line of metrics. A number that was none in training is NaN, which JSON has as null."""
    found = msgspec.json.decode(line, type=dict[str, float | None])
    return {key: math.nan if value is None else value for key, value in found.items()}


def last_record(metrics: Path) -> Record:
    """Return the last record of a run's metrics; empty before the first. Raises UserError if it is damaged."""
    with undamaged(metrics):
        return record_of(last_line(metrics) or b"{}")


class LineTail:
    """Reads the complete lines that were added since the last call."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def read(self) -> list[bytes]:
        """Return the new lines without their newlines, oldest first; none if there is no file yet."""
        return list(self.each())

    def each(self) -> Iterator[bytes]:
        """Yield them one by one, so that a long file need not fit in memory."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line[:-1]


class MetricsTail:
    """Reads the records that were added to ``metrics.jsonl`` or ``evaluations.jsonl`` since the last call."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, LineTail(path)

    def read(self) -> list[Record]:
        """Return the new records, oldest first. Raises UserError if the file is damaged."""
        with undamaged(self._path):
            return list(map(record_of, self._lines.read()))
