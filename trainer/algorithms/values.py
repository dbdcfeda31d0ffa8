"""A critic's values: generalised advantage estimation from them, their loss, and how well they fit the returns."""

import torch
from torch import Tensor

from rl_async.trainer.algorithms.rows import Rows, row_sums

EPSILON = 1e-8


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of sampled tokens, float64, 0 elsewhere.

    An episode's steps are the tokens of ``mask``: the state after one is that of the row's next one, whatever the
    prompt or a tool put in between, and after the last one it is over (value 0).

        delta_k = r_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lam A_{k+1},   return_k = A_k + V_k

    A row of ``bootstrap`` did not end: its last state is worth what the one before it was, since no value of the state
    behind the last token was computed.

    Source: Schulman et al. (arXiv:1506.02438), eq. 16, for episodes that end. Bootstrapping at a limit: Pardo et al.
    (arXiv:1712.00378), section 3.2.

    Args:
        token_rewards: [N, T], or packed [M] with their ``rows``, as all tensors per token
        values: [N, T], of the state in which each token was chosen
        mask: bool [N, T]; rewards and values elsewhere do not matter
        bootstrap: bool [N]; none by default
        rows: where packed rows stand
    """
    value, counts = values[mask].double(), row_sums(mask, rows).long()
    ends, row = counts.cumsum(0), torch.arange(len(counts)).repeat_interleave(counts)
    last = ends[counts > 0] - 1
    following = value.roll(-1)
    following[last] = 0.0 if bootstrap is None else torch.where(bootstrap[counts > 0], value[last], 0.0)
    delta = token_rewards[mask].double() + gamma * following - value
    # The steps at equal distance from the ends of their rows are taken at once: ``order`` puts them beside each other,
    # with those of the rows that have the most steps first.
    rank = torch.empty_like(counts).scatter_(0, counts.argsort(descending=True), torch.arange(len(counts)))
    distance = ends[row] - 1 - torch.arange(len(row))
    order = (distance * len(counts) + rank[row]).argsort()
    steps, start, advantage = delta[order], 0, delta[:0]
    for number in torch.bincount(distance).tolist():
        advantage = steps[start : start + number] + gamma * lam * advantage[:number] if start else steps[:number]
        steps[start : start + number] = advantage
        start += number
    delta[order] = steps
    advantages = torch.zeros_like(mask, dtype=torch.float64).masked_scatter_(mask, delta)
    return advantages, torch.zeros_like(advantages).masked_scatter_(mask, delta + value)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale values to mean 0 and variance 1 over the tokens of ``mask``, 0 elsewhere.

    Values that are all equal, which leave nothing to tell apart but rounding, become 0, and so does a single one.

    (A - mean) / sqrt(var + 1e-8) with the unbiased variance, as verl and TRL have it. No part of the paper, but
    of its authors' ``ppo2`` (openai/baselines), there over a mini-batch and biased.
    """
    picked = values[mask]
    if len(picked) < 2 or bool(picked.min() == picked.max()):
        return torch.zeros_like(values)
    return torch.where(mask, (values - picked.mean()) * torch.rsqrt(picked.var() + EPSILON), 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Squared error of each value [B, T], at least that of the value kept within ``clip`` of the old one.

    0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2); without ``clip`` 0.5 * (V - R)^2. A value that
    has moved further than ``clip`` towards its return gets no gradient.

    The PPO paper (arXiv:1707.06347, eq. 9) has the plain squared error; the clipped form is that of its authors'
    ``baselines/ppo2/model.py`` (openai/baselines).
    """
    error = (values - returns) ** 2
    if clip is None:
        return 0.5 * error
    kept = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(error, (kept - returns) ** 2)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the tokens of ``mask``: 1 is perfect, 0 no better than a constant.

    0 when the returns do not vary: there is nothing to explain.
    """
    if not mask.any():
        return 0.0
    target, guess = returns[mask].double(), values[mask].double()
    variance = target.var(unbiased=False).item()
    return 1.0 - (target - guess).var(unbiased=False).item() / variance if variance > 0 else 0.0
