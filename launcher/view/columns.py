"""Metrics of a run as columns, followed while the run writes them."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl_async.files import UNDECODABLE
from rl_async.launcher.folder.tail import LineTail

MOST_STEPS = 1 << 53  # numbers below are whole as floats, too
Record = Mapping[str, float | None]


class StepRecords:
    """The records that were added to a file since the last call, also when the file is replaced by another.

    ``key`` is the metric that has a record's step. A line that is no such record is left out; ``problem`` names the
    last one.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key, self._inode, self._tail = path, key, -1, LineTail(path)
        self._count = 0  # lines that were read
        self.problem = ""

    def read(self) -> list[tuple[int, Record]]:
        """Return the new records with their steps, oldest first; none if there is no file yet."""
        if not self._path.is_file():
            return []
        inode = self._path.stat().st_ino
        if inode != self._inode:
            self._inode, self._tail, self._count, self.problem = inode, LineTail(self._path), 0, ""
        found = []
        for line in self._tail.read():
            self._count += 1
            try:
                found.append(self._parsed(line))
            except (*UNDECODABLE, ValueError) as error:
                self.problem = f"{self._path}, line {self._count}: {error}"
        return found

    def _parsed(self, line: bytes) -> tuple[int, Record]:
        record = msgspec.json.decode(line, type=Record)
        step = record.get(self._key)
        if step is None or not 0 <= step < MOST_STEPS:
            raise ValueError(f"{self._key} is no step: {step}")
        return int(step), record


class MetricColumns:
    """One number per step and metric, 8 bytes each; NaN where a step lacks a metric.

    After a resume, steps are trained again: the newest record of a step counts, and those behind it are dropped.
    ``epoch`` counts how often that happened, so that a reader that kept a part knows when to read it all again.
    """

    def __init__(self, path: Path) -> None:
        self._records = StepRecords(path, "step")
        self.epoch = 0
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read what was added to the file."""
        for step, record in self._records.read():
            self._add(step, record)

    @property
    def problem(self) -> str:
        """What is wrong with the file; empty if nothing is."""
        return self._records.problem

    def _add(self, step: int, record: Record) -> None:
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
        self._lines = StepRecords(path, "eval/step")
        self._records: dict[int, Record] = {}

    def refresh(self) -> None:
        """Read what was added to the file."""
        self._records.update(self._lines.read())

    @property
    def problem(self) -> str:
        """What is wrong with the file; empty if nothing is."""
        return self._lines.problem

    def records(self) -> list[Record]:
        """Return them by step."""
        return [self._records[step] for step in sorted(self._records)]
