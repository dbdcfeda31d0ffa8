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


def reference_is_base(config: RunConfig, *, experts: bool) -> bool:
    """Whether the policy without its adapters is the reference, so that there is no second model.

    Whole distributions of both are needed within one training pass, and with ``experts`` the policy may replay its
    routers, which a reference does not: then the reference is a model of its own.
    """
    kl, adapters = config.algorithm.kl, config.trainer.lora is not None
    return kl.coef > 0 and adapters and not kl.reference_path and kl.estimator != "full" and not experts
