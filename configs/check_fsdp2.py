"""Rules for what only ``trainer.backend=fsdp2`` does: how it spreads, keeps and computes a model."""

from rl_async.configs.schema import RunConfig, TrainerConfig

OWN = ("activation_checkpointing", "cpu_offload", "replicas", "compile", "lora")


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
    if t.cpu_offload and c.model.device != "cuda":
        return (
            f"trainer.cpu_offload would do nothing on a CPU, which has weights and optimizer in its memory anyway, and "
            f"model.device={c.model.device}; set model.device=cuda, or leave it out"
        )
    return None
