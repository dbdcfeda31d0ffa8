"""Advantage estimators, the reward shaping before them, and a critic's values: from rewards to a number per token.

Estimators are functions of the whole step's batch. Outcome estimators give one advantage per row, from the rewards of
its group, on each of the row's sampled tokens; turn rewards enter through the episode's total reward, and an episode
alone in its group gets 0 (``remax`` apart). Token estimators look at every token: discounted returns, a critic's
values, baselines per position. To add one: write the function here, name it in ``ADVANTAGES``, and declare its traits
in ``configs/schema/formulas.py``.

Shaping comes before, as pure functions of the batch's headers, which every rank sees:

    scored reward ── + overlong penalty ── / scale ── clip ──> advantages ── x repeats ──> loss of the rows that train

Rewards are recorded as they were scored, and the queue's dynamic sampling looks at those. The penalty belongs to the
reward (DAPO adds it to the correctness reward), scaling sees the reward that is learned from, and clipping bounds the
result.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AdvantageOptions, ShapingConfig
from rl_async.messages import TIMEOUT, TrajectoryHeader
from rl_async.trainer.algorithms.rows import Rows, by_rows, on_tokens, row_sums

# Added to a standard deviation that divides.
EPSILON = 1e-4


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole step's batch, the same on every rank. N rows, T predicted tokens.

    A user's estimator gets the tensors per token padded, as they are written below, and ``rows`` None. The project's
    own take either form, and get them packed: [M] in place of [N, T].

    Groups may differ in size, and lack members that were lost. An episode that yielded several rows counts once in
    every statistic (``row_weights``); its rows share its total reward, and each has the outcome and its own turn
    rewards on its tokens. Rows without a valid reward (``scored`` false) belong to no statistic and get advantage 0.

    Where episodes have several roles, each stands for an episode of its own: ``groups`` are those of one role, and
    rewards and weights those of the row's role in its episode.
    """

    rewards: Tensor  # float64 [N], of the row's role in all its episode: outcome and all turn rewards
    token_rewards: Tensor  # float64 [N, T], the outcome on the last sampled token, turn rewards on their turn's last
    mask: Tensor  # bool [N, T], sampled tokens that train
    groups: Tensor  # int64 [N], any ids
    scored: Tensor  # bool [N]
    row_weights: Tensor  # float64 [N], 1 / rows of the row's role in its episode: ``player_weights`` of the batch
    lengths: Tensor  # float64 [N], sampled tokens of the row, also those that do not train
    turns: Tensor  # int64 [N, T], assistant turn of a sampled token, from 0; -1 elsewhere. For users' estimators
    options: AdvantageOptions
    parts: dict[str, Tensor]  # float64 [N] each: the named parts of the reward
    baselines: Tensor | None = None  # float64 [N], reward of the group's greedy episode
    values: Tensor | None = None  # float64 [N, T], the critic's
    logprobs: Tensor | None = None  # float64 [N, T], log pi_old
    sum_squares: Tensor | None = None  # float64 [N, T], sum of pi_old^2 over the vocabulary
    importance: Tensor | None = None  # float64 [N, T], the correction's weights, 0 where it rejects, None if bypassed
    cut: Tensor | None = None  # bool [N], rows that ended because of a limit on tokens, turns or time
    rows: Rows | None = None  # where packed rows stand

    @property
    def weights(self) -> Tensor:
        """float64 [N], the weight of each row in a statistic over episodes."""
        return torch.where(self.scored, self.row_weights, 0.0)

    @property
    def bootstrap(self) -> Tensor | None:
        """bool [N], the rows whose last state `gae` takes for one that goes on; None if it takes none."""
        return self.cut if self.options.bootstrap_cut else None

    def spread(self, rows: Tensor) -> Tensor:
        """Put one number per row [N] on each of its sampled tokens."""
        return torch.where(self.mask, on_tokens(rows, self.rows), 0.0)

    def padded(self) -> "AdvantageInputs":
        """The same with packed tensors padded."""
        assert self.rows is not None
        pad = self.rows.pad_all
        return replace(
            self,
            token_rewards=pad(self.token_rewards),
            mask=pad(self.mask),
            turns=pad(self.turns, fill=-1),
            values=None if self.values is None else pad(self.values),
            logprobs=None if self.logprobs is None else pad(self.logprobs),
            sum_squares=None if self.sum_squares is None else pad(self.sum_squares),
            importance=None if self.importance is None else pad(self.importance),
            rows=None,
        )


AdvantageFn = Callable[[AdvantageInputs], Tensor]  # float64 [N, T] or packed [M], 0 where nothing was sampled


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
        """Largest of the values [N] where ``where`` [N], over each row's group [N]; -inf without any."""
        start = torch.full((self.count,), -torch.inf, dtype=values.dtype)
        return start.scatter_reduce(0, self.index[where], values[where], "amax")[self.index]

    def differs(self, values: Tensor) -> Tensor:
        """Whether the values [N] of each row's group are not all equal, bool [N]; a deviation is off by rounding."""
        counts = self.weights > 0
        return self.max(values, counts) > -self.max(-values, counts)

    def centred(self, values: Tensor) -> Tensor:
        """Values [N] minus their group's mean; exactly 0 in a group whose values are equal, and for rows that do not
        count. Rounding would be scaled up by a division or whitening, and by the optimizer."""
        tells = self.differs(values) | ~values.isfinite()
        return torch.where((self.weights > 0) & tells, values - self.mean(values), 0.0)


def spread(rows: Tensor, mask: Tensor) -> Tensor:
    """Put one number per row [N] on each of its sampled tokens [N, T]; for users' estimators."""
    return torch.where(mask, rows[:, None], 0.0)


# --- Outcome estimators


def _groups(x: AdvantageInputs) -> Groups:
    return Groups.of(x.groups, x.weights)


def grpo(x: AdvantageInputs) -> Tensor:
    """A_i = (r_i - mean) / (std + 1e-4) over the group, with the unbiased standard deviation.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision.
    """
    groups = _groups(x)
    return x.spread(groups.centred(x.rewards) / (groups.std(x.rewards) + EPSILON))


def dr_grpo(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - mean: no standard deviation, which would favour groups that are nearly always right or wrong.

    Source: Dr. GRPO (arXiv:2503.20783); its other half is the aggregation ``seq-mean-token-sum-norm``.
    """
    return x.spread(_groups(x).centred(x.rewards))


def rloo(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) (r_i - mean). Source: RLOO (arXiv:2402.14740)."""
    groups = _groups(x)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    return x.spread(factor * groups.centred(x.rewards))


def opo(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - sum_j(l_j r_j) / sum_j(l_j), l the number of sampled tokens: the length-weighted optimal baseline.

    Source: OPO (arXiv:2505.23585). It assumes that a sequence's squared gradient grows with its length.
    """
    lengths = torch.where(x.scored, x.lengths, 0.0)
    groups = Groups.of(x.groups, lengths)
    baseline = groups.sum(x.rewards) / groups.size.clamp(min=1)
    alone = _groups(x).size <= 1
    return x.spread(torch.where(x.scored & ~alone, x.rewards - baseline, 0.0))


def gpg(x: AdvantageInputs) -> Tensor:
    """A_i = alpha (r_i - mean), alpha = episodes / episodes of groups whose rewards differ, over the batch.

    Source: GPG (arXiv:2504.02546) with F_norm = 1: alpha makes up for groups that give no gradient.
    """
    groups = _groups(x)
    centred = groups.centred(x.rewards)
    teaching = groups.differs(x.rewards)
    alpha = x.weights.sum() / x.weights[teaching].sum().clamp(min=1)
    return x.spread(alpha * centred)


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
    return x.spread(gap / scale)


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
    return x.spread(torch.where(x.scored, x.rewards - x.baselines, 0.0))


def _whitened(rows: Tensor, x: AdvantageInputs) -> Tensor:
    """Rows [N] on their tokens, with mean 0 and standard deviation 1 over the scored tokens of the batch."""
    return whiten(x.spread(rows), x.mask & on_tokens(x.scored, x.rows))


# --- Token estimators


def gae_advantage(x: AdvantageInputs) -> Tensor:
    """Generalised advantage estimation by a critic's values (``gae``), whitened over the batch on demand."""
    assert x.values is not None, "gae needs a critic"
    advantages, _ = gae(x.token_rewards, x.values, x.mask, x.options.gamma, x.options.lam, x.bootstrap, x.rows)
    if not x.options.whiten:
        return torch.where(on_tokens(x.scored, x.rows), advantages, 0.0)
    return whiten(advantages, x.mask & on_tokens(x.scored, x.rows))


def returns_to_go(x: AdvantageInputs, gamma: float = 1.0) -> Tensor:
    """Discounted sum of a row's rewards from each sampled token on; only sampled tokens are steps."""
    returns, _ = gae(x.token_rewards, torch.zeros_like(x.token_rewards), x.mask, gamma, 1.0, rows=x.rows)
    return returns


def reinforce_plus_plus(x: AdvantageInputs) -> Tensor:
    """Returns to go, discounted by gamma per sampled token, whitened over all sampled tokens of the batch.

    Source: REINFORCE++ (arXiv:2501.03262). No group is needed.
    """
    return whiten(returns_to_go(x, x.options.gamma), x.mask & on_tokens(x.scored, x.rows))


def optimal_token_baseline(x: AdvantageInputs) -> Tensor:
    """A_t = G_t - sum_i(G_t W_t) / sum_i(W_t) over the group's rows that sampled column t.

    G is the return to go, W_t = sum over sampled j <= t of w_j^2 (1 - 2 pi_j + sum_v pi_j(v)^2), a proxy for the
    squared norm of the gradient so far, in which the correction's weight w is a factor of token j's. Source: the
    Optimal Token Baseline with the Logit-Gradient Proxy (arXiv:2602.07078), as verl defines it (its equations were not
    at hand). Columns of the group's rows are compared where they stand, which fits single-turn episodes, whose answers
    all start behind the same prompt. Beyond the end of the second longest row there is nothing to compare with, and the
    longest keeps its return. A group of one gets 0.
    """
    return _baseline_per_position(x, by_column=True)


def tir_optimal_token_baseline(x: AdvantageInputs) -> Tensor:
    """``optimal_token_baseline`` by the number of the sampled token instead of its column: multi-turn episodes.

    Tool results of different lengths shift the columns of later turns; counting sampled tokens alone puts them beside
    each other again. As verl defines it (`tir_optimal_token_baseline`).
    """
    return _baseline_per_position(x, by_column=False)


def _baseline_per_position(x: AdvantageInputs, *, by_column: bool) -> Tensor:
    """Advantages over the mean of the group's returns at the same column, or at the same number of a sampled token."""
    assert x.logprobs is not None and x.sum_squares is not None, "the baseline needs the distribution of pi_old"
    # a squared norm is never negative, but the rounding of a nearly certain token is, and weights must not be
    norms = (1 - 2 * x.logprobs.exp() + x.sum_squares).clamp(min=0)
    if x.importance is not None:
        norms = norms * x.importance**2
    (energy,) = by_rows(lambda values: (values.cumsum(1),), x.rows, torch.where(x.mask, norms, 0.0))
    groups = Groups.of(x.groups, x.weights)
    # From here on sampled tokens alone, [m], by row and position.
    energy, returns = energy[x.mask], returns_to_go(x)[x.mask]
    counts = row_sums(x.mask, x.rows).long()
    row = torch.arange(len(counts)).repeat_interleave(counts)
    if by_column:
        position = _columns(x)[x.mask]
    else:
        position = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    ends = torch.zeros_like(counts).scatter_reduce(0, row, position + 1, "amax")
    second = _second_ends(groups, ends, x.scored)
    compared = (x.scored & (groups.size > 1))[row]
    # Where each group's positions begin in the sums over its rows.
    most = torch.zeros(groups.count, dtype=torch.int64).scatter_reduce(0, groups.index, ends, "amax")
    place = (most.cumsum(0) - most)[groups.index][row] + position
    weight = torch.where(compared, energy * groups.weights[row], 0.0)
    sums = torch.zeros(2, int(most.sum()), dtype=torch.float64)
    total, weighted = sums[0].index_add_(0, place, weight), sums[1].index_add_(0, place, weight * returns)
    # Where the total is 0 there was no gradient so far.
    there = compared & (total[place] > 0) & (position < second[row])
    baseline = torch.where(there, weighted[place] / total[place], 0.0)
    advantages = torch.where(compared, returns - baseline, 0.0)
    return torch.zeros_like(x.mask, dtype=torch.float64).masked_scatter_(x.mask, advantages)


def _columns(x: AdvantageInputs) -> Tensor:
    """The number of each token in its row, in the shape of the mask."""
    if x.rows is None:
        return torch.arange(x.mask.shape[1]).expand(x.mask.shape)
    return torch.arange(len(x.mask)) - on_tokens(x.rows.starts, x.rows)


def _second_ends(groups: Groups, ends: Tensor, scored: Tensor) -> Tensor:
    """Where the second longest scored row of each row's group ends, int64 [N]; 0 if it is alone."""
    order = torch.where(scored, ends, -1).argsort(descending=True)
    order = order[groups.index[order].argsort(stable=True)]
    first = torch.searchsorted(groups.index[order], torch.arange(groups.count))
    second = order[(first + 1).clamp(max=len(order) - 1)]
    alone = (groups.index[second] != torch.arange(groups.count)) | ~scored[second]
    return torch.where(alone, 0, ends[second])[groups.index]


ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae_advantage,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}


VARIANCE_EPSILON = 1e-8


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
    return torch.where(mask, (values - picked.mean()) * torch.rsqrt(picked.var() + VARIANCE_EPSILON), 0.0)


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


SHAPING_EPSILON = 1e-8
# Beside (seed, step), so that this draw is independent of that of mini-batches.
RESAMPLE = 1
# Finish reasons of trajectories that reached a limit on tokens or time, and of all that a limit cut.
CUT_OFF = ("length", TIMEOUT)
LIMITS = (*CUT_OFF, "max_turns")
# The weights of max_random.
BEST_AND_OTHERS = (0.4, 0.1)


def shaped_rewards(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Compute the rewards that advantages see, float64 [N]; those of unscored rows are 0."""
    scored = torch.tensor([h.scored for h in headers])
    values = torch.tensor([h.reward for h in headers], dtype=torch.float64)
    values = torch.where(scored, values + overlong_penalties(headers, options), 0.0)
    values = values / reward_divisor(headers, options)
    if options.reward_clip is not None:
        values = values.clamp(-options.reward_clip, options.reward_clip)
    return values


def overlong_penalties(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Compute the soft overlong punishment, float64 [N], from -factor to 0.

    With L sampled tokens in all rows of the episode, or of its role in it, which have one reward: 0 up to max - cache,
    ((max - cache) - L) / cache up to max, -1 beyond. Source: DAPO (arXiv:2503.14476), eq. 13; there the factor is 1.
    """
    sampled = Counter[tuple[str, str]]()
    for h in headers:
        sampled[h.episode_id, h.role] += h.sampled
    lengths = torch.tensor([sampled[h.episode_id, h.role] for h in headers], dtype=torch.float64)
    overlong = options.overlong
    if overlong is None:
        return torch.zeros_like(lengths)
    begins = overlong.max_tokens - overlong.cache_tokens
    return overlong.factor * ((begins - lengths) / overlong.cache_tokens).clamp(-1.0, 0.0)


def reward_divisor(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> float:
    """Return the divisor of outcome and turn rewards: the biased standard deviation of the scored outcomes that train.

    Penalties are included. 1 if the deviation is 0 or ``reward_scale`` is none.

    The mean is not taken away, so signs stay. Source: reward scaling, arXiv:2005.12729, section 2, which divides by
    the deviation of a rolling sum of discounted rewards. Here it is that of the batch, so that a step depends on its
    batch alone and a checkpoint has nothing to keep.
    """
    penalised = torch.tensor([h.reward for h in headers], dtype=torch.float64) + overlong_penalties(headers, options)
    known = penalised[torch.tensor([h.scored and not h.baseline for h in headers])]
    if options.reward_scale == "none" or not known.numel():
        return 1.0
    deviation = known.std(correction=0).item()
    return deviation if deviation > SHAPING_EPSILON else 1.0


def trainable_rows(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Which rows train, bool [N]. Source: overlong filtering, DAPO (arXiv:2503.14476), section 3.4."""
    return torch.tensor([not (options.overlong_filter and h.finish_reason in CUT_OFF) for h in headers])


def cut_rows(headers: Sequence[TrajectoryHeader]) -> Tensor:
    """Which rows ended because of a limit on tokens, turns or time, bool [N]: the episode could have gone on."""
    return torch.tensor([h.finish_reason in LIMITS for h in headers])


def row_repeats(headers: Sequence[TrajectoryHeader], options: ShapingConfig, seed: int, step: int) -> Tensor:
    """Count how often each row is drawn, float64 [N]: N_scored draws with replacement, fixed by (seed, step).

    Source: PF-PPO (arXiv:2409.06957) keeps rows whose rewards are reliable. The weights are those of verl's
    ``compute_pf_ppo_reweight_data``, over the whole batch; the paper's own table of weights was not at hand.

    A row that counts k times has its advantage multiplied by k, which is k copies of it in every loss that is linear in
    positive factors of the advantage. The loss is divided by the counts of the batch as it was, and KL and entropy
    terms see every row once.
    """
    scored = torch.tensor([h.scored and not h.baseline for h in headers])
    counts = torch.ones(len(headers), dtype=torch.float64)
    values = shaped_rewards(headers, options)
    if options.resample == "none" or not scored.any() or not values.isfinite().all():
        # An infinite reward makes the loss diverge, and that error names the step.
        return counts
    odds = resample_weights(values[scored].numpy(), options.resample)
    draw = np.random.default_rng([seed & 0xFFFFFFFF, step, RESAMPLE])
    counts[scored] = torch.from_numpy(draw.multinomial(len(odds), odds / odds.sum())).double()
    return counts


# The exponent of PF-PPO's weights in verl.
RESAMPLE_POWER = 2.0


def resample_weights(values: np.ndarray, method: str, power: float = RESAMPLE_POWER) -> np.ndarray:
    """Weigh the scored rewards for drawing, float64 [n], never 0."""
    match method:
        case "pow":
            weights = np.abs(values) ** power
        case "max_min":
            weights = ((values == values.max()) | (values == values.min())).astype(np.float64)
        case "max_random":
            weights = np.where(values == values.max(), *BEST_AND_OTHERS)
        case _:
            weights = np.ones_like(values)
    return weights + SHAPING_EPSILON


def shaping_metrics(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> dict[str, float]:
    """Report what shaping did to a batch; empty if no option changes rewards or rows."""
    if options == ShapingConfig(dynamic_sampling=options.dynamic_sampling, max_refills=options.max_refills):
        return {}
    scored = torch.tensor([h.scored and not h.baseline for h in headers])
    return {
        "shaping/reward_mean": shaped_rewards(headers, options)[scored].mean().item(),
        "shaping/overlong_penalty_mean": overlong_penalties(headers, options).mean().item(),
        "shaping/filtered_fraction": 1.0 - trainable_rows(headers, options).double().mean().item(),
    }
