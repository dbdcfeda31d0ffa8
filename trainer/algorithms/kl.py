"""Estimators of KL(pi_theta || pi_ref) per token, and the controller of its coefficient.

k1, k2, k3: Schulman, "Approximating KL divergence" (2020). Of a sampled token only its two log-probabilities are known;
``full`` sums over the vocabulary. As part of a loss their gradients differ: that of k2 is an unbiased gradient of the
divergence on-policy, those of k1 and k3 are not. A name with ``+`` has the estimator's value and the gradient of k2.

d = log pi_theta - log pi_ref. k3 alone grows exponentially, as d falls, so it alone has a limit.
"""

from collections.abc import Callable

from torch import Tensor

from rl_async.configs.schema.algorithm import ADAPTIVE_LIMIT, KlConfig
from rl_async.trainer.algorithms.correction import LOG_RATIO_LIMIT

K3_LIMIT = 10.0  # reached at d = -2.6: one token must not outweigh a whole batch

Estimator = Callable[[Tensor, Tensor], Tensor]  # log pi_theta, log pi_ref -> KL; all [B, T]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d, [B, T]: unbiased, often negative."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, [B, T]: biased, never negative."""
    return (logprobs - reference) ** 2 / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d, at most 10, [B, T]: unbiased up to that limit, never negative.

    A token at the limit has no gradient. The limit is verl's (`low_var_kl`), which slime has under that name too; TRL
    has none.
    """
    d = (logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ((-d).exp() - 1 + d).clamp(max=K3_LIMIT)


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|d|, [B, T]: a distance, which does not estimate the divergence."""
    return (logprobs - reference).abs()


def full(logprobs: Tensor, reference: Tensor) -> Tensor:
    """sum over v of pi_theta(v) (log pi_theta(v) - log pi_ref(v)), [B, T], from log-probabilities [B, T, V]."""
    return (logprobs.exp() * (logprobs - reference)).sum(-1)


def straight_through(estimator: Estimator) -> Estimator:
    """Give an estimator's value the gradient of k2."""

    def value_of_one_gradient_of_the_other(logprobs: Tensor, reference: Tensor) -> Tensor:
        carrier = k2(logprobs, reference)
        return estimator(logprobs, reference).detach() + carrier - carrier.detach()

    return value_of_one_gradient_of_the_other


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
    "abs+": straight_through(absolute),
    "full": full,
}


class KlController:
    """Holds the coefficient of the KL: fixed, or adapted towards ``target``.

    coef *= max(0, 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) after each step of n trajectories. Source: Ziegler
    et al. (arXiv:1909.08593), section 2.2; n / horizon, in place of its constant 0.1, is their published code's.
    """

    def __init__(self, config: KlConfig) -> None:
        self._config, self.coef = config, config.coef

    def after_step(self, kl: float, trajectories: int) -> dict[str, float]:
        """Take in the mean KL per token of a step. Returns the coefficient that the step had, as a metric."""
        had = self.coef
        if self._config.controller == "adaptive":
            error = min(max(kl / self._config.target - 1, -ADAPTIVE_LIMIT), ADAPTIVE_LIMIT)
            self.coef *= max(0.0, 1 + error * trajectories / self._config.horizon)
        return {"kl/coef": had} if had > 0 else {}
