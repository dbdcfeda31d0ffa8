"""The algorithm that a config names, as functions: looked up once, before training begins."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.configs.schema.correction import Correction, resolve, rules
from rl_async.configs.schema.formulas import advantage_needs
from rl_async.configs.schema.run import RunConfig
from rl_async.trainer.algorithms.advantages import ADVANTAGES, AdvantageFn
from rl_async.trainer.algorithms.aggregation import AGGREGATIONS, Counts
from rl_async.trainer.algorithms.correction import Corrected, correct
from rl_async.trainer.algorithms.kl import ESTIMATORS
from rl_async.trainer.algorithms.losses import LOSSES, PolicyLoss
from rl_async.trainer.algorithms.user_functions import load_advantage, load_correction, load_loss
from rl_async.trainer.backends.interface import OutputName
from rl_async.userload import is_user_reference


@dataclass(frozen=True)
class Algorithm:
    """What ``update`` calls. ``decoupled``: pi_old is recomputed before the first mini-batch, else it is mu."""

    advantage: AdvantageFn
    loss: PolicyLoss
    correct: Callable[..., Corrected]  # target, behaviour, mask, age, free: [B, T]; or packed [M], and their rows
    rules: tuple[str, ...]  # that the correction may apply to a token
    decoupled: bool
    aggregate: Callable[[Tensor, Tensor, Tensor, Counts], Tensor]
    kl: Callable[[Tensor, Tensor], Tensor]
    precompute: frozenset[OutputName]  # outputs that the pass for pi_old must compute beside log-probabilities
    train_outputs: frozenset[OutputName]  # that the passes with gradient must compute


def build(config: RunConfig) -> Algorithm:
    """Look up the functions that ``config`` names, and try a user's own on a tiny batch.

    Raises ConfigError naming the key if a name is unknown or a user's function does not fit.
    """
    algorithm = config.algorithm
    correction = Correction()  # a user's own is decoupled and goes with any loss
    if not is_user_reference(algorithm.correction):
        correction = resolve(algorithm.correction, algorithm.correction_options)
    precompute: set[OutputName] = set()
    if "sum_squares" in advantage_needs(algorithm.advantage):
        precompute.add("sum_squares")
    train_outputs: set[OutputName] = set()
    if algorithm.entropy_coef > 0:
        train_outputs.add("entropy")
    if algorithm.kl.coef > 0 and algorithm.kl.estimator == "full":
        train_outputs.add("distribution")
    if config.critic is not None and config.critic.shared:
        precompute.add("values")
        train_outputs.add("values")
    return Algorithm(
        advantage=_advantage(algorithm, critic=config.critic is not None),
        loss=_loss(algorithm, correction),
        correct=_correct(algorithm, correction),
        rules=rules(correction),
        decoupled=correction.proximal == "recompute",
        aggregate=AGGREGATIONS[algorithm.aggregation],
        kl=ESTIMATORS[algorithm.kl.estimator],
        precompute=frozenset(precompute),
        train_outputs=frozenset(train_outputs),
    )


def _advantage(algorithm: AlgorithmConfig, *, critic: bool) -> AdvantageFn:
    if is_user_reference(algorithm.advantage):
        return load_advantage(algorithm.advantage, algorithm.advantage_options, critic=critic)
    return ADVANTAGES[algorithm.advantage]


def _loss(algorithm: AlgorithmConfig, correction: Correction) -> PolicyLoss:
    name = correction.loss or algorithm.loss
    return load_loss(name, algorithm) if is_user_reference(name) else LOSSES[name]


def _correct(algorithm: AlgorithmConfig, correction: Correction) -> Callable[..., Corrected]:
    if is_user_reference(algorithm.correction):
        own = load_correction(algorithm.correction)
        return lambda target, behaviour, mask, age, free, rows=None: own(target, behaviour, mask, age, rows)
    return lambda target, behaviour, mask, age, free, rows=None: correct(
        target, behaviour, mask, age, correction, free, rows
    )
