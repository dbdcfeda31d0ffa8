"""The whole config, section by section. ``rl-async config explain KEY`` prints the descriptions.

All structs are frozen and refuse unknown keys. A value derived from several keys is computed in ``configs/derived`` or
``launcher/plan``, never written back here.
"""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.base import Config, Count, Positive, Seconds, doc
from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.finetune import FinetuneConfig, WarmStartConfig
from rl_async.configs.schema.queue import QueueConfig
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import AgentConfig, RolloutConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.configs.schema.weight_sync import WeightSyncConfig


class EvalConfig(Config, frozen=True):
    every: Annotated[Count, doc("Steps between evaluations on the held-out tasks; 0: only at the end.")] = 10
    tasks: Annotated[Positive, doc("Held-out tasks used, from the top of the file.")] = 64
    samples: Annotated[Positive, doc("Trajectories per held-out task.")] = 1
    temperature: Annotated[float, Meta(ge=0, description="0: greedy.")] = 0.0


TrackerName = Literal["console", "jsonl", "tensorboard", "swanlab", "wandb", "mlflow"]


class TrackingConfig(Config, frozen=True):
    backends: Annotated[tuple[TrackerName, ...], doc("Where metrics go; metrics.jsonl is always written.")] = ()
    project: Annotated[str, doc("Project name for trackers that have one.")] = "rl-async"
    offline: Annotated[bool, doc("Keep swanlab and wandb on this machine.")] = True


class LauncherConfig(Config, frozen=True):
    run_dir: Annotated[str, doc("Folder of all runs.")] = "runs"
    max_restarts: Annotated[Count, doc("Restarts per process before the run fails.")] = 3
    threads: Annotated[Positive, doc("Torch threads per process on CPU.")] = 1
    stop_timeout_s: Annotated[
        Seconds,
        doc(
            "Processes get this long to end before they are killed. The trainer ends its step and saves in four fifths "
            "of it; one that is killed goes on from its last checkpoint."
        ),
    ] = 15.0


class DebugConfig(Config, frozen=True):
    """Slows parts of a run down; only for benchmarks and tests of how stages overlap."""

    min_train_s: Annotated[float, Meta(ge=0, description="A training step lasts at least this long.")] = 0.0
    min_iteration_s: Annotated[
        float, Meta(ge=0, description="Embedded engine: a decode iteration lasts at least this long.")
    ] = 0.0


class RunConfig(Config, frozen=True):
    """The whole run. ``mode`` and ``name`` come from the command line."""

    model: ModelConfig
    data: DataConfig
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    queue: QueueConfig = QueueConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: Annotated[CriticConfig | None, doc("Model of the expected return, for algorithm.advantage=gae.")] = None
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    warm_start: Annotated[WarmStartConfig | None, doc("Warm start that makes model.path if it is missing.")] = None
    finetune: Annotated[FinetuneConfig | None, doc("What `rl-async sft` trains model.path on, instead of tasks.")] = (
        None
    )
    launcher: LauncherConfig = LauncherConfig()
    debug: DebugConfig = DebugConfig()
    mode: Annotated[Literal["colocated", "disaggregated"], doc("Given by --mode.")] = "disaggregated"
    name: Annotated[str, doc("The run's folder below launcher.run_dir; given by --name.")] = ""
    seed: Annotated[int, doc("Seed of data order, sampling and training.")] = 0
