"""Sections `trainer` and `weight_sync`: how the policy is trained and on how many ranks, and how engines get it."""

import math
from typing import Annotated, Literal, get_args

from msgspec import Meta

from rl_async.configs.schema import Config, Count, Fraction, Positive, Seconds, doc


class LoraConfig(Config, frozen=True):
    """Low-rank adapters that are trained in place of whole weights."""

    rank: Annotated[Positive, doc("Rank of each adapter's two matrices.")] = 16
    alpha: Annotated[Positive, doc("LoRA scaling: the update B·A is multiplied by alpha / rank.")] = 32
    rank_stabilized: Annotated[
        bool, doc("rsLoRA (arXiv:2312.03732): the update is multiplied by alpha / sqrt(rank) instead.")
    ] = False
    targets: Annotated[
        tuple[str, ...], doc("Names of the linear layers with an adapter, such as q_proj; empty: all in the decoder.")
    ] = ()

    @property
    def scale(self) -> float:
        """The factor of the update B·A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class ProfileConfig(Config, frozen=True):
    steps: Annotated[
        tuple[Count, ...],
        doc(
            "Steps, from 0, that every rank records with torch.profiler into RUN/profiles, on GPUs with allocations. "
            "`rl-async profile RUN` asks for the next step of a live run."
        ),
    ] = ()


class TrainerConfig(Config, frozen=True):
    backend: Annotated[Literal["fsdp2", "megatron"], doc("Training backend.")] = "fsdp2"
    optimizer: Annotated[
        Literal["adamw", "muon", "adamw_8bit"],
        doc(
            "fsdp2, not with trainer.cpu_offload. muon: Muon for the matrices of the decoder's layers, with steps of "
            "the size of AdamW's, which trains the rest; not with trainer.lora. adamw_8bit: AdamW with the moments of "
            "matrices in 8 bits; needs torchao."
        ),
    ] = "adamw"
    learning_rate: Annotated[float, Meta(gt=0, description="Peak learning rate.")] = 1e-6
    vision_learning_rate: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        doc(
            "fsdp2: peak learning rate of a vision-language model's vision tower and its projector; 0 freezes them; "
            "null: trainer.learning_rate, and frozen with trainer.lora."
        ),
    ] = None
    steps: Annotated[Positive, doc("Trainer steps in the run.")] = 100
    ranks: Annotated[Positive, doc("Trainer processes.")] = 1
    tensor_parallel: Annotated[
        Positive, doc("Ranks that share each layer; above 1 needs the megatron backend, as do the next three.")
    ] = 1
    pipeline_parallel: Annotated[Positive, doc("Stages among which the layers are divided.")] = 1
    virtual_pipeline: Annotated[Positive, doc("Interleaved model chunks per pipeline stage.")] = 1
    expert_parallel: Annotated[
        Positive, doc("Ranks of a pipeline stage among which each layer's experts are divided.")
    ] = 1
    minibatches: Annotated[Positive, doc("Optimizer steps per pass over a batch.")] = 2
    epochs: Annotated[
        Positive, doc("Passes over each batch; old log-probabilities are computed once, before the first.")
    ] = 1
    max_tokens_per_microbatch: Annotated[
        Positive, doc("Tokens per forward pass; shared prompts count once, and padding where rows cannot be packed.")
    ] = 16384
    activation_checkpointing: Annotated[
        bool | Literal["selective"],
        doc(
            "fsdp2. true: layers keep only their input for the backward pass and recompute the rest. selective: they "
            "also keep their products with weights and their attention."
        ),
    ] = False
    cpu_offload: Annotated[
        bool,
        doc("fsdp2 on GPUs: weights and optimizer stay in host memory, where AdamW runs; layers are copied as needed."),
    ] = False
    lend_devices: Annotated[
        bool,
        doc(
            "disaggregated: while the trainer waits for a batch, further engines run on its devices, as many as fit "
            "(docs/how-to/memory.md)."
        ),
    ] = False
    replicas: Annotated[
        Positive, doc("fsdp2: copies of the model, each sharded over trainer.ranks / replicas ranks (HSDP).")
    ] = 1
    sequence_parallel: Annotated[
        Positive, doc("Ranks that share each packed row, exchanging tokens for heads around attention (Ulysses).")
    ] = 1
    kernels: Annotated[
        Literal["torch", "compile", "liger"],
        doc(
            "fsdp2. compile: torch.compile of every layer; the first step takes minutes, and on a CPU it needs a C++ "
            "compiler. liger, on GPUs: Liger's kernels for norms, rotary embedding and gated MLPs."
        ),
    ] = "torch"
    router_replay: Annotated[
        Literal["auto", "always", "never"],
        doc(
            "Mixtures of experts: train tokens through the experts that the engine chose for them (R3); auto: where "
            "engine and trainer can, else with a warning; always: refuse to start where they cannot."
        ),
    ] = "auto"
    lora: Annotated[
        LoraConfig | None, doc("fsdp2: train only low-rank adapters; needs PEFT. See weight_sync.adapters.")
    ] = None
    grad_clip: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this.")] = 1.0
    weight_decay: Annotated[float, Meta(ge=0, description="Decoupled weight decay.")] = 0.0
    beta2: Annotated[Fraction, doc("AdamW beta2; beta1 is 0.9.")] = 0.95
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        doc("Learning rate after warm-up; linear and cosine fall to 0 at the end."),
    ] = "constant"
    warmup_steps: Annotated[Count, doc("Optimizer steps of linear warm-up.")] = 0
    checkpoint_every: Annotated[
        Count,
        doc(
            "Steps between checkpoints; 0: only at the end. An extra one is written when the trajectories trained "
            "since the last, which the queue keeps for a restart, fill half of queue.max_bytes."
        ),
    ] = 10
    keep_checkpoints: Annotated[Positive, doc("Checkpoints kept; older ones are deleted.")] = 2
    keep_trajectories: Annotated[
        Positive | None,
        doc(
            "Newest steps whose trained trajectories are kept in trajectories/; older files are deleted, and these "
            "steps can no longer be shown or replayed. null: all. The audit needs none of them."
        ),
    ] = None
    checkpoint_hf: Annotated[
        bool,
        doc("Checkpoints also hold the model as Hugging Face safetensors; otherwise `rl-async export` makes them."),
    ] = True
    profile: Annotated[ProfileConfig | None, doc("Steps that torch.profiler records; null: none.")] = None
    loop: Annotated[
        str,
        doc(
            "A training loop of your own in place of trainer/train.py's, as path.py:name, a function of the trainer's "
            "Run (examples/own_loop.py); empty: none."
        ),
    ] = ""
    batch_timeout_s: Annotated[
        Seconds,
        doc(
            "Deadline for a batch; beyond it the run ends and names what is missing. An evaluation ends so once no "
            "further task of it was finished for this long."
        ),
    ] = 300.0
    collective_timeout_s: Annotated[
        Seconds, doc("A rank that waits longer for the others exits, and the run restarts from the last checkpoint.")
    ] = 600.0


class MismatchConfig(Config, frozen=True):
    """Checks that engines sample from the published weights: each samples a few tokens, and the trainer computes their
    log-probabilities."""

    action: Annotated[
        Literal["off", "warn", "stop", "resync"],
        doc(
            "Beyond the limit: log a warning, end the run, or send the weights again and end the run if that fails too."
        ),
    ] = "warn"
    limit: Annotated[
        float, Meta(gt=0, description="Largest mean of |log pi(trainer) - log pi(engine)| over an engine's tokens.")
    ] = 0.05
    every: Annotated[
        Positive,
        doc("Compare after the first and then after every this many publications; the trainer waits meanwhile."),
    ] = 5


# What a bucket holds on the host, where a larger one is no faster.
SMALL_BUCKET = 64 << 20
Transport = Literal["nearest", "gloo", "ipc", "disk", "nccl"]
WayOption = Literal["staged", "delta", "waves"]
Way = Literal["auto", Transport, WayOption]


class WeightSyncConfig(Config, frozen=True):
    way: Annotated[
        Way | tuple[Way, ...],
        doc(
            "How weights travel. auto: as the launcher finds best and prints (docs/explanation/weights.md). Or one of "
            "ipc, nearest (shared memory if all engines are on the trainer's machine, else gloo), gloo, disk "
            "(files in weight_sync.folder), nccl (GPU to GPU, never run yet), and any of staged (engines decode while "
            "they receive), delta (only what changed; both: engines keep a host copy), waves (engines in two groups, "
            "one after the other)."
        ),
    ] = "auto"
    folder: Annotated[str, doc("disk: folder shared by trainer and engines; empty: weights/ in the run folder.")] = ""
    adapters: Annotated[
        Literal["auto", "load", "add", "merge"],
        doc(
            "With trainer.lora. load: engines read the base from model.path and compute adapters beside it; only "
            "adapters travel. add: only adapters travel, too; engines add them to a host copy of the base. merge: "
            "merged weights travel. auto: load where all engines can, else merge."
        ),
    ] = "auto"
    bucket_bytes: Annotated[
        Positive | None,
        doc(
            "Size of a bucket; a larger tensor is split. Unset: 64 MiB, or between GPUs an eighth of the weights, at "
            "most 1 GiB."
        ),
    ] = None
    timeout_s: Annotated[Seconds, doc("Deadline of one engine's update; beyond it the engine is dropped.")] = 60.0
    sync_timeout_s: Annotated[
        Seconds, doc("Deadline of the update of all engines; those that are not done by then are dropped.")
    ] = 240.0
    every: Annotated[Positive, doc("Publish every this many steps; at most max_staleness + 1.")] = 1
    mismatch: MismatchConfig = MismatchConfig()

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that ``way`` names, at most one in a config that passed its checks; none: auto."""
        return tuple(word for word in get_args(Transport) if word in self._words)

    @property
    def options(self) -> tuple[WayOption, ...]:
        """The options that ``way`` names, in one order."""
        return tuple(word for word in get_args(WayOption) if word in self._words)

    @property
    def transport(self) -> Transport | Literal["auto"]:
        """The transport that ``way`` names, or auto."""
        return self.transports[0] if self.transports else "auto"

    @property
    def staged(self) -> bool:
        """Whether engines keep decoding while they receive, and pause only to load."""
        return "staged" in self._words

    @property
    def delta(self) -> bool:
        """Whether engines that hold the last version get only what changed."""
        return "delta" in self._words

    @property
    def waves(self) -> int:
        """How many groups of engines are updated one after another."""
        return 2 if "waves" in self._words else 1

    @property
    def _words(self) -> tuple[Way, ...]:
        return (self.way,) if isinstance(self.way, str) else self.way

    @property
    def bucket(self) -> int:
        """Bytes of a bucket: ``bucket_bytes``, or 64 MiB if neither the user nor the launcher has set it."""
        return self.bucket_bytes or SMALL_BUCKET
