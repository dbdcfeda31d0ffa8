"""Rules for what only ``trainer.backend=fsdp2`` does: how it spreads, keeps and computes a model."""

from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig

OWN = (
    "activation_checkpointing",
    "cpu_offload",
    "replicas",
    "compile",
    "lora",
    "sequence_parallel",
    "attention",
    "kernels",
)


def fsdp2(c: RunConfig) -> str | None:
    """The rule for its options."""
    t = c.trainer
    if t.backend != "fsdp2":
        asked = next((key for key in OWN if getattr(t, key) != getattr(TrainerConfig(), key)), None)
        return asked and f"trainer.{asked} needs trainer.backend=fsdp2; trainer.backend={t.backend} does without it"
    if t.ranks % t.replicas:
        return (
            f"trainer.replicas={t.replicas} copies of the model do not divide trainer.ranks={t.ranks} among them; use "
            "a multiple"
        )
    if t.ranks % t.sequence_parallel:
        return (
            f"trainer.sequence_parallel={t.sequence_parallel} ranks share each row, and trainer.ranks={t.ranks} does "
            "not divide into so many each; use a multiple"
        )
    if t.cpu_offload and c.model.device != "cuda":
        return (
            f"trainer.cpu_offload would do nothing on a CPU, which has weights and optimizer in its memory anyway, and "
            f"model.device={c.model.device}; set model.device=cuda, or leave it out"
        )
    return None


def kernels(c: RunConfig) -> str | None:
    """The rule for kernels that only GPUs have."""
    t = c.trainer
    if t.attention == "flash" and (c.model.device == "cpu" or c.model.dtype != "bfloat16"):
        return (
            f"trainer.attention=flash needs bfloat16 on a GPU; model.device={c.model.device} and model.dtype="
            f"{c.model.dtype}; use trainer.attention=auto"
        )
    if t.attention == "flash" and t.sequence_parallel > 1:
        return (
            f"trainer.attention=flash does not go with trainer.sequence_parallel={t.sequence_parallel}: ranks that "
            "share rows have packed attention between their exchanges; use trainer.attention=packed or auto"
        )
    if t.kernels == "liger" and c.model.device == "cpu":
        return "trainer.kernels=liger needs a GPU, and model.device=cpu; use trainer.kernels=torch"
    if t.kernels == "liger" and t.compile:
        return "trainer.kernels=liger does not go with trainer.compile, which makes kernels of its own; leave one out"
    return None
