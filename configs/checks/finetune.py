"""Rules for the sections `finetune` and `warm_start`: keys that would have no effect."""

from rl_async.configs.derived.data import eval_parts, parts
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.finetune import WarmStartConfig
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

UNREAD = ("weight", "schedule", "ground_truth", "ground_truth_extract", "parameters")  # of a data set in a list


def finetune(c: RunConfig) -> str | None:
    """Refuse keys that supervised fine-tuning ignores, naming those that take their place."""
    if c.finetune is None:
        return None
    for key, other in INSTEAD.items():
        if getattr(c.trainer, key) != getattr(TrainerConfig(), key):
            return f"trainer.{key}={getattr(c.trainer, key)} has no effect on fine-tuning; set {other}"
    for source in (*parts(c.data), *eval_parts(c.data)):
        if unread := [key for key in UNREAD if getattr(source, key) != getattr(DataSource(path=""), key)]:
            return (
                f"data: {unread[0]} of {source.path} has no effect on fine-tuning, which trains on all conversations "
                "of all data sets; leave it out"
            )
    if c.critic is not None:
        return "critic has no effect on fine-tuning (section finetune); leave it out"
    return None


def warm_start(c: RunConfig) -> str | None:
    """Refuse keys of the tiny model's training while a pretrained one is fine-tuned."""
    own = c.warm_start
    if own is None or own.pretrained is None:
        return None
    default = WarmStartConfig(demos_path=own.demos_path, out=own.out, pretrained=own.pretrained)
    for key in WarmStartConfig.__struct_fields__:
        if getattr(own, key) != getattr(default, key):
            return f"warm_start.{key} has no effect with warm_start.pretrained, whose keys fine-tune that model"
    return None
