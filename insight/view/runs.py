"""Finds the runs for the page, summarizes each, and follows its metrics as columns while the run writes them."""

import math
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rl_async.configs.load import leaves
from rl_async.errors import RequestRefused, UserError
from rl_async.files import UNDECODABLE
from rl_async.insight.doctor import evaluates_only, is_recorded, launcher_of
from rl_async.insight.roster import ProcessRecord, read_roster
from rl_async.insight.tail import LineTail
from rl_async.process.run_files import TimelineReader

# JSON's numbers are read as floats, which hold whole numbers below this one exactly.
MOST_STEPS = 1 << 53
Record = Mapping[str, float | None]


class StepRecords:
    """Reads the records added to a file since the last call, also when another file has replaced it.

    ``key`` names the metric with a record's step. Invalid lines are left out; ``problem`` describes the last one.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key, self._tail = path, key, LineTail(path)
        self.problem = ""

    def read(self) -> list[tuple[int, Record]]:
        """Return the new records with their steps, oldest first; none while the file does not exist."""
        found, problem, replacements = [], "", self._tail.replacements
        for line in self._tail.each():
            try:
                record = msgspec.json.decode(line, type=Record)
                step = record.get(self._key)
                if step is None or not 0 <= step < MOST_STEPS:
                    raise ValueError(f"{self._key} is no step: {step}")
                found.append((int(step), record))
            except (*UNDECODABLE, ValueError) as error:
                problem = f"{self._path}, line {self._tail.count}: {error}"
        if problem or self._tail.replacements > replacements:
            self.problem = problem
        return found


class MetricColumns:
    """One number per step and metric, 8 bytes each; NaN where a step lacks a metric.

    After a resume, steps are trained again: the newest record of a step counts, and records of later steps are dropped.
    ``epoch`` counts such resumes, so that a reader that kept a part knows when to read everything again.
    """

    def __init__(self, path: Path) -> None:
        self.records = StepRecords(path, "step")
        self.epoch = 0
        self.steps = array("q")
        # Columns by name, in the order of their first appearance.
        self.columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read the new records of the file."""
        for step, record in self.records.read():
            if self.steps and step <= self.steps[-1]:
                kept = bisect_left(self.steps, step)
                del self.steps[kept:]
                for column in self.columns.values():
                    del column[kept:]
                self.epoch += 1
            before = len(self.steps)
            self.steps.append(step)
            for name, value in record.items():
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (before - len(column)))
                column.append(math.nan if value is None else value)

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric, or None if no step has it."""
        return next((value for value in reversed(self.columns.get(name, ())) if math.isfinite(value)), None)

    def since(self, names: Iterable[str], epoch: int, after: int) -> dict[str, Any]:
        """Return the columns ``names`` after the first ``after`` records, or all records if the epoch has changed.

        A value that a step lacks, or that is not finite, is null.
        """
        begin = after if epoch == self.epoch and after <= len(self.steps) else 0
        return {
            "epoch": self.epoch,
            "begin": begin,
            "count": len(self.steps),
            "steps": list(self.steps[begin:]),
            "columns": {name: self._part(name, begin) for name in names if name in self.columns},
        }

    def _part(self, name: str, begin: int) -> Sequence[float | None]:
        values = [value if math.isfinite(value) else None for value in self.columns[name][begin:]]
        return values + [None] * (len(self.steps) - begin - len(values))


CONFIG = "config.yaml"


class ViewedRun:
    """One run folder. ``refresh`` reads new records; other methods only use records that were read.

    Methods may be called on several threads, one at a time: hold ``lock``.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        self.metrics = MetricColumns(folder / "metrics.jsonl")
        self._evaluations = StepRecords(folder / "evaluations.jsonl", "eval/step")
        # The newest record of each evaluated step.
        self._evaluated: dict[int, Record] = {}
        # May be used without the lock.
        self.timeline = TimelineReader(folder)
        self._config: tuple[int, dict[str, Any], str] = (-1, {}, "")
        # The reason if the last refresh failed.
        self._unread = ""

    def refresh(self) -> None:
        """Read the run's new records. Unreadable files are reported by ``problem``."""
        self._unread = ""
        try:
            self.metrics.refresh()
            self._evaluated.update(self._evaluations.read())
        except OSError as error:
            self._unread = str(error)

    @property
    def problem(self) -> str:
        """The unreadable files of the run, with the reasons; empty if all can be read."""
        found = (self._read_config()[2], self._unread, self.metrics.records.problem, self._evaluations.problem)
        return "; ".join(filter(None, found))

    def evaluations(self) -> list[Record]:
        """Return the records of the run's evaluations, ordered by step."""
        return [self._evaluated[step] for step in sorted(self._evaluated)]

    def config(self) -> dict[str, Any]:
        """Return the keys and values of the run's config, such as ``trainer.steps``.

        Values are not checked, so that runs of other versions can be shown too; empty if the file cannot be read.
        """
        return self._read_config()[1]

    @property
    def solved(self) -> float:
        """The least reward of a held-out episode that passes: the run's ``eval.solved``, or 1 if that is not set."""
        solved = self.config().get("eval.solved", 1.0)
        return float(solved) if isinstance(solved, int | float) else 1.0

    def _read_config(self) -> tuple[int, dict[str, Any], str]:
        """Return the modification time of the config, its keys and values, and the reason if it cannot be read."""
        file = self.folder / CONFIG
        try:
            changed = file.stat().st_mtime_ns
            if self._config[0] != changed:
                self._config = changed, *_parsed(file)
        except OSError as error:
            self._config = -1, {}, str(error)
        return self._config

    def summary(self) -> dict[str, Any]:
        """Return the run's entry in the list of runs."""
        config, steps = self.config(), self.metrics.steps
        evaluations = self.evaluations()
        wanted, done = config.get("trainer.steps", 0), steps[-1] + 1 if steps else 0
        roles = [record.role for record in _roster(self.folder)]
        # An evaluation of a served model has no processes.
        evaluates = evaluates_only(roles) or "eval.endpoint.url" in config
        running, began = launcher_of(self.folder) is not None, _changed(self)
        # Times of steps and evaluations, of which a resumed run has some before its config was written again.
        known = [*self._times(), *([time.time()] if running else [])]
        return {
            "name": self.name,
            "folder": str(self.folder),
            "mode": config.get("mode", ""),
            "model": config.get("model.path", ""),
            "evaluates": evaluates,
            "steps": 0 if evaluates else wanted,
            "steps_done": done,
            "data": _named(config.get("data.path")),
            "algorithm": ", ".join(str(config[key]) for key in ALGORITHM if config.get(key)),
            "commit": self._commit(),
            "started": min(known, default=began) if began else None,
            "ended": max(known, default=None),
            "running": running,
            "finished": is_recorded(self.folder) if evaluates else bool(wanted) and done >= wanted,
            "began": began,
            "reward": self.metrics.last("reward/mean"),
            "evaluation": evaluations[-1].get("eval/reward") if evaluations else None,
            "trajectories": (self.folder / "trajectories").is_dir(),
            "problem": self.problem,
        }

    def _times(self) -> list[float]:
        """Return the Unix times of the first and the last step that was trained, as far as they are recorded."""
        column = [at for at in self.metrics.columns.get("time", ()) if math.isfinite(at)]
        return [min(self._first_s(column[0]), column[0]), column[-1]] if column else []

    def _first_s(self, first: float) -> float:
        """Return when the first step began."""
        took = self.metrics.columns.get("time/step_s")
        return first - took[0] if took and math.isfinite(took[0]) else first

    def _commit(self) -> str:
        """Return the commit that the run was started with; empty if its folder does not say."""
        try:
            found = msgspec.json.decode((self.folder / "machine.json").read_bytes())
        except (OSError, *UNDECODABLE):
            return ""
        return str(found.get("commit", "")) if isinstance(found, dict) else ""


ALGORITHM = ("algorithm.advantage", "algorithm.loss", "algorithm.correction")


def _named(path: Any) -> str:
    """Return the names of a run's data sets."""
    parts = path if isinstance(path, list) else [path]
    return ", ".join(str(part.get("path", "") if isinstance(part, dict) else part) for part in parts if part)


class ViewedRuns:
    """The runs in ``places``, which are run folders or folders of runs. New runs appear by themselves."""

    def __init__(self, places: Sequence[Path]) -> None:
        """Raises UserError if a place is neither."""
        self._places = [place.absolute() for place in places]
        self._runs: dict[Path, ViewedRun] = {}
        for place in self._places:
            if not place.is_dir():
                raise UserError(f"{place} is no folder; give run folders such as runs/NAME, or a folder of runs")
            if len(places) == 1 and not list(_folders(place)):
                raise UserError(f"{place} is no run and holds none: there is no {CONFIG} in it or in its folders")

    def all(self) -> list[ViewedRun]:
        """Return the runs that exist now, the newest first."""
        folders = {folder: None for place in self._places for folder in _folders(place)}
        taken = {run.name for run in self._runs.values()}
        for folder in folders:
            if folder not in self._runs:
                name = next(name for name in _names(folder) if name not in taken)
                taken.add(name)
                self._runs[folder] = ViewedRun(name, folder)
        found = [self._runs[folder] for folder in folders]
        return sorted(found, key=_changed, reverse=True)

    def named(self, name: str) -> ViewedRun:
        """Return the run of that name. Raises RequestRefused (404) for an unknown one."""
        run = next((run for run in self.all() if run.name == name), None)
        if run is None:
            raise RequestRefused(f"there is no run {name[:200]!r}", code="no_run", status=404)
        return run


def _parsed(file: Path) -> tuple[dict[str, Any], str]:
    try:
        found = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, f"{file}: {error}"
    return (dict(leaves(found)), "") if isinstance(found, dict) else ({}, f"{file} has no keys")


def _roster(folder: Path) -> Sequence[ProcessRecord]:
    """Return the processes of the run, or none: a partly copied folder may lack their list."""
    try:
        return read_roster(folder)
    except UserError:
        return ()


def _changed(run: ViewedRun) -> float:
    """Return the modification time of a run's config, or 0 if it is gone."""
    try:
        return (run.folder / CONFIG).stat().st_mtime
    except OSError:
        return 0.0


def _names(folder: Path) -> Iterator[str]:
    yield folder.name
    yield from (f"{folder.name}~{number}" for number in range(2, 1 << 30))


def _folders(place: Path) -> Iterator[Path]:
    if (place / CONFIG).is_file():
        yield place
        return
    for folder in sorted(place.iterdir()):
        if (folder / CONFIG).is_file():
            yield folder
