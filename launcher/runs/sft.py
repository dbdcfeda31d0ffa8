"""``rl-async sft``: what the arguments ask for, fine-tuning or a preset's data and model."""

import argparse
import json

from rl_async.configs.load.loader import load_config
from rl_async.errors import UserError
from rl_async.launcher.plan.artifacts import needs_preparation

KEYS = {
    "model": "model.path",
    "data": "data.path",
    "eval": "data.eval_path",
    "out": "finetune.out",
    "epochs": "finetune.epochs",
    "batch_size": "finetune.batch_size",
    "learning_rate": "finetune.learning_rate",
    "ranks": "trainer.ranks",
}


def sft(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code. Raises UserError."""
    given = {key: getattr(arguments, name) for name, key in KEYS.items() if getattr(arguments, name) is not None}
    if arguments.config is None:
        missing = [f"--{name}" for name in ("model", "data", "out") if KEYS[name] not in given]
        if missing:
            raise UserError(f"missing {', '.join(missing)}; or give --config, a YAML file or a preset")
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    config = load_config(arguments.config, [*overrides, *arguments.overrides])
    if config.finetune is not None:
        from rl_async.launcher.runs.finetune import finetune

        return finetune(config)
    if config.warm_start is None and config.data.make is None:
        raise UserError(
            f"--config: {arguments.config} has no section `finetune`; add --out PATH, or `finetune: {{out: PATH}}`, to "
            "fine-tune model.path on data.path"
        )
    if not needs_preparation(config):
        print(f"{config.model.path} is there already; delete it to make it again")
        return 0
    from rl_async.launcher.runs.prepare import prepare

    prepare(config, lambda line: print(line, flush=True))
    return 0
