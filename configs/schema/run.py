"""The whole config, section by section. ``rl-async config explain KEY`` prints the descriptions.

All structs are frozen and refuse unknown keys. A value derived from several keys is computed in ``configs/derived`` or
``launcher/plan``, never written back here.
"""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.schema import Config, Count, Fraction, Positive, Seconds, doc
from rl_async.configs.schema.algorithm import AlgorithmConfig, CriticConfig
from rl_async.configs.schema.data import DataConfig, FinetuneConfig, ModelConfig, WarmStartConfig
from rl_async.configs.schema.reward import RewardConfig, SandboxConfig
from rl_async.configs.schema.rollout import AgentConfig, EndpointConfig, RolloutConfig
from rl_async.configs.schema.trainer import TrainerConfig, WeightSyncConfig


class SqliteConfig(Config, frozen=True):
    """The journal in files."""

    folder: Annotated[
        str,
        doc(
            "Folder of the journal, under the run's name; empty: the run folder. On a disk of the "
            "queue's host, since file systems that hosts share (NFS, Lustre, ...) are refused."
        ),
    ] = ""
    synchronous: Annotated[
        Literal["normal", "full", "off"],
        doc(
            "normal: whatever was acknowledged survives a crash of the queue; a power cut may lose the last moments. "
            "full: it survives both, and each flush waits for the disk. off: a power cut may corrupt the whole file."
        ),
    ] = "normal"


class RedisConfig(Config, frozen=True):
    """The journal on a server."""

    url: Annotated[
        str, doc("Server that keeps the journal; a password comes from the variable RL_ASYNC_REDIS_PASSWORD.")
    ] = "redis://127.0.0.1:6379/0"
    replicas: Annotated[
        Count,
        doc(
            "Replicas of that server that must have what is acknowledged (Redis' WAIT). With 0, promoting a replica "
            "may lose the last moments; the queue notices and ends, and --resume continues from the checkpoint."
        ),
    ] = 0


class QueueConfig(Config, frozen=True):
    max_staleness: Annotated[
        Count, doc("Bound on the staleness of any trained token, in steps. 0: on-policy, 1: one-step-off-policy.")
    ] = 1
    journal: Annotated[
        Literal["memory", "sqlite", "redis"],
        doc(
            "Where the queue's state is recorded: nowhere, in the run folder, or on a Redis server. With sqlite and "
            "redis, a queue that was killed is restarted and the run goes on (docs/explanation/transfer_queue.md)."
        ),
    ] = "sqlite"
    sqlite: Annotated[SqliteConfig | None, doc("Of journal=sqlite; null: the defaults.")] = None
    redis: Annotated[RedisConfig | None, doc("Of journal=redis; null: the defaults.")] = None
    on_straggler: Annotated[
        Literal["wait", "drop", "mask"],
        doc("When passing an unfinished group would break the bound: wait for it, drop it, or mask its stale tokens."),
    ] = "wait"
    sampling: Annotated[
        Literal["fifo", "freshest", "priority", "quota"],
        doc(
            "Which ready groups a batch takes, after those that the staleness bound forces: the oldest, the newest, "
            "those of the highest priority (column priority of the data), or each data set's share of data.path. All "
            "but fifo need a max_staleness of at least 2."
        ),
    ] = "fifo"
    window: Annotated[
        Count,
        doc(
            "A batch is taken from the oldest this many groups, and waits for unfinished ones among them instead of "
            "passing them over. At least data.train_batch_groups; 0: whatever is ready, within the bound."
        ),
    ] = 0
    lease_s: Annotated[Seconds, doc("A worker that is silent for this long loses its leases.")] = 15.0
    max_attempts: Annotated[Positive, doc("A group that fails this often is dead-lettered with its error.")] = 3
    max_bytes: Annotated[
        Positive,
        doc(
            "Payload bytes held: of unfinished groups, and of those trained since the last checkpoint. Beyond it, "
            "groups are admitted only for the next batch (counted as queue/short_of_bytes)."
        ),
    ] = 1 << 30
    host: Annotated[
        str,
        doc(
            "IPv4 address to listen on; 0.0.0.0: all. On loopback, socket files that only this user can open take the "
            "place of an address, unless queue.curve=always."
        ),
    ] = "127.0.0.1"
    port: Annotated[Count, doc("0: a free port.")] = 0
    curve: Annotated[
        Literal["auto", "always"],
        doc(
            "Clients always need a key. auto: connections are encrypted if queue.host is not loopback; always: on "
            "loopback too, for clients that cannot open this machine's socket files, as in another container."
        ),
    ] = "auto"
    keys: Annotated[
        str, doc("Folder made by `rl-async queue keygen`. Empty: keys/ in the run folder, made when the run starts.")
    ] = ""
    shards: Annotated[
        Count,
        doc(
            "Processes that keep the payloads, so that these pass through no other process; 0: the queue keeps them. "
            "Trajectories of a lost shard are read from a replica or generated again."
        ),
    ] = 0
    replicas: Annotated[
        Positive, doc("Shards that keep each payload; with 2, one shard may be lost without losing data.")
    ] = 1


class EvalConfig(Config, frozen=True):
    every: Annotated[Count, doc("Steps between evaluations on the held-out tasks; 0: only at the end.")] = 10
    before: Annotated[bool, doc("Also evaluate the initial weights, while the first batch is sampled.")] = False
    tasks: Annotated[Positive, doc("Held-out tasks used, from the start of the file.")] = 64
    samples: Annotated[Positive, doc("Trajectories per held-out task.")] = 1
    temperature: Annotated[float, Meta(ge=0, description="0: greedy.")] = 0.0
    solved: Annotated[float, doc("Reward from which on an episode counts as passed, for pass@k.")] = 1.0
    endpoint: Annotated[
        EndpointConfig | None,
        doc(
            "What `rl-async eval` evaluates instead of model.path: a model behind a URL. See docs/how-to/evaluation.md."
        ),
    ] = None


TrackerName = Literal["console", "jsonl", "tensorboard", "swanlab", "wandb", "mlflow"]


class TrackingConfig(Config, frozen=True):
    backends: Annotated[
        tuple[TrackerName, ...], doc("Trackers that metrics go to; metrics.jsonl is always written.")
    ] = ()
    project: Annotated[str, doc("Project name for trackers that have one.")] = "rl-async"
    offline: Annotated[
        bool,
        doc("Record swanlab and wandb runs on this machine only; wandb and mlflow report nothing to their makers."),
    ] = True
    view: Annotated[bool, doc("Serve the page of rl-async view while the run trains; prints its address.")] = False
    otlp_endpoint: Annotated[
        str,
        doc("OTLP/HTTP collector that gets a trace of each episode; empty: OTEL_EXPORTER_OTLP_ENDPOINT, if it is set."),
    ] = ""
    traces_per_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        doc(
            "Episodes of the whole run that get a trace, per second on average, with 60 s' worth at once; null: all. "
            "The others have no span in any process. docs/how-to/telemetry.md."
        ),
    ] = 2.0
    prometheus: Annotated[
        bool,
        doc(
            "Every process answers Prometheus on a port of its own, on loopback; RUN/prometheus/*.json say where, and "
            "RUN/keys/metrics.token opens it. docs/how-to/telemetry.md."
        ),
    ] = False


class LauncherConfig(Config, frozen=True):
    run_dir: Annotated[str, doc("Folder that holds all runs.")] = "runs"
    max_restarts: Annotated[
        Count,
        doc(
            "Restarts per process; forgiven after six hours of health. Beyond them the run goes on with the other "
            "engines or workers; without others, and for any other process, it fails."
        ),
    ] = 3
    threads: Annotated[
        Positive | None,
        doc("Torch threads per process on CPU; unset: the cores divided among engines and ranks that compute at once."),
    ] = None
    device_memory: Annotated[
        Fraction,
        doc("Share of a GPU's memory that the run may plan with, or without GPUs of the machine's; the rest is slack."),
    ] = 0.9
    http_hosts: Annotated[
        tuple[str, ...],
        doc("Host names by which others call the run's HTTP servers; by default only their addresses are accepted."),
    ] = ()
    stop_timeout_s: Annotated[
        Seconds,
        doc(
            "Processes get this long to end before they are killed. A trainer that is asked to stop (Ctrl-C, SIGTERM) "
            "gets as long as its step and a checkpoint take; when another process failed, four fifths of this time."
        ),
    ] = 15.0


class DebugConfig(Config, frozen=True):
    """Slows stages of a run down, for benchmarks and tests of how they overlap."""

    min_train_s: Annotated[float, Meta(ge=0, description="A training step lasts at least this long.")] = 0.0
    min_iteration_s: Annotated[
        float, Meta(ge=0, description="Embedded engine: a decode iteration lasts at least this long.")
    ] = 0.0


class RunConfig(Config, frozen=True):
    """The whole config of a run. ``mode`` and ``name`` come from the command line."""

    model: ModelConfig
    data: DataConfig
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    sandbox: Annotated[
        SandboxConfig | None, doc("Where programs that models write run; null: bubblewrap, with the defaults.")
    ] = None
    reward: RewardConfig = RewardConfig()
    queue: QueueConfig = QueueConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: Annotated[
        CriticConfig | None,
        doc("Model of the expected return (algorithm.advantage=gae), or of tokens' rewards (prime)."),
    ] = None
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    warm_start: Annotated[WarmStartConfig | None, doc("Makes the model at warm_start.out if it is missing.")] = None
    finetune: Annotated[FinetuneConfig | None, doc("Supervised fine-tuning of model.path by `rl-async sft`.")] = None
    launcher: LauncherConfig = LauncherConfig()
    debug: Annotated[DebugConfig | None, doc("Slows stages down, for benchmarks and tests.")] = None
    mode: Annotated[
        Literal["colocated", "disaggregated"], doc("Whether engines and trainer share devices; given by --mode.")
    ] = "disaggregated"
    name: Annotated[str, doc("Name of the run's folder in launcher.run_dir; given by --name.")] = ""
    seed: Annotated[int, doc("Seed of data order, sampling and training.")] = 0
