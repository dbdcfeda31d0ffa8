"""Off-policy correction carried out: a weight and a verdict for each token, and what they add up to.

What can be asked for is in ``configs/correction.py``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_async.configs.correction import Correction

LOG_RATIO_LIMIT = 20.0  # exp of more than this is no weight but an accident


@dataclass(frozen=True)
class Corrected:
    """What became of each token of B whole rows; nothing carries gradient."""

    weights: Tensor  # [B, T], 1 where there is nothing to weigh
    keep: Tensor  # bool [B, T], tokens that train
    rule: Tensor  # uint8 [B, T], index into RULES of what masked a token or set its weight to 0; 0: nothing did


RULES = ("", "band")


def correct(target: Tensor, behaviour: Tensor, mask: Tensor, age: Tensor, correction: Correction) -> Corrected:
    """Weigh and judge tokens. Every rule is local to a row, so any split into whole rows gives the same.

    Args:
        target: float [B, T], log pi_old (decoupled) or log pi_theta (bypass).
        behaviour: float [B, T], log mu.
        mask: bool [B, T], sampled tokens.
        age: int [B, T], staleness of each token in steps.
        correction: what to do; batch normalisation is not local and left to ``normalise``.
    """
    log_ratio = torch.where(mask, target.detach() - behaviour, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weights = torch.ones_like(log_ratio)
    if correction.weight == "token":
        weights = log_ratio.exp()
    if correction.cap is not None:
        weights = weights.clamp(max=correction.cap)
    return Corrected(weights, mask, torch.zeros_like(mask, dtype=torch.uint8))


def correction_metrics(
    target: Tensor, behaviour: Tensor, mask: Tensor, age: Tensor, corrected: Corrected
) -> dict[str, float]:
    """How far the policy was from the one that sampled, over the tokens of a whole batch [N, T] where ``mask``.

    ``correction/kl``: mean of log mu - log pi, an estimate of KL(mu || pi) (k1). ``correction/k3``: its low-variance
    form. ``correction/ess``: (sum r)^2 / (n sum r^2), 1 when on-policy. ``correction/logprob_diff_max``: largest
    |log pi - log mu|.
    """
    log_ratio = (target - behaviour)[mask].double()
    if log_ratio.numel() == 0:
        return {}
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return {
        "correction/kl": -log_ratio.mean().item(),
        "correction/k3": (ratio - 1 - log_ratio).mean().item(),
        "correction/ess": (ratio.sum() ** 2 / (ratio.numel() * (ratio**2).sum())).item(),
        "correction/logprob_diff_max": log_ratio.abs().max().item(),
    }
