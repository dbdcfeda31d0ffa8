"""The algorithm that a config names, as functions: looked up once, before training begins."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rl_async.configs.correction import Correction, resolve
from rl_async.configs.schema import RunConfig
from rl_async.trainer.advantages import ADVANTAGES, Advantage
from rl_async.trainer.aggregation import AGGREGATIONS, Counts
from rl_async.trainer.backend import Want
from rl_async.trainer.correction import Corrected, correct
from rl_async.trainer.kl import ESTIMATORS
from rl_async.trainer.losses import LOSSES, PolicyLoss


@dataclass(frozen=True)
class Algorithm:
    """What ``update`` calls. ``decoupled``: pi_old is recomputed before the first mini-batch, else it is mu."""

    advantage: Advantage
    loss: PolicyLoss
    correct: Callable[[Tensor, Tensor, Tensor, Tensor], Corrected]  # target, behaviour, mask, age; all [B, T]
    decoupled: bool
    aggregate: Callable[[Tensor, Tensor, Tensor, Counts], Tensor]
    kl: Callable[[Tensor, Tensor], Tensor]
    looks: frozenset[Want]  # what the pass for pi_old must bring beside log-probabilities
    wants: frozenset[Want]  # what the passes with gradient must


def build(config: RunConfig) -> Algorithm:
    """Raises ConfigError naming the key for a name that is not there."""
    algorithm = config.algorithm
    correction = resolve(algorithm.correction, algorithm.correction_options)
    looks: set[Want] = set()
    wants: set[Want] = set()
    if algorithm.entropy_coef > 0:
        wants.add("entropy")
    if config.critic is not None and config.critic.shared:
        looks.add("values")
        wants.add("values")
    return Algorithm(
        advantage=ADVANTAGES[algorithm.advantage],
        loss=LOSSES[correction.loss or algorithm.loss],
        correct=_with(correction),
        decoupled=correction.proximal == "recompute",
        aggregate=AGGREGATIONS[algorithm.aggregation],
        kl=ESTIMATORS[algorithm.kl.estimator],
        looks=frozenset(looks),
        wants=frozenset(wants),
    )


def _with(correction: Correction) -> Callable[[Tensor, Tensor, Tensor, Tensor], Corrected]:
    return lambda target, behaviour, mask, age: correct(target, behaviour, mask, age, correction)
