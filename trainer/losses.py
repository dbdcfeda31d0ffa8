"""Policy losses per token. Pure functions over [B, T] tensors; ``aggregation.py`` makes one number of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_async.configs.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at: a micro-batch of whole rows, all [B, T] (T counts predicted tokens)."""

    logprobs: Tensor  # log pi_theta, carries the gradient
    proximal: Tensor  # log pi_old, or log mu when old log-probabilities are bypassed
    behaviour: Tensor  # log mu
    advantages: Tensor
    weights: Tensor  # the correction's, detached
    mask: Tensor  # bool, tokens that train; whatever stands elsewhere is finite and must not matter
    options: AlgorithmConfig
    selected: Tensor | None = None  # bool, what the loss's ``select`` picked from the whole mini-batch


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


def ppo(x: LossInputs) -> Tensor:
    """Clipped surrogate with separate bounds, weighted: -w * min(r A, clip(r, 1 - low, 1 + high) A), [B, T].

    r = pi_theta / pi_old. Sources: PPO (arXiv:1707.06347), eq. 7; clip-higher: DAPO (arXiv:2503.14476), eq. 10.
    """
    ratio = (x.logprobs - x.proximal).exp()
    clipped = ratio.clamp(1 - x.options.clip_low, 1 + x.options.clip_high)
    return -x.weights * torch.minimum(ratio * x.advantages, clipped * x.advantages)


def reinforce(x: LossInputs) -> Tensor:
    """-w * A * log pi_theta, no ratio, [B, T]. Source: Williams 1992; here for comparison."""
    return -x.weights * x.advantages * x.logprobs


LOSSES: dict[str, PolicyLoss] = {"ppo": PolicyLoss(ppo), "reinforce": PolicyLoss(reinforce)}
