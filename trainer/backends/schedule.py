"""Learning-rate schedules as pure functions of the optimizer step."""

import math
from collections.abc import Callable

from rl_async.configs.schema.trainer import TrainerConfig


def learning_rate_factor(config: TrainerConfig) -> Callable[[int], float]:
    """Return the factor on the peak learning rate by optimizer step: warm-up, then constant, linear or cosine to 0."""
    total = config.steps * config.epochs * config.minibatches

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        done = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
        if config.schedule == "linear":
            return 1.0 - done
        if config.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0

    return factor
