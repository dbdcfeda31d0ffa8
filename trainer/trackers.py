"""Sends metrics to their destinations. A tracker that cannot start ends the run; one that fails later is dropped.

A tracker is one function here and one line in ``TRACKERS``, under its name in the config (``TrackerName``).
"""

import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.configs.schema.run import RunConfig, TrackerName
from rl_async.errors import ConfigError
from rl_async.files import append_lines, replace_file

log = logging.getLogger("rl_async.trackers")
Metrics = Mapping[str, float]

# The file in a tracker's folder that has the tracker's id of the run.
_RUN_ID = "run_id"
CONSOLE_METRICS = ("reward/mean", "staleness/max", "time/step_s", "loss/grad_norm", "eval/step", "eval/reward")


class Destination(NamedTuple):
    """An open tracker: ``log`` records one step (steps never decrease), ``close`` flushes and ends it."""

    log: Callable[[int, Metrics], object]
    close: Callable[[], object]


# Opens a tracker for a run's config and folder, and raises if it cannot start.
Tracker = Callable[[RunConfig, Path], Destination]


def jsonl(config: RunConfig, folder: Path) -> Destination:
    """Write ``metrics.jsonl`` in the run folder, one object per step. Always on."""
    file = append_lines(folder / "metrics.jsonl")

    def write(step: int, metrics: Metrics) -> None:
        file.write(msgspec.json.encode(dict(metrics)) + b"\n")
        file.flush()

    return Destination(write, file.close)


def console(config: RunConfig, folder: Path) -> Destination:
    """Print one line per step to standard error, with the most telling metrics."""
    steps = config.trainer.steps

    def show(step: int, metrics: Metrics) -> None:
        text = "  ".join(f"{key} {metrics[key]:.3f}" for key in CONSOLE_METRICS if key in metrics)
        print(f"{min(step + 1, steps)} of {steps} steps  {text}", file=sys.stderr, flush=True)

    return Destination(show, lambda: None)


def tensorboard(config: RunConfig, folder: Path) -> Destination:
    """Write event files to ``tensorboard/`` in the run folder.

    One event per step: with an event per metric, as SummaryWriter writes them, a step would cost nine times as much.
    The first event of a process is a session's start, and TensorBoard forgets the steps of earlier files from there
    on: a resumed run repeats the steps after its checkpoint.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard.writer import FileWriter

    writer = FileWriter(str(folder / "tensorboard"))
    started = False

    def write(step: int, metrics: Metrics) -> None:
        nonlocal started
        if not started:
            writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)
            started = True
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        writer.add_summary(Summary(value=values), step)

    return Destination(write, writer.close)


def swanlab(config: RunConfig, folder: Path) -> Destination:
    """Log to SwanLab; offline it writes to ``swanlab/`` in the run folder."""
    import swanlab

    swanlab.init(
        project=config.tracking.project,
        experiment_name=config.name,
        config=msgspec.to_builtins(config),
        logdir=str(folder / "swanlab"),
        id=_run_id(folder / "swanlab"),
        resume="allow",
        mode="offline" if config.tracking.offline else "cloud",
    )
    return Destination(lambda step, metrics: swanlab.log(dict(metrics), step=step), swanlab.finish)


def wandb(config: RunConfig, folder: Path) -> Destination:
    """Log to Weights & Biases; offline it writes to ``wandb/`` in the run folder."""
    if config.tracking.offline:
        # W&B would send errors to its makers, in offline mode too.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    run = wandb.init(
        project=config.tracking.project,
        name=config.name,
        config=msgspec.to_builtins(config),
        dir=str(folder),
        id=_run_id(folder / "wandb"),
        resume="allow",
        mode="offline" if config.tracking.offline else "online",
    )
    return Destination(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


def mlflow(config: RunConfig, folder: Path) -> Destination:
    """Log to MLflow at MLFLOW_TRACKING_URI, or else to the database ``mlflow/mlflow.db`` in the run folder."""
    if config.tracking.offline:
        # MLflow would send telemetry to its makers, regardless of where the metrics go.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    known = folder / "mlflow" / _RUN_ID
    known.parent.mkdir(exist_ok=True)
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow' / 'mlflow.db').resolve()}")
    mlflow.set_experiment(config.tracking.project)
    if known.exists():
        mlflow.start_run(run_id=known.read_text())
    else:
        run = mlflow.start_run(run_name=config.name)
        replace_file(known, run.info.run_id.encode())

    def send(step: int, metrics: Metrics) -> None:
        mlflow.log_metrics({mlflow_name(key): value for key, value in metrics.items()}, step=step)

    return Destination(send, mlflow.end_run)


def _run_id(folder: Path) -> str:
    """Return the id under which a tracker knows the run: made once, and kept for a resumed run to go on with."""
    file = folder / _RUN_ID
    if not file.exists():
        folder.mkdir(exist_ok=True)
        replace_file(file, secrets.token_hex(8).encode())
    return file.read_text()


def mlflow_name(key: str) -> str:
    """Return the metric's name for MLflow, which refuses a whole step for one name with ``@``, as pass@k has it."""
    return re.sub(r"[^\w\-. ]", "_", key.replace("/", ".").replace("@", "_at_"))


TRACKERS: dict[TrackerName, Tracker] = {
    "console": console,
    "jsonl": jsonl,
    "tensorboard": tensorboard,
    "swanlab": swanlab,
    "wandb": wandb,
    "mlflow": mlflow,
}


class Tracking:
    """All configured trackers behind one interface, ``jsonl`` always among them."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Start the trackers. Raises ConfigError naming the one that cannot start and the package to install."""
        self._live: dict[str, Destination] = {}
        # The newest value of each metric.
        self.latest: Metrics = {}
        names: tuple[TrackerName, ...] = ("jsonl", *config.tracking.backends)
        for name in dict.fromkeys(names):
            try:
                self._live[name] = TRACKERS[name](config, folder)
            except ImportError as error:
                self.close()
                raise ConfigError(
                    f"tracking.backends: {name} is not installed; pip install 'rl-async[{name}]' ({error})"
                ) from error
            # Any exception of a third party at start means that it is misconfigured.
            except Exception as error:
                self.close()
                raise ConfigError(f"tracking.backends: {name} could not start: {error}") from error

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Send one step's metrics to all trackers; one other than jsonl that fails is dropped with a warning."""
        # A new object, since other threads read the old one.
        self.latest = {**self.latest, **metrics}
        for name, tracker in list(self._live.items()):
            self._guard(name, partial(tracker.log, step, metrics))

    def log_evaluation(self, step: int, metrics: Metrics) -> None:
        """Send the result of an evaluation that ended after the last step to all trackers but jsonl.

        ``metrics.jsonl`` has one object per trainer step; evaluations have ``evaluations.jsonl``.
        """
        for name, tracker in list(self._live.items()):
            if name != "jsonl":
                self._guard(name, partial(tracker.log, step, metrics))

    def close(self) -> None:
        """Flush and close all trackers; failures are only logged, except that of jsonl."""
        for name, tracker in list(self._live.items()):
            self._guard(name, tracker.close)

    def _guard(self, name: str, action: Callable[[], object]) -> None:
        if name == "jsonl":
            # This is the run's own record, and losing it is an error.
            action()
            return
        try:
            action()
        # A third party's failure must never end a run.
        except Exception as error:
            log.warning("tracker %s failed and is switched off: %s: %s", name, type(error).__name__, error)
            del self._live[name]
