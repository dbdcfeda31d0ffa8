"""The critic's loss per token, and how well its values explain the returns."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Squared error, at least that of the value kept within ``clip`` of the old one: [B, T], never negative.

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
