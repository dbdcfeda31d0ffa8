"""Metrics of a run as columns, followed while the run writes them."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_async.launcher.folder.tail import LineTail


class FollowedLines:
    """The complete lines that were added to a file since the last call, also when the file is replaced by another."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._tail = path, -1, LineTail(path)

    def read(self) -> list[bytes]:
        """Return the new lines, oldest first; none if there is no file yet."""
        if not self._path.is_file():
            return []
        inode = self._path.stat().st_ino
        if inode != self._inode:
            self._inode, self._tail = inode, LineTail(self._path)
        return self._tail.read()


class MetricColumns:
    """One number per step and metric, 8 bytes each; NaN where a step lacks a metric.

    After a resume, steps are trained again: the newest record of a step counts, and those behind it are dropped.
    ``epoch`` counts how often that happened, so that a reader that kept a part knows when to read it all again.
    """

    def __init__(self, path: Path) -> None:
        self._lines = FollowedLines(path)
        self.epoch = 0
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read what was added to the file."""
        for line in self._lines.read():
            self._add(msgspec.json.decode(line, type=dict[str, float | None]))

    def _add(self, record: Mapping[str, float | None]) -> None:
        step = int(record["step"] or 0)
        if self.steps and step <= self.steps[-1]:
            kept = bisect_left(self.steps, step)
            del self.steps[kept:]
            for column in self._columns.values():
                del column[kept:]
            self.epoch += 1
        before = len(self.steps)
        self.steps.append(step)
        for name, value in record.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (before - len(column)))
            column.append(math.nan if value is None else value)

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they appeared."""
        return list(self._columns)

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if no step has it."""
        return next((value for value in reversed(self._columns.get(name, ())) if math.isfinite(value)), None)

    def since(self, names: Iterable[str], epoch: int, after: int) -> dict[str, Any]:
        """Return the columns ``names`` behind the first ``after`` records, or all records of another epoch.

        A value that a step lacks, or that is not finite, is null.
        """
        begin = after if epoch == self.epoch and after <= len(self.steps) else 0
        return {
            "epoch": self.epoch,
            "begin": begin,
            "count": len(self.steps),
            "steps": list(self.steps[begin:]),
            "columns": {name: self._part(name, begin) for name in names if name in self._columns},
        }

    def _part(self, name: str, begin: int) -> Sequence[float | None]:
        values = [value if math.isfinite(value) else None for value in self._columns[name][begin:]]
        return values + [None] * (len(self.steps) - begin - len(values))


class Evaluations:
    """The records of ``evaluations.jsonl`` by the step that was evaluated; the newest record of a step counts."""

    def __init__(self, path: Path) -> None:
        self._lines = FollowedLines(path)
        self._records: dict[int, dict[str, float | None]] = {}

    def refresh(self) -> None:
        """Read what was added to the file."""
        for line in self._lines.read():
            record = msgspec.json.decode(line, type=dict[str, float | None])
            self._records[int(record["eval/step"] or 0)] = record

    def records(self) -> list[dict[str, float | None]]:
        """Return them by step."""
        return [self._records[step] for step in sorted(self._records)]
