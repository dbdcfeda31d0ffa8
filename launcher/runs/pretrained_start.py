"""Makes the model of a preset from a pretrained one, by fine-tuning it on the demonstrations."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from rl_async.configs.checks import INSTEAD
from rl_async.configs.schema.data import DataConfig, FinetuneConfig, PretrainedConfig, WarmStartConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.files import replace_file
from rl_async.launcher.plan.artifacts import SFT_FILE, check_model_folder, origin_of
from rl_async.launcher.runs.finetune import finetune
from rl_async.launcher.sources.fetch import model_folder

KEY = "warm_start.pretrained.path"


def fine_tune(config: RunConfig, settings: WarmStartConfig, report: Callable[[str], None]) -> None:
    """Fetch the pretrained model, fine-tune it in processes of its own, and save it at ``warm_start.out``.

    If it is interrupted, the next call continues. Raises UserError or RoleFailed, and SystemExit on a signal.
    """
    assert settings.pretrained is not None
    base = model_folder(settings.pretrained.path, KEY)
    check_model_folder(base, KEY)
    report(f"warm start: fine-tuning {settings.pretrained.path} on {settings.demos_path}")
    if code := finetune(finetune_config(config, settings, settings.pretrained, base)):
        sys.exit(code)
    record = msgspec.to_builtins(origin_of(settings)) | {"pretrained": settings.pretrained.path}
    replace_file(Path(settings.out) / SFT_FILE, json.dumps(record).encode() + b"\n")


def finetune_config(
    config: RunConfig, settings: WarmStartConfig, pretrained: PretrainedConfig, base: Path
) -> RunConfig:
    """Return the config of the fine-tuning; what a run's ``trainer`` says for reinforcement learning is left out."""
    ignored = {key: getattr(TrainerConfig(), key) for key in INSTEAD}
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=str(base)),
        data=DataConfig(path=settings.demos_path),
        trainer=msgspec.structs.replace(config.trainer, **ignored),
        critic=None,
        warm_start=None,
        finetune=FinetuneConfig(
            out=settings.out,
            epochs=pretrained.epochs,
            batch_size=pretrained.batch_size,
            learning_rate=pretrained.learning_rate,
        ),
    )
