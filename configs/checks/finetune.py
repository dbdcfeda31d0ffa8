"""Rules for ``rl-async sft`` with a section ``finetune``: keys of reinforcement learning that would do nothing."""

from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig

ELSEWHERE = {
    "learning_rate": "finetune.learning_rate",
    "schedule": "finetune.schedule",
    "warmup_steps": "finetune.warmup",
    "steps": "finetune.steps",
    "epochs": "finetune.epochs",
    "minibatches": "finetune.batch_size",
}


def finetune(c: RunConfig) -> str | None:
    """The rule."""
    if c.finetune is None:
        return None
    for key, other in ELSEWHERE.items():
        if getattr(c.trainer, key) != getattr(TrainerConfig(), key):
            return f"trainer.{key}={getattr(c.trainer, key)} is not for fine-tuning (section finetune); set {other}"
    if not isinstance(c.data.path, str):
        return "data.path lists several data sets, and finetune reads one file; put the conversations into one"
    if c.critic is not None:
        return "finetune trains a causal LM alone; leave critic out"
    return None
