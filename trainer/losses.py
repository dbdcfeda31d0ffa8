"""Policy losses per token, the KL term, and their aggregation. Pure functions over [B, T] tensors."""

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor


class LossInputs(msgspec.Struct, frozen=True):
    """What a loss may look at; all [B, T] (T counts predicted tokens), advantages [B, 1]."""

    logprobs: Tensor  # log pi_theta, carries the gradient
    proximal: Tensor  # log pi_old, or log mu when old log-probabilities are bypassed
    advantages: Tensor
    weights: Tensor  # importance weights, detached
    clip_low: float
    clip_high: float


def ppo(x: LossInputs) -> Tensor:
    """Clipped surrogate with separate bounds, weighted: -w * min(r A, clip(r, 1 - low, 1 + high) A), [B, T].

    r = pi_theta / pi_old. Sources: PPO (arXiv:1707.06347), eq. 7; clip-higher: DAPO (arXiv:2503.14476), eq. 10.
    """
    ratio = (x.logprobs - x.proximal).exp()
    clipped = ratio.clamp(1 - x.clip_low, 1 + x.clip_high)
    return -x.weights * torch.minimum(ratio * x.advantages, clipped * x.advantages)


def reinforce(x: LossInputs) -> Tensor:
    """-w * A * log pi_theta, no ratio, [B, T]. Source: Williams 1992; here for comparison."""
    return -x.weights * x.advantages * x.logprobs


LOSSES: dict[str, Callable[[LossInputs], Tensor]] = {"ppo": ppo, "reinforce": reinforce}


def k3_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token k3 estimate of KL(pi_theta || pi_ref): exp(d) - d - 1 with d = log pi_ref - log pi_theta, [B, T].

    Source: Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    d = (reference - logprobs).clamp(-20, 20)
    return d.exp() - d - 1


def token_mean(values: Tensor, mask: Tensor, total_tokens: int) -> Tensor:
    """Sum of ``values`` [B, T] where ``mask``, over the tokens of the whole global mini-batch.

    Dividing by the global count makes the gradient independent of how rows were split into micro-batches and ranks.
    """
    return torch.where(mask, values, 0.0).sum() / total_tokens
