"""Reads files that another process appends to, from where the last call ended."""

from pathlib import Path

import msgspec

Record = dict[str, float]  # one line of metrics.jsonl or evaluations.jsonl


class LineTail:
    """Reads the complete lines that were added since the last call."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def read(self) -> list[bytes]:
        """Return the new lines without their newlines, oldest first; none if there is no file yet."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.splitlines()


class MetricsTail:
    """Reads the records that were added to ``metrics.jsonl`` or ``evaluations.jsonl`` since the last call."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def read(self) -> list[Record]:
        """Return the new records, oldest first."""
        return [msgspec.json.decode(line, type=Record) for line in self._lines.read()]
