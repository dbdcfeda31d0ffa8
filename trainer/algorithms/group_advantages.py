"""Outcome estimators: one advantage per row, from the rewards of its group, on each of the row's sampled tokens.

Turn rewards enter through the row's total reward. A group of one teaches nothing (``remax`` apart): its advantage is 0.
"""

import torch
from torch import Tensor

from rl_async.trainer.algorithms.advantages import AdvantageInputs, Groups, spread
from rl_async.trainer.algorithms.gae import whiten

EPSILON = 1e-4


def _groups(x: AdvantageInputs) -> Groups:
    return Groups.of(x.groups, x.weights)


def grpo(x: AdvantageInputs) -> Tensor:
    """A_i = (r_i - mean) / (std + 1e-4) over the group, with the unbiased standard deviation.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision.
    """
    groups = _groups(x)
    return spread(groups.centred(x.rewards) / (groups.std(x.rewards) + EPSILON), x.mask)


def dr_grpo(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - mean: no standard deviation, which would favour groups that are nearly always right or wrong.

    Source: Dr. GRPO (arXiv:2503.20783); its other half is the aggregation ``seq-mean-token-sum-norm``.
    """
    return spread(_groups(x).centred(x.rewards), x.mask)


def rloo(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) (r_i - mean). Source: RLOO (arXiv:2402.14740)."""
    groups = _groups(x)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    return spread(factor * groups.centred(x.rewards), x.mask)


def opo(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - sum_j(l_j r_j) / sum_j(l_j), l the number of sampled tokens: the length-weighted optimal baseline.

    Source: OPO (arXiv:2505.23585). It assumes that a sequence's squared gradient grows with its length.
    """
    lengths = torch.where(x.scored, x.lengths, 0.0)
    groups = Groups.of(x.groups, lengths)
    baseline = groups.sum(x.rewards) / groups.size.clamp(min=1)
    alone = _groups(x).size <= 1
    return spread(torch.where(x.scored & ~alone, x.rewards - baseline, 0.0), x.mask)


def gpg(x: AdvantageInputs) -> Tensor:
    """A_i = alpha (r_i - mean), alpha = episodes / episodes of groups whose rewards differ, over the batch.

    Source: GPG (arXiv:2504.02546) with F_norm = 1: alpha makes up for groups that give no gradient.
    """
    groups = _groups(x)
    centred = groups.centred(x.rewards)
    teaching = groups.differs(x.rewards)
    alpha = x.weights.sum() / x.weights[teaching].sum().clamp(min=1)
    return spread(alpha * centred, x.mask)


def grpo_passk(x: AdvantageInputs) -> Tensor:
    """Only the best episode of a group learns: A = (r_best - r_second) / (std + 1e-4), all others 0.

    Rows stand for episodes here: of several rows of one episode two may be best and second best.

    Source: Tang et al. (arXiv:2503.19595), the leave-one-out advantage of the group's maximum, max(r) - max(the others'
    r), which is 0 for all but a single best one. verl divides it by the standard deviation; ``passk_std=false`` leaves
    that out.
    """
    groups = _groups(x)
    best = x.scored & (x.rewards == groups.max(x.rewards, x.scored))
    second = groups.max(x.rewards, x.scored & ~best)
    alone = best & (groups.sum(best.double()) <= 1 + EPSILON) & second.isfinite()
    gap = torch.where(alone, x.rewards - second, 0.0)
    scale = groups.std(x.rewards) + EPSILON if x.options.passk_std else 1.0
    return spread(gap / scale, x.mask)


def gdpo(x: AdvantageInputs) -> Tensor:
    """Every part of the reward is normalised in its group by itself, then summed and whitened over the batch.

    A = whiten(sum_k w_k (r_k - mean_k) / (std_k + 1e-4)), so that a part of small spread is not drowned by another.
    w_k from ``gdpo_weights``, 1 if not named (``advantage_inputs`` names all, so that a penalty stays one). Without
    parts the reward is the only one; turn rewards do not enter. Source: GDPO (arXiv:2601.05242).
    """
    groups = _groups(x)
    total = torch.zeros_like(x.rewards)
    for name, values in (x.parts or {"": x.rewards}).items():
        weight = x.options.gdpo_weights.get(name, 1.0)
        total += weight * groups.centred(values) / (groups.std(values) + EPSILON)
    return _whitened(total, x)


def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Tensor:
    """The group's mean as baseline, then whitened over all sampled tokens of the batch.

    Source: REINFORCE++ (arXiv:2501.03262), the variant with a group baseline.
    """
    return _whitened(_groups(x).centred(x.rewards), x)


def remax(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - r of the greedy episode of the same task, both with their turn rewards.

    Source: ReMax (arXiv:2310.10505). A group whose greedy episode has no score gets 0.
    """
    assert x.baselines is not None, "remax needs greedy episodes"
    return spread(torch.where(x.scored, x.rewards - x.baselines, 0.0), x.mask)


def _whitened(rows: Tensor, x: AdvantageInputs) -> Tensor:
    """Rows [N] on their tokens, with mean 0 and standard deviation 1 over the scored tokens of the batch."""
    return whiten(spread(rows, x.mask), x.mask & x.scored[:, None])
