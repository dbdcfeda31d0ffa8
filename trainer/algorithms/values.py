"""A critic's values: generalised advantage estimation from them, their loss, and how well they fit the returns."""

import torch
from torch import Tensor

EPSILON = 1e-8


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of sampled tokens, float64 [N, T] each, 0 elsewhere.

    An episode's steps are the tokens of ``mask``: the state after one is that of the row's next one, whatever the
    prompt or a tool put in between, and after the last one it is over (value 0).

        delta_k = r_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lam A_{k+1},   return_k = A_k + V_k

    A row of ``bootstrap`` did not end: its last state is worth what the one before it was, since no value of the state
    behind the last token was computed.

    Source: Schulman et al. (arXiv:1506.02438), eq. 16, for episodes that end. Bootstrapping at a limit: Pardo et al.
    (arXiv:1712.00378), section 3.2.

    Args:
        token_rewards: [N, T]
        values: [N, T], of the state in which each token was chosen
        mask: bool [N, T]; rewards and values elsewhere do not matter
        bootstrap: bool [N]; none by default
    """
    rewards = torch.where(mask, token_rewards.double(), 0.0)
    values = torch.where(mask, values.double(), 0.0)
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])  # A of the next sampled token, [N]
    next_value = torch.zeros_like(values[:, 0])
    if bootstrap is not None:
        last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1, keepdim=True)
        next_value = torch.where(bootstrap, values.gather(1, last)[:, 0], next_value)
    for t in reversed(range(mask.shape[1])):
        sampled = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(sampled, delta + gamma * lam * following, following)
        next_value = torch.where(sampled, values[:, t], next_value)
        advantages[:, t] = torch.where(sampled, following, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale values [N, T] to mean 0 and variance 1 over the tokens of ``mask``, 0 elsewhere.

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
    """1 - Var(R - V) / Var(R) over the tokens of ``mask``, all [N, T]: 1 is perfect, 0 no better than a constant.

    0 when the returns do not vary: there is nothing to explain.
    """
    if not mask.any():
        return 0.0
    target, guess = returns[mask].double(), values[mask].double()
    variance = target.var(unbiased=False).item()
    return 1.0 - (target - guess).var(unbiased=False).item() / variance if variance > 0 else 0.0
