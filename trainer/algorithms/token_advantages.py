"""Estimators that look at every token: discounted returns, a critic's values, baselines per position."""

import torch
from torch import Tensor

from rl_async.trainer.algorithms.advantages import AdvantageInputs, Groups
from rl_async.trainer.algorithms.gae import gae, whiten


def gae_advantage(x: AdvantageInputs) -> Tensor:
    """Generalised advantage estimation by a critic's values, whitened over the batch if asked to; see ``gae.py``."""
    assert x.values is not None, "gae needs a critic"
    advantages, _ = gae(x.token_rewards, x.values, x.mask, x.options.gamma, x.options.lam)
    if not x.options.whiten:
        return torch.where(x.scored[:, None], advantages, 0.0)
    return whiten(advantages, x.mask & x.scored[:, None])


def returns_to_go(x: AdvantageInputs, gamma: float = 1.0) -> Tensor:
    """Discounted sum of a row's rewards from each sampled token on, [N, T]; only sampled tokens are steps."""
    returns, _ = gae(x.token_rewards, torch.zeros_like(x.token_rewards), x.mask, gamma, 1.0)
    return returns


def reinforce_plus_plus(x: AdvantageInputs) -> Tensor:
    """Returns to go, discounted by gamma per sampled token, whitened over all sampled tokens of the batch.

    Source: REINFORCE++ (arXiv:2501.03262). No group is needed.
    """
    return whiten(returns_to_go(x, x.options.gamma), x.mask & x.scored[:, None])


def optimal_token_baseline(x: AdvantageInputs) -> Tensor:
    """A_t = G_t - sum_i(G_t W_t) / sum_i(W_t) over the group's rows that sampled column t.

    G is the return to go, W_t = sum over sampled j <= t of 1 - 2 pi_j + sum_v pi_j(v)^2, a proxy for the squared norm
    of the gradient so far. Source: the Optimal Token Baseline with the Logit-Gradient Proxy (arXiv:2602.07078), as verl
    defines it (its equations were not at hand). Columns of the group's rows are compared where they stand, which fits
    single-turn episodes, whose answers all start behind the same prompt. Beyond the end of the second longest row there
    is nothing to compare with, and the longest keeps its return. A group of one gets 0. W leaves out the importance
    weights by whose square verl may multiply its terms.
    """
    return _baseline_per_position(x, x.mask)


def tir_optimal_token_baseline(x: AdvantageInputs) -> Tensor:
    """``optimal_token_baseline`` by the number of the sampled token instead of its column: multi-turn episodes.

    Tool results of different lengths shift the columns of later turns; counting sampled tokens alone puts them beside
    each other again. As verl defines it (`tir_optimal_token_baseline`).
    """
    order = torch.argsort((~x.mask).to(torch.int8), dim=1, stable=True)  # sampled tokens first, in order
    packed = torch.arange(x.mask.shape[1])[None] < x.mask.sum(1, keepdim=True)
    result = torch.zeros_like(x.token_rewards)
    return result.scatter(1, order, _baseline_per_position(x, packed, order))


def _baseline_per_position(x: AdvantageInputs, mask: Tensor, order: Tensor | None = None) -> Tensor:
    """Advantages at the positions of ``mask`` [N, T]; ``order`` brings tokens to their positions, None: as they are."""
    assert x.logprobs is not None and x.sum_squares is not None, "the baseline needs the distribution of pi_old"
    # a squared norm is never negative, but the rounding of a nearly certain token is, and weights must not be
    norms = (1 - 2 * x.logprobs.exp() + x.sum_squares).clamp(min=0)
    energy = torch.where(x.mask, norms, 0.0).cumsum(1)
    returns = returns_to_go(x)
    if order is not None:
        energy, returns = energy.gather(1, order), returns.gather(1, order)
    result = torch.zeros_like(returns)
    groups = Groups.of(x.groups, x.weights)
    for group in range(groups.count):
        rows = torch.nonzero((groups.index == group) & x.scored).flatten()
        if not len(rows) or groups.size[rows[0]] <= 1:
            continue
        there = mask[rows]
        weight = torch.where(there, energy[rows] * groups.weights[rows, None], 0.0)
        total = weight.sum(0)
        baseline = torch.where(total > 0, (weight * returns[rows]).sum(0) / total, 0.0)  # total 0: no gradient so far
        baseline[_second_end(there) :] = 0.0
        result[rows] = torch.where(there, returns[rows] - baseline, 0.0)
    return result


def _second_end(there: Tensor) -> int:
    """Where the second longest of two rows or more [n, T] ends: positions from there on are at most one row's."""
    ends = (there * torch.arange(1, there.shape[1] + 1)).amax(1)
    return int(ends.sort(descending=True).values[1])
