"""Where metrics go. A tracker that cannot start stops the run; one that fails later is reported once and dropped."""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.files import append_lines

log = logging.getLogger("rl_async.trackers")
Metrics = Mapping[str, float]


class Tracker(Protocol):
    """One destination of metrics."""

    def start(self, config: RunConfig, folder: Path) -> None:
        """Open the destination. Raises ConfigError if it is not installed or misconfigured."""
        ...

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one trainer step; ``step`` never decreases."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class JsonlTracker:
    """``metrics.jsonl`` in the run folder: one object per step. Always on."""

    def start(self, config: RunConfig, folder: Path) -> None:
        self._file = append_lines(folder / "metrics.jsonl")

    def log(self, step: int, metrics: Metrics) -> None:
        self._file.write(msgspec.json.encode(dict(metrics)) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ConsoleTracker:
    """One line per step on standard error."""

    SHOWN = ("reward/mean", "staleness/max", "time/step_s", "loss/grad_norm", "eval/step", "eval/reward")

    def start(self, config: RunConfig, folder: Path) -> None:
        self._steps = config.trainer.steps

    def log(self, step: int, metrics: Metrics) -> None:
        text = "  ".join(f"{key} {metrics[key]:.3f}" for key in self.SHOWN if key in metrics)
        print(f"step {min(step + 1, self._steps)}/{self._steps}  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardTracker:
    """Event files in ``tensorboard/`` of the run folder."""

    def start(self, config: RunConfig, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class SwanLabTracker:
    """SwanLab; offline it writes to ``swanlab/`` of the run folder."""

    def start(self, config: RunConfig, folder: Path) -> None:
        import swanlab

        self._swanlab = swanlab
        swanlab.init(
            project=config.tracking.project,
            experiment_name=config.name,
            config=msgspec.to_builtins(config),
            logdir=str(folder / "swanlab"),
            mode="offline" if config.tracking.offline else "cloud",
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class WandbTracker:
    """Weights & Biases; offline it writes to ``wandb/`` of the run folder."""

    def start(self, config: RunConfig, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=config.tracking.project,
            name=config.name,
            config=msgspec.to_builtins(config),
            dir=str(folder),
            mode="offline" if config.tracking.offline else "online",
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI, else ``mlflow/`` of the run folder."""

    def start(self, config: RunConfig, folder: Path) -> None:
        import os

        import mlflow

        self._mlflow = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri((folder / "mlflow").resolve().as_uri())
        mlflow.set_experiment(config.tracking.project)
        mlflow.start_run(run_name=config.name)

    def log(self, step: int, metrics: Metrics) -> None:
        self._mlflow.log_metrics({key.replace("/", "."): value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "console": ConsoleTracker,
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "swanlab": SwanLabTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


class Tracking:
    """All chosen trackers as one, ``jsonl`` among them."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Start the trackers. Raises ConfigError naming the one that cannot start and what to install."""
        self._live: dict[str, Tracker] = {}
        for name in dict.fromkeys(("jsonl", *config.tracking.backends)):
            tracker = TRACKERS[name]()
            try:
                tracker.start(config, folder)
            except ImportError as error:
                self.close()
                raise ConfigError(
                    f"tracking.backends: {name} is not installed; pip install 'rl-async[{name}]' ({error})"
                ) from error
            except Exception as error:  # whatever a third party raises at start means: misconfigured
                self.close()
                raise ConfigError(f"tracking.backends: {name} could not start: {error}") from error
            self._live[name] = tracker

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Send one step's metrics everywhere; a tracker other than jsonl that fails is dropped with a warning."""
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
        """Close all trackers."""
        for name, tracker in list(self._live.items()):
            self._guard(name, tracker.close)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        if name == "jsonl":
            action()  # the run's own record: losing it is an error
            return
        try:
            action()
        except Exception as error:  # a third party's failure must never end a run
            log.warning("tracker %s failed and is switched off: %s: %s", name, type(error).__name__, error)
            del self._live[name]
