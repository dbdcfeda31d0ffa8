"""Rules for the section `finetune`: keys of reinforcement learning would have no effect."""

from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig

INSTEAD = {  # key of trainer -> the key that fine-tuning reads
    "learning_rate": "finetune.learning_rate",
    "schedule": "finetune.schedule",
    "warmup_steps": "finetune.warmup",
    "steps": "finetune.steps",
    "epochs": "finetune.epochs",
    "minibatches": "finetune.batch_size",
}


def finetune(c: RunConfig) -> str | None:
    """Refuse keys that supervised fine-tuning ignores, naming those that take their place."""
    if c.finetune is None:
        return None
    for key, other in INSTEAD.items():
        if getattr(c.trainer, key) != getattr(TrainerConfig(), key):
            return f"trainer.{key}={getattr(c.trainer, key)} has no effect on fine-tuning; set {other}"
    if not isinstance(c.data.path, str) or isinstance(c.data.eval_path, tuple):
        return "data.path or data.eval_path is a list, and finetune reads one path; put the conversations into one file"
    if c.critic is not None:
        return "critic has no effect on fine-tuning (section finetune); leave it out"
    return None
