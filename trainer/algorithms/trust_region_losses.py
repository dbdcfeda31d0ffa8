"""Losses that mask tokens by how far the policy has moved on them, in place of a clipped ratio. -w r A elsewhere.

pi_old is mu when old log-probabilities are bypassed, as the papers of ``dppo`` and ``ipo`` have it.
"""

import torch
from torch import Tensor

from rl_async.trainer.algorithms.loss_inputs import LossInputs, SelectInputs

SMALLEST = 1e-7  # probability, where a logarithm of it or of its complement is taken


def _away(x: LossInputs) -> Tensor:
    """Whether the gradient moves the token's probability further from the old one: r > 1 with A > 0, or the reverse."""
    moved = (x.logprobs - x.proximal).detach()
    return ((moved > 0) & (x.advantages > 0)) | ((moved < 0) & (x.advantages < 0))


def _masked(x: LossInputs, drop: Tensor) -> Tensor:
    """-w r A, 0 where ``drop``."""
    return -x.weights * torch.where(drop, 0.0, x.ratio * x.advantages)


def dppo_tv(x: LossInputs) -> Tensor:
    """-w r A, but 0 for tokens that move away and are more than ``dppo_tv`` from pi_old in total variation, [B, T].

    The distance is that of the sampled token against all others: |pi_theta - pi_old|. Source: DPPO
    (arXiv:2602.04879), the binary approximation; the threshold 0.2 is prime-rl's.
    """
    distance = (x.logprobs.detach().exp() - x.proximal.exp()).abs()
    return _masked(x, _away(x) & (distance > x.options.loss_options.dppo_tv))


def dppo_kl(x: LossInputs) -> Tensor:
    """As ``dppo_tv`` with KL(pi_old || pi_theta) of the sampled token against all others, above ``dppo_kl``, [B, T]."""
    new = x.logprobs.detach().exp().clamp(SMALLEST, 1 - SMALLEST)
    old = x.proximal.exp().clamp(SMALLEST, 1 - SMALLEST)
    distance = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    return _masked(x, _away(x) & (distance > x.options.loss_options.dppo_kl))


def ipo(x: LossInputs) -> Tensor:
    """-w (r A - ``ipo_penalty`` (log r)^2), without r A where the probability moved by more than ``ipo``, [B, T].

    The direction does not matter, and the penalty draws masked tokens back too. As prime-rl defines it (loss `ipo`,
    threshold 0.1, `kl_tau` 1e-3), with mu for pi_old; no paper is named there.
    """
    distance = (x.logprobs.detach().exp() - x.proximal.exp()).abs()
    penalty = x.options.loss_options.ipo_penalty * x.log_ratio**2
    return _masked(x, distance > x.options.loss_options.ipo) + x.weights * penalty


def m2po(x: LossInputs) -> Tensor:
    """-w r A, 0 for the tokens that ``select_m2po`` picked, [B, T].

    Source: M2PO (arXiv:2510.01161), the objective without a clip.
    """
    assert x.selected is not None
    return _masked(x, x.selected)


def select_m2po(x: SelectInputs) -> Tensor:
    """Tokens without which the mean of (log pi_old - log mu)^2 is at most ``m2po``, [N, T]: the largest, no more of
    them than needed, but for those equal to the smallest of them.

    Source: M2PO (arXiv:2510.01161), the second-moment constraint; the budget 0.04 is the paper's.
    """
    squares = torch.where(x.mask, (x.proximal - x.behaviour).double() ** 2, 0.0)
    values = squares[x.mask].sort().values
    means = values.cumsum(0) / torch.arange(1, len(values) + 1, dtype=torch.float64)
    kept = int((means <= x.options.loss_options.m2po).sum())  # means only rise
    if kept == len(values):
        return torch.zeros_like(x.mask)
    limit = values[kept]  # tokens as extreme as the first that has to go, go with it
    return x.mask & (squares >= limit)
