"""Off-policy correction: which policy the ratio is clipped around, and how much each token counts.

Three policies meet here: the behaviour policy mu that sampled a token, the proximal policy pi_old that the trainer
held when the step began, and the policy pi_theta that is being trained.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """``proximal``: recompute pi_old, or take mu for it. ``weight``: token importance weights pi_old/mu, or none."""

    proximal: Literal["recompute", "behaviour"]
    weight: Literal["token", "none"]


CORRECTIONS: dict[str, Correction] = {
    "decoupled_token_is": Correction(proximal="recompute", weight="token"),
    "bypass_ppo_clip": Correction(proximal="behaviour", weight="none"),
    "disabled": Correction(proximal="recompute", weight="none"),
}

LOG_RATIO_LIMIT = 20.0  # exp of more than this is no weight but an accident


def truncated_importance_weights(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance sampling: w = min(pi_old / mu, cap), detached.

    Source: decoupled PPO objective, Hilton et al. (arXiv:2110.00641), eq. 4, truncated as in IMPALA
    (arXiv:1802.01561), eq. 1.

    Args:
        proximal, behaviour: float [B, T] log-probabilities of the sampled tokens.
        cap: largest weight, above 0.

    Returns:
        float [B, T].
    """
    return (proximal - behaviour).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)


class MismatchMeter:
    """Accumulates how far the trainer's log-probabilities are from the engine's, over a step's tokens.

    Sums are kept as a float64 vector so that ranks can add theirs up (``sums``; the last entry is a maximum).
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(5, dtype=torch.float64)  # tokens, k1, k3, w, w^2
        self.largest = torch.zeros(1, dtype=torch.float64)

    def add(self, proximal: Tensor, behaviour: Tensor, mask: Tensor) -> None:
        """Add tokens [B, T] where ``mask`` is true."""
        log_ratio = (proximal.detach() - behaviour)[mask].to(torch.float64).cpu()
        if log_ratio.numel() == 0:
            return
        weight = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        self.sums += torch.stack(
            [
                torch.tensor(float(log_ratio.numel()), dtype=torch.float64),
                (-log_ratio).sum(),
                (weight - 1 - log_ratio).sum(),
                weight.sum(),
                (weight**2).sum(),
            ]
        )
        self.largest = torch.maximum(self.largest, log_ratio.abs().max().reshape(1))

    def metrics(self) -> dict[str, float]:
        """``correction/kl``: mean of log mu - log pi_old, an estimate of KL(mu || pi_old) (k1).

        ``correction/k3``: its low-variance form. ``correction/ess``: (sum w)^2 / (n sum w^2), 1 when on-policy.
        ``correction/logprob_diff_max``: largest |log pi_old - log mu|.
        """
        tokens, k1, k3, weight, squared = self.sums.tolist()
        if tokens == 0:
            return {}
        return {
            "correction/kl": k1 / tokens,
            "correction/k3": k3 / tokens,
            "correction/ess": weight**2 / (tokens * squared),
            "correction/logprob_diff_max": self.largest.item(),
        }
