"""Advantage estimators: rewards of a batch in, one advantage per trajectory out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPSILON = 1e-4


def grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """Group-relative advantage, normalised by the group's standard deviation.

    A_i = (r_i - mean(group)) / (std(group) + 1e-4), with the unbiased standard deviation. Source: DeepSeekMath
    (arXiv:2402.03300), section 4.1.2, outcome supervision. Groups may differ in size; a group of one, or one whose
    rewards are all equal, gets 0.

    Args:
        rewards: float [N].
        groups: int64 [N], the group of each trajectory; any ids.

    Returns:
        float [N].
    """
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    count = sizes.to(rewards.dtype)
    mean = torch.zeros_like(count).index_add_(0, index, rewards) / count
    centred = rewards - mean[index]
    variance = torch.zeros_like(count).index_add_(0, index, centred**2) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[index] + EPSILON)


ADVANTAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"grpo": grpo}


def advantages(name: str, rewards: Sequence[float], groups: Sequence[int]) -> Tensor:
    """Advantages [N] of a batch by the estimator ``name``, in float64 for sums that do not depend on row order."""
    return ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).to(torch.float32)
