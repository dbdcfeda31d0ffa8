"""What a policy loss looks at, and what it is. The losses themselves: ``losses.py`` lists them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rl_async.configs.schema.algorithm import AlgorithmConfig
from rl_async.trainer.algorithms.correction import LOG_RATIO_LIMIT


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch of whole rows, all [B, T] (T counts predicted tokens)."""

    logprobs: Tensor  # log pi_theta, carries the gradient
    proximal: Tensor  # log pi_old, or log mu when old log-probabilities are bypassed
    behaviour: Tensor  # log mu
    advantages: Tensor
    weights: Tensor  # the correction's, detached
    mask: Tensor  # bool, tokens that train; whatever stands elsewhere is finite and must not matter
    options: AlgorithmConfig
    selected: Tensor | None = None  # bool, what the loss's ``select`` picked from the whole mini-batch

    @property
    def log_ratio(self) -> Tensor:
        """log pi_theta - log pi_old, limited to +-20."""
        return (self.logprobs - self.proximal).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @property
    def ratio(self) -> Tensor:
        """r = pi_theta / pi_old."""
        return self.log_ratio.exp()

    def clip(self, ratio: Tensor) -> Tensor:
        """``ratio`` within [1 - clip_low, 1 + clip_high]."""
        return ratio.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)


@dataclass(frozen=True)
class SelectInputs:
    """A whole mini-batch before its forward passes, the same on every rank and for every split; all [N, T]."""

    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    options: AlgorithmConfig
    seed: int  # of this mini-batch, for losses that draw tokens


@dataclass(frozen=True)
class PolicyLoss:
    """``per_token`` gives the loss of each token [B, T]; ``select`` picks tokens [N, T] by a rule over the whole
    mini-batch, so that the outcome does not depend on how it is split into micro-batches."""

    per_token: Callable[[LossInputs], Tensor]
    select: Callable[[SelectInputs], Tensor] | None = None
