"""Whether a run may make its model."""

from pathlib import Path

from rl_async.configs.schema.finetune import WarmStartConfig
from rl_async.configs.schema.run import RunConfig


def warm_start_of(config: RunConfig) -> WarmStartConfig | None:
    """Return the warm start if it makes ``model.path``; None for a model that must be there already."""
    settings = config.warm_start
    if settings is None or not settings.out or Path(settings.out) != Path(config.model.path):
        return None
    return settings
