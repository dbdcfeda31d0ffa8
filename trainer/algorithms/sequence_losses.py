"""Losses with one ratio per sequence. A weight per token is allowed; each docstring says what it then means.

Both are meant for ``algorithm.aggregation=seq-mean-token-mean``, where every sequence counts the same.
"""

import torch
from torch import Tensor

from rl_async.trainer.algorithms.loss_inputs import LossInputs


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over a row's tokens where ``mask``, [B, 1]."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def gspo(x: LossInputs) -> Tensor:
    """-w min(s A, clip(s, 1 - low, 1 + high) A) with the length-normalised ratio s of the sequence, [B, T].

    s = exp(mean_t log r_t); as GSPO-token its value is the sequence's and its gradient goes through the own token:
    s_t = sg(s) pi_t / sg(pi_t). A weight per token weighs that token's term. s stays much nearer to 1 than r: the paper
    clips at 3e-4 and 4e-4. Source: GSPO (arXiv:2507.18071), eqs. 7, 13 and 14.
    """
    log_s = _mean(x.log_ratio, x.mask).detach() + x.logprobs - x.logprobs.detach()
    s = log_s.exp()
    return -x.weights * torch.minimum(s * x.advantages, x.clip(s) * x.advantages)


def gmpo(x: LossInputs) -> Tensor:
    """-w A exp(mean_t of log r_t, limited token by token): the geometric mean of the ratios, on each token, [B, T].

    log r_t is limited to [-clip_low, clip_high], on the side on which PPO would clip: the smaller of A log r_t and
    A clip(log r_t). The paper's limits are 0.4 and 0.4. Weights enter by their own geometric mean over the row.
    Source: GMPO (arXiv:2507.20673). A is that of the row: its mean over the row's tokens.
    """
    sign = x.advantages.sign()
    limited = x.log_ratio.clamp(-x.options.clip_low, x.options.clip_high)
    log_ratio = sign * torch.minimum(sign * x.log_ratio, sign * limited)
    weights = _mean(x.weights.clamp(min=1e-10).log(), x.mask).exp()
    loss = -weights * _mean(log_ratio, x.mask).exp() * _mean(x.advantages, x.mask)
    return loss.expand_as(x.logprobs)
