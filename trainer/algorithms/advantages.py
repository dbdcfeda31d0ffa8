"""What an advantage estimator looks at, and which there are.

``group_advantages.py`` compares the episodes of a group, ``token_advantages.py`` looks at every token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AdvantageOptions


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole step's batch, the same on every rank. N rows, T predicted tokens.

    Groups may differ in size, and lack members that were lost. An episode that yielded several rows counts once in
    every statistic (``row_weights``); its rows share its outcome, and each has its own turn rewards. Rows without a
    valid reward (``scored`` false) belong to no statistic and get advantage 0.
    """

    rewards: Tensor  # float64 [N], of the whole row: outcome and turn rewards
    token_rewards: Tensor  # float64 [N, T], the outcome on the last sampled token, turn rewards on their turn's last
    mask: Tensor  # bool [N, T], sampled tokens that train
    groups: Tensor  # int64 [N], any ids
    scored: Tensor  # bool [N]
    row_weights: Tensor  # float64 [N], 1 / rows of the row's episode
    lengths: Tensor  # float64 [N], sampled tokens of the row, also those that do not train
    turns: Tensor  # int64 [N, T], assistant turn of a sampled token, from 0; -1 elsewhere. For users' estimators
    options: AdvantageOptions
    parts: dict[str, Tensor]  # float64 [N] each: the named parts of the reward
    baselines: Tensor | None = None  # float64 [N], reward of the group's greedy episode
    values: Tensor | None = None  # float64 [N, T], the critic's
    logprobs: Tensor | None = None  # float64 [N, T], log pi_old
    sum_squares: Tensor | None = None  # float64 [N, T], sum of pi_old^2 over the vocabulary

    @property
    def weights(self) -> Tensor:
        """float64 [N]: what each row counts for in a statistic over episodes."""
        return torch.where(self.scored, self.row_weights, 0.0)


Advantage = Callable[[AdvantageInputs], Tensor]  # float64 [N, T], 0 where nothing was sampled


@dataclass(frozen=True)
class Groups:
    """The groups of N rows and their weighted sums."""

    index: Tensor  # int64 [N], the group's number, from 0
    weights: Tensor  # float64 [N]
    count: int

    @classmethod
    def of(cls, groups: Tensor, weights: Tensor) -> "Groups":
        """Number the groups [N] in the order of their ids."""
        ids, index = torch.unique(groups, return_inverse=True)
        return cls(index, weights, len(ids))

    def sum(self, values: Tensor) -> Tensor:
        """Weighted sum of values [N] per group, at every row of the group [N]."""
        weighted = torch.where(self.weights > 0, self.weights * values, 0.0)
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.index, weighted)[self.index]

    @property
    def size(self) -> Tensor:
        """Scored episodes of each row's group, float64 [N]; whole numbers, which sums of 1/9 and the like miss."""
        return self.sum(torch.ones_like(self.weights)).round(decimals=9)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each row's group, [N]; 0 for a group without a scored episode."""
        return self.sum(values) / self.size.clamp(min=1)

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation over each row's group, [N]; 0 for a group of one."""
        variance = self.sum((values - self.mean(values)) ** 2) / (self.size - 1).clamp(min=1)
        return variance.sqrt()

    def max(self, values: Tensor, where: Tensor) -> Tensor:
        """Largest of the values [N] where ``where`` [N], over each row's group [N]; -inf if there is none."""
        start = torch.full((self.count,), -torch.inf, dtype=values.dtype)
        return start.scatter_reduce(0, self.index[where], values[where], "amax")[self.index]

    def differs(self, values: Tensor) -> Tensor:
        """Whether the values [N] of each row's group are not all equal, bool [N]; a deviation is off by rounding."""
        counts = self.weights > 0
        return self.max(values, counts) > -self.max(-values, counts)

    def centred(self, values: Tensor) -> Tensor:
        """Values [N] minus their group's mean; 0 for rows that do not count."""
        return torch.where(self.weights > 0, values - self.mean(values), 0.0)


def spread(rows: Tensor, mask: Tensor) -> Tensor:
    """One number per row [N] on each of its sampled tokens [N, T]."""
    return torch.where(mask, rows[:, None], 0.0)
