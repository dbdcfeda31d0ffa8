"""The runs that a page shows, and what it lists of each."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_async.errors import RequestRefused, UserError
from rl_async.launcher.doctor.observe import evaluates_only, is_recorded, launcher_of
from rl_async.launcher.folder.run_folder import leaves
from rl_async.launcher.supervise.roster import ProcessRecord, read_roster
from rl_async.launcher.view.columns import Evaluations, MetricColumns
from rl_async.process.run_files import TimelineReader

CONFIG = "config.yaml"


class ViewedRun:
    """One run folder. ``refresh`` reads what is new; its other methods only look at what was read.

    Methods may be called on several threads, one at a time: hold ``lock``.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        self.metrics = MetricColumns(folder / "metrics.jsonl")
        self.evaluations = Evaluations(folder / "evaluations.jsonl")
        self.timeline = TimelineReader(folder)  # needs no lock
        self._config: tuple[int, dict[str, Any], str] = (-1, {}, "")
        self._unread = ""  # why the last refresh failed

    def refresh(self) -> None:
        """Read what the run has written since the last call. ``problem`` says what cannot be read."""
        self._unread = ""
        try:
            self.metrics.refresh()
            self.evaluations.refresh()
        except OSError as error:
            self._unread = str(error)

    @property
    def problem(self) -> str:
        """What of the run cannot be read, and why; empty if everything can."""
        found = (self._read_config()[2], self._unread, self.metrics.problem, self.evaluations.problem)
        return "; ".join(filter(None, found))

    def config(self) -> dict[str, Any]:
        """Return the keys and values of the run's config, such as ``trainer.steps``.

        It is shown as it stands, so that runs of other versions can be read too; empty if it cannot be read.
        """
        return self._read_config()[1]

    @property
    def solved(self) -> float:
        """The reward with which a held-out episode passes: the run's ``eval.solved``, 1 if its config has none."""
        solved = self.config().get("eval.solved", 1.0)
        return float(solved) if isinstance(solved, int | float) else 1.0

    def _read_config(self) -> tuple[int, dict[str, Any], str]:
        """Return the time of its last change, its keys and values, and why it cannot be read."""
        file = self.folder / CONFIG
        try:
            changed = file.stat().st_mtime_ns
            if self._config[0] != changed:
                self._config = changed, *_parsed(file)
        except OSError as error:
            self._config = -1, {}, str(error)
        return self._config

    def summary(self) -> dict[str, Any]:
        """Return what the list of runs shows of it."""
        config, steps = self.config(), self.metrics.steps
        evaluations = self.evaluations.records()
        wanted, done = config.get("trainer.steps", 0), steps[-1] + 1 if steps else 0
        roles = [record.role for record in _roster(self.folder)]
        # One of a served model has no processes.
        evaluates = evaluates_only(roles) or "eval.endpoint.url" in config
        return {
            "name": self.name,
            "folder": str(self.folder),
            "mode": config.get("mode", ""),
            "model": config.get("model.path", ""),
            "evaluates": evaluates,
            "steps": 0 if evaluates else wanted,
            "steps_done": done,
            "running": launcher_of(self.folder) is not None,
            "finished": is_recorded(self.folder) if evaluates else bool(wanted) and done >= wanted,
            "began": _changed(self),
            "reward": self.metrics.last("reward/mean"),
            "evaluation": evaluations[-1].get("eval/reward") if evaluations else None,
            "trajectories": (self.folder / "trajectories").is_dir(),
            "problem": self.problem,
        }


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
        """Return the run of that name. Raises RequestRefused (404) if there is none."""
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
    """Return the processes that the run started; none of a folder that was copied in part."""
    try:
        return read_roster(folder)
    except UserError:
        return ()


def _changed(run: ViewedRun) -> float:
    """Return the time of the last change of a run's config; 0 if it is gone."""
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
