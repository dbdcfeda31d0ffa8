"""Section `trainer`: how the policy is trained and on how many ranks."""

from typing import Annotated, Literal

from msgspec import Meta

from rl_async.configs.base import Config, Count, Fraction, Positive, Seconds, doc


class LoraConfig(Config, frozen=True):
    rank: Annotated[Positive, doc("Rank of each adapter's two matrices.")] = 16
    alpha: Annotated[Positive, doc("An adapter's product counts alpha / rank.")] = 32
    targets: Annotated[
        tuple[str, ...], doc("Names of the linear layers that get one, such as q_proj; empty: all in the decoder.")
    ] = ()

    @property
    def scale(self) -> float:
        """What an adapter's product counts."""
        return self.alpha / self.rank


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
