"""Losses against the collapse of entropy: tokens on which advantage and log-probability rise together are held back.

The covariance of a token is (A - mean A) (log pi_old - mean log pi_old), means over the mini-batch. The paper takes it
of the policy in training; taking pi_old (mu when bypassed) lets tokens be picked before the forward passes, so that
the choice does not depend on micro-batches and ranks. In a step's first mini-batch the two are the same.
"""

import torch
from torch import Tensor

from rl_async.trainer.algorithms.loss_inputs import LossInputs, SelectInputs
from rl_async.trainer.algorithms.token_losses import ppo


def covariance(x: SelectInputs) -> Tensor:
    """float64 [N, T], 0 where nothing trains. Source: arXiv:2505.22617."""
    count = x.mask.sum().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        kept = torch.where(x.mask, values.double(), 0.0)
        return torch.where(x.mask, kept - kept.sum() / count, 0.0)

    return centred(x.advantages) * centred(x.proximal)


def _share(share: float, mask: Tensor) -> int:
    """So many of the mask's tokens; at least one, if any share is wanted and there are tokens."""
    tokens = int(mask.sum())
    return min(max(int(share * tokens), 1), tokens) if share > 0 else 0


def select_clip_cov(x: SelectInputs) -> Tensor:
    """A random ``clip_cov_share`` of all tokens, from those whose covariance is between the two bounds, [N, T]."""
    options = x.options.loss_options
    cov = covariance(x)
    candidates = torch.nonzero(x.mask & (cov > options.clip_cov_low) & (cov < options.clip_cov_high))
    wanted = _share(options.clip_cov_share, x.mask)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(x.seed))
    picked = candidates[order[:wanted]]
    selected = torch.zeros_like(x.mask)
    selected[picked[:, 0], picked[:, 1]] = True
    return selected


def clip_cov(x: LossInputs) -> Tensor:
    """``ppo``, without the selected tokens, [B, T]. Source: Clip-Cov (arXiv:2505.22617)."""
    assert x.selected is not None
    return torch.where(x.selected, 0.0, ppo(x))


def select_kl_cov(x: SelectInputs) -> Tensor:
    """The ``kl_cov_share`` of all tokens with the largest covariance, at least one, [N, T]."""
    cov = torch.where(x.mask, covariance(x), -torch.inf)
    wanted = _share(x.options.loss_options.kl_cov_share, x.mask)
    selected = torch.zeros_like(x.mask).flatten()
    selected[cov.flatten().argsort(descending=True, stable=True)[:wanted]] = True
    return selected.reshape(x.mask.shape)


def kl_cov(x: LossInputs) -> Tensor:
    """-w (r A - coef |log r| on the selected tokens), no clip, [B, T]. Source: KL-Cov (arXiv:2505.22617)."""
    assert x.selected is not None
    penalty = torch.where(x.selected, x.options.loss_options.kl_cov_coef * x.log_ratio.abs(), 0.0)
    return -x.weights * (x.ratio * x.advantages - penalty)
