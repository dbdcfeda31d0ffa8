"""Estimators of a Kullback-Leibler divergence per token, and what sets its coefficient."""

from collections.abc import Callable

from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log pi_ref - log pi_theta, [B, T]: unbiased, never negative.

    Source: Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    d = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.exp() - d - 1


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k3": k3}
