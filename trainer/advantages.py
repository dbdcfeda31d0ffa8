"""Advantage estimators: the rewards of a whole batch in, an advantage for each sampled token out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_async.configs.algorithm import AdvantageOptions
from rl_async.trainer.gae import gae, whiten

EPSILON = 1e-4


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may look at: a whole step's batch, the same on every rank. N rows, T predicted tokens.

    Groups may differ in size, and rows without a valid reward (``scored`` false: a scorer failed) belong to no
    statistic and get advantage 0.
    """

    rewards: Tensor  # float64 [N], the outcome reward
    token_rewards: Tensor  # float64 [N, T], the outcome on the last sampled token, turn rewards on their turn's last
    mask: Tensor  # bool [N, T], sampled tokens that train
    groups: Tensor  # int64 [N], any ids
    scored: Tensor  # bool [N]
    row_weights: Tensor  # float64 [N], 1 / rows of the row's episode
    turns: Tensor  # int64 [N, T], assistant turn that a sampled token belongs to, from 0; -1 elsewhere
    options: AdvantageOptions
    parts: dict[str, Tensor]  # float64 [N] each: the named parts of the reward
    baselines: Tensor | None = None  # float64 [N], reward of the group's greedy episode
    values: Tensor | None = None  # float64 [N, T], the critic's
    logprobs: Tensor | None = None  # float64 [N, T], log pi_old
    sum_squares: Tensor | None = None  # float64 [N, T], sum of pi_old^2 over the vocabulary


Advantage = Callable[[AdvantageInputs], Tensor]  # float64 [N, T], 0 where nothing was sampled


def grpo(x: AdvantageInputs) -> Tensor:
    """Group-relative advantage, normalised by the group's standard deviation, the same for every token of a row.

    A_i = (r_i - mean(group)) / (std(group) + 1e-4), with the unbiased standard deviation. Source: DeepSeekMath
    (arXiv:2402.03300), section 4.1.2, outcome supervision. A group of one, or one whose rewards are all equal, gets 0.
    """
    centred, group, count = group_centred(x.rewards, x.groups, x.scored)
    variance = torch.zeros_like(count).index_add_(0, group, centred**2) / (count - 1).clamp(min=1)
    return spread(centred / (variance.sqrt()[group] + EPSILON), x.mask)


def gae_whitened(x: AdvantageInputs) -> Tensor:
    """Generalised advantages (``gae.gae``), whitened over the batch's sampled tokens of scored rows."""
    assert x.values is not None, "the config's rules give gae a critic"
    mask = x.mask & x.scored[:, None]
    advantages, _ = gae(x.token_rewards, x.values, mask, x.options.gamma, x.options.lam)
    return whiten(advantages, mask)


def group_centred(values: Tensor, groups: Tensor, scored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N] minus their group's mean over scored rows (0 for unscored ones), each row's group index [N], and
    the number of scored rows per group [G]."""
    _, index = torch.unique(groups, return_inverse=True)
    size = int(index.max()) + 1 if len(index) else 0
    count = torch.zeros(size, dtype=values.dtype).index_add_(0, index, scored.to(values.dtype))
    total = torch.zeros(size, dtype=values.dtype).index_add_(0, index, torch.where(scored, values, 0.0))
    return torch.where(scored, values - (total / count.clamp(min=1))[index], 0.0), index, count


def spread(rows: Tensor, mask: Tensor) -> Tensor:
    """One number per row [N] on each of its sampled tokens [N, T]."""
    return torch.where(mask, rows[:, None], 0.0)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "gae": gae_whitened}
