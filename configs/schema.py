"""Every config struct, with each key's meaning. ``rl-async config explain KEY`` prints these descriptions.

All structs are frozen and refuse unknown keys. A value derived from several keys is computed in ``launcher/plan.py``,
never written back here.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: frozen, keyword-only, unknown keys refused."""


class ModelConfig(Config, frozen=True):
    path: Annotated[
        str, _doc("Folder of a Hugging Face causal LM with its tokenizer; `sft` makes it if it is missing.")
    ]
    dtype: Annotated[Literal["float32", "bfloat16"], _doc("Type of the weights in trainer and engines.")] = "float32"
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("auto: cuda if there is one.")] = "auto"


class DataSource(Config, frozen=True):
    path: Annotated[str, _doc("Parquet or JSONL in verl's columns, or reasoning_gym:NAME.")]
    weight: Annotated[float, Meta(gt=0, description="Share of the tasks drawn from this source.")] = 1.0


class DataConfig(Config, frozen=True):
    path: Annotated[
        str | tuple[DataSource, ...],
        _doc("Training tasks: Parquet or JSONL in verl's columns, reasoning_gym:NAME, or a list of {path, weight}."),
    ]
    eval_path: Annotated[str | None, _doc("Held-out tasks; null: no evaluation.")] = None
    make: Annotated[
        Literal["calculator", "shop", "sort"] | None, _doc("Generator that writes path and eval_path if missing.")
    ] = None
    train_batch_groups: Annotated[Positive, _doc("Groups (tasks) per trainer step.")] = 24
    shuffle: Annotated[bool, _doc("Shuffle with the run's seed, differently in each epoch.")] = True
    max_prompt_tokens: Annotated[Positive, _doc("Longer prompts are refused, naming the row.")] = 1024


class AgentConfig(Config, frozen=True):
    loop: Annotated[str, _doc("single_turn, tool_agent, or your own as path.py:name; a row's agent_name wins.")] = (
        "single_turn"
    )
    tools: Annotated[tuple[str, ...], _doc("Built-in tool names, or typed functions as path.py:name.")] = ()
    environment: Annotated[
        str | None, _doc("Built-in environment, or your own as path.py:name; lives one episode.")
    ] = None
    max_turns: Annotated[Positive, _doc("Assistant turns per episode.")] = 4
    max_tokens: Annotated[Positive, _doc("Tokens per episode, prompt and tool results included.")] = 256
    max_parallel_calls: Annotated[Positive, _doc("Tool calls executed per turn; further ones get an error.")] = 4
    tool_timeout_s: Annotated[Seconds, _doc("Deadline of one tool call.")] = 10.0
    tool_response_tokens: Annotated[Positive, _doc("Longer tool results are cut.")] = 128
    workers: Annotated[Positive, _doc("Agent worker processes.")] = 1
    concurrency: Annotated[Positive, _doc("Conversations at once per worker.")] = 256
    check_rendering: Annotated[
        Fraction, _doc("Share of episodes whose tokens are compared with the full chat template.")
    ] = 0.02


class RolloutConfig(Config, frozen=True):
    engine: Annotated[Literal["embedded", "vllm", "sglang"], _doc("Kind of rollout engine.")] = "embedded"
    engines: Annotated[Positive, _doc("Engine processes.")] = 1
    group_size: Annotated[Positive, _doc("Trajectories sampled per task.")] = 16
    temperature: Annotated[float, Meta(gt=0, description="Sampling temperature for training.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus; below 1 is refused for training.")] = 1.0
    top_k: Annotated[Count, _doc("0: off; a truncating sampler is refused for training.")] = 0
    max_tokens: Annotated[Positive, _doc("Sampled tokens per turn.")] = 64
    max_batch_size: Annotated[Positive, _doc("Sequences decoded at once per engine.")] = 256
    max_model_len: Annotated[Positive, _doc("Longest sequence that an engine accepts, in tokens.")] = 256
    request_timeout_s: Annotated[Seconds, _doc("Deadline of one generate request.")] = 120.0
    start_timeout_s: Annotated[Seconds, _doc("Deadline for an engine to answer its health probe.")] = 120.0
    sleep_s: Annotated[
        float, Meta(ge=0, description="Embedded engine: added to each decode iteration; for benchmarks of overlap.")
    ] = 0.0
    port: Annotated[Count, _doc("First engine's port, the others follow; 0: free ports.")] = 0


class RewardTerm(Config, frozen=True):
    name: Annotated[str, _doc("exact_answer, math, reasoning_gym, or your own as path.py:name.")]
    weight: Annotated[float, _doc("Factor of this part in the reward.")] = 1.0


class RewardConfig(Config, frozen=True):
    functions: Annotated[tuple[RewardTerm, ...], _doc("The reward is the weighted sum of these.")] = (
        RewardTerm(name="exact_answer"),
    )
    timeout_s: Annotated[Seconds, _doc("Deadline of one scorer; beyond it the trajectory is marked.")] = 10.0
    processes: Annotated[Positive, _doc("Processes for blocking scorers, per worker.")] = 1
    max_concurrent: Annotated[Positive, _doc("Scorings at once, per worker.")] = 64
    per_minute: Annotated[Count, _doc("Scorings started per minute and worker; 0: no limit.")] = 0


class QueueConfig(Config, frozen=True):
    max_staleness: Annotated[
        Count, _doc("Bound on the staleness of any trained token, in steps. 0: on-policy, 1: one-step-off-policy.")
    ] = 1
    journal: Annotated[Literal["memory", "sqlite", "redis"], _doc("Where state transitions are recorded.")] = "memory"
    on_straggler: Annotated[
        Literal["wait", "drop", "mask"],
        _doc("When passing an unfinished group would break the bound: wait for it, drop it, or mask its stale tokens."),
    ] = "wait"
    lease_s: Annotated[Seconds, _doc("A worker silent for this long loses its leases.")] = 15.0
    max_attempts: Annotated[Positive, _doc("A group failing this often is dead-lettered with its error.")] = 3
    max_bytes: Annotated[
        Positive,
        _doc(
            "Payload bytes held: of unfinished groups, and of those trained since the last checkpoint. Beyond it, "
            "groups are admitted only for the next batch (counted as queue/short_of_bytes)."
        ),
    ] = 1 << 30
    port: Annotated[Count, _doc("0: a free port.")] = 0


class AlgorithmConfig(Config, frozen=True):
    advantage: Annotated[Literal["grpo"], _doc("Advantage estimator.")] = "grpo"
    loss: Annotated[Literal["ppo", "reinforce"], _doc("ppo: clipped ratio; reinforce: -A log p, no ratio.")] = "ppo"
    correction: Annotated[
        Literal["decoupled_token_is", "bypass_ppo_clip", "disabled"],
        _doc(
            "Off-policy correction. decoupled_token_is: clip around recomputed old log-probabilities, token weights "
            "min(pi_old/pi_rollout, cap); bypass_ppo_clip: clip around the rollout's own log-probabilities; disabled: "
            "recomputed old log-probabilities, no weights."
        ),
    ] = "decoupled_token_is"
    importance_cap: Annotated[float, Meta(gt=0, description="Cap of the token importance weights (TIS).")] = 2.0
    clip_low: Annotated[float, Meta(gt=0, le=1, description="Ratio is clipped below 1 - clip_low.")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="Ratio is clipped above 1 + clip_high.")] = 0.28
    kl_coef: Annotated[float, Meta(ge=0, description="Weight of the k3 KL to the reference; 0: no reference.")] = 0.0
    reference_path: Annotated[str | None, _doc("Reference model; null: model.path.")] = None


class TrainerConfig(Config, frozen=True):
    backend: Annotated[Literal["fsdp2", "megatron"], _doc("Training backend.")] = "fsdp2"
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-6
    steps: Annotated[Positive, _doc("Trainer steps in the run.")] = 100
    ranks: Annotated[Positive, _doc("Trainer processes.")] = 1
    tensor_parallel: Annotated[Positive, _doc("Tensor-parallel size; above 1 needs the megatron backend.")] = 1
    minibatches: Annotated[Positive, _doc("Optimizer steps per trainer step.")] = 2
    max_tokens_per_microbatch: Annotated[Positive, _doc("Padded tokens per forward pass.")] = 16384
    grad_clip: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this.")] = 1.0
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay.")] = 0.0
    beta1: Annotated[Fraction, _doc("AdamW beta1.")] = 0.9
    beta2: Annotated[Fraction, _doc("AdamW beta2.")] = 0.95
    schedule: Annotated[Literal["constant", "linear", "cosine"], _doc("After warm-up; falls to 0 at the end.")] = (
        "constant"
    )
    warmup_steps: Annotated[Count, _doc("Optimizer steps of linear warm-up.")] = 0
    checkpoint_every: Annotated[
        Count,
        _doc(
            "Steps between checkpoints; 0: only at the end. One is written out of turn when the trajectories trained "
            "since the last, which the queue keeps for a restart, fill half of queue.max_bytes."
        ),
    ] = 10
    keep_checkpoints: Annotated[Positive, _doc("Older checkpoints are deleted.")] = 2
    batch_timeout_s: Annotated[Seconds, _doc("A batch that takes longer ends the run, naming what is missing.")] = 300.0
    min_train_s: Annotated[
        float, Meta(ge=0, description="Training of a step is stretched to this; for benchmarks of overlap.")
    ] = 0.0


class WeightSyncConfig(Config, frozen=True):
    transport: Annotated[
        Literal["auto", "gloo", "ipc", "nccl", "disk"],
        _doc("auto: ipc when colocated, else gloo."),
    ] = "auto"
    bucket_mb: Annotated[float, Meta(gt=0, description="Size of a bucket in MiB.")] = 64.0
    timeout_s: Annotated[Seconds, _doc("Deadline of one engine's update; beyond it the engine is cut off.")] = 60.0
    every: Annotated[Positive, _doc("Publish every this many steps; at most max_staleness + 1.")] = 1


class EvalConfig(Config, frozen=True):
    every: Annotated[Count, _doc("Steps between evaluations on the held-out tasks; 0: only at the end.")] = 10
    tasks: Annotated[Positive, _doc("Held-out tasks used, from the top of the file.")] = 64
    samples: Annotated[Positive, _doc("Trajectories per held-out task.")] = 1
    temperature: Annotated[float, Meta(ge=0, description="0: greedy.")] = 0.0


TrackerName = Literal["console", "jsonl", "tensorboard", "swanlab", "wandb", "mlflow"]


class TrackingConfig(Config, frozen=True):
    backends: Annotated[tuple[TrackerName, ...], _doc("Where metrics go; metrics.jsonl is always written.")] = ()
    project: Annotated[str, _doc("Project name for trackers that have one.")] = "rl-async"
    offline: Annotated[bool, _doc("Keep swanlab and wandb on this machine.")] = True


class SftConfig(Config, frozen=True):
    demos_path: Annotated[str, _doc("Demonstrations: a `messages` column of chat messages.")]
    learning_rate: Annotated[float, Meta(gt=0, description="AdamW, constant after 30 steps of warm-up.")] = 3e-3
    batch_size: Annotated[Positive, _doc("Demonstrations per step.")] = 48
    max_steps: Annotated[Positive, _doc("Give up after this many steps.")] = 1500
    min_steps: Annotated[Count, _doc("No check before this many steps.")] = 200
    check_every: Annotated[Positive, _doc("Steps between greedy checks.")] = 50
    gate: Annotated[Fraction, _doc("Stop when greedy reward on held-out tasks reaches this.")] = 0.9
    gate_tasks: Annotated[Positive, _doc("Held-out tasks per check.")] = 64
    hidden_size: Annotated[Positive, _doc("Width of the tiny model.")] = 64
    layers: Annotated[Positive, _doc("Layers of the tiny model.")] = 2
    vocab_size: Annotated[Positive, _doc("Largest size of the tokenizer trained on the demonstrations.")] = 200
    seed: Annotated[int, _doc("Seed of the tiny model and of the demonstrations' order.")] = 0


class LauncherConfig(Config, frozen=True):
    run_dir: Annotated[str, _doc("Folder of all runs.")] = "runs"
    max_restarts: Annotated[Count, _doc("Restarts per process before the run fails.")] = 3
    threads: Annotated[Positive, _doc("Torch threads per process on CPU.")] = 1
    stop_timeout_s: Annotated[Seconds, _doc("Processes get this long to end before they are killed.")] = 15.0


class RunConfig(Config, frozen=True):
    """The whole run. ``mode`` and ``name`` come from the command line."""

    model: ModelConfig
    data: DataConfig
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    queue: QueueConfig = QueueConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    sft: Annotated[SftConfig | None, _doc("Warm start that makes model.path if it is missing.")] = None
    launcher: LauncherConfig = LauncherConfig()
    mode: Annotated[Literal["colocated", "disaggregated"], _doc("Given by --mode.")] = "disaggregated"
    name: Annotated[str, _doc("The run's folder below launcher.run_dir; given by --name.")] = ""
    seed: Annotated[int, _doc("Seed of data order, sampling and training.")] = 0
