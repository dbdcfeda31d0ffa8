"""Rules for the options of ``trainer.backend=fsdp2``."""

from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig

FSDP2_ONLY = (  # keys of trainer
    "activation_checkpointing",
    "cpu_offload",
    "replicas",
    "compile",
    "lora",
    "kernels",
)


def fsdp2(c: RunConfig) -> str | None:
    """Refuse its options with another backend, and sizes that do not divide the ranks."""
    t = c.trainer
    if t.backend != "fsdp2":
        changed = next((key for key in FSDP2_ONLY if getattr(t, key) != getattr(TrainerConfig(), key)), None)
        return changed and f"trainer.{changed} needs trainer.backend=fsdp2, not {t.backend}"
    if t.ranks % t.replicas:
        return f"trainer.ranks={t.ranks} must be a multiple of trainer.replicas={t.replicas}, the copies of the model"
    if t.ranks % t.sequence_parallel:
        return (
            f"trainer.ranks={t.ranks} must be a multiple of trainer.sequence_parallel={t.sequence_parallel}, the ranks "
            "that share each row"
        )
    if t.cpu_offload and c.model.device != "gpu":
        return (
            f"trainer.cpu_offload has no effect with model.device={c.model.device}: without a GPU, weights and "
            "optimizer are in host memory anyway; set model.device=gpu, or leave it out"
        )
    return None


def kernels(c: RunConfig) -> str | None:
    """Refuse kernels that need a GPU where there is none, and combinations of kernels that do not work."""
    t = c.trainer
    if t.kernels == "liger" and c.model.device == "cpu":
        return "trainer.kernels=liger needs a GPU, and model.device=cpu; use trainer.kernels=torch"
    if t.kernels == "liger" and t.compile:
        return "trainer.kernels=liger does not work with trainer.compile, which makes its own kernels; leave one out"
    return None
