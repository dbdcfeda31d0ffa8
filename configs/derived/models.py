"""Whether a run may make its model, and the type that it computes with."""

from pathlib import Path

from rl_async.configs.schema.data import ComputeType, ModelConfig
from rl_async.configs.schema.finetune import WarmStartConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError


def warm_start_of(config: RunConfig) -> WarmStartConfig | None:
    """Return the warm start if it makes ``model.path``; None for a model that must be there already."""
    settings = config.warm_start
    if settings is None or not settings.out or Path(settings.out) != Path(config.model.path):
        return None
    return settings


def compute_type(model: ModelConfig) -> ComputeType:
    """Return ``model.dtype`` for a role. It must be settled: each role would choose by its own machine.

    Raises ConfigError for ``auto``.
    """
    if model.dtype == "auto":
        raise ConfigError(
            "model.dtype=auto: the roles of a run need the type that it was started with; write float32 or bfloat16 "
            "into config.yaml, as `rl-async launch` and `rl-async config show` do"
        )
    return model.dtype
