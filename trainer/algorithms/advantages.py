"""Advantage estimators, the reward shaping before them, and formulas for a critic's values.

Estimators are functions of the whole step's batch. Outcome estimators give one advantage per row, from the rewards of
its group, on each of the row's sampled tokens; turn rewards enter through the episode's total reward, and an episode
alone in its group gets 0 (except with ``remax``). Token estimators differ by token: discounted returns, a critic's
values, baselines per position. To add one, write the function here, name it in ``ADVANTAGES``, and declare its traits
in ``configs/schema/algorithm.py``.

Shaping comes first. It consists of pure functions of the batch's headers, which every rank sees:

    scored reward ── length ── + overlong penalty ── / scale ── clip ──> advantages ── x repeats ──> loss of rows

Records, and the queue's dynamic sampling, use the rewards as they were scored. The penalty is part of the reward (DAPO
adds it to the correctness reward), scaling applies to the sum, and clipping bounds the result.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import AdvantageOptions, ShapingConfig
from rl_async.messages import TIMEOUT, TrajectoryHeader
from rl_async.trainer.packing import Rows, by_rows, on_tokens, row_sums

# Added to standard deviations in denominators.
EPSILON = 1e-4


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole step's batch, the same on every rank, with N rows and T predicted tokens.

    A user's estimator gets the tensors per token padded, as described below, and ``rows`` None. The project's own
    accept either form, and get them packed: [M] in place of [N, T].

    Groups may differ in size, and lack members that were lost. An episode with several rows counts once in every
    statistic (``row_weights``); its rows share its total reward, and each has the outcome and its own turn rewards on
    its tokens. Rows without a valid reward (``scored`` false) are left out of statistics and get advantage 0.

    If episodes have several roles, each role counts as a separate episode: a group holds rows of one role, and rewards
    and weights are those of the row's role in its episode.

    An estimator returns float64 [N, T], 0 where nothing was sampled. All tensors are on the host.

    Attributes:
        rewards: float64 [N], of the row's role in all its episode: outcome and all turn rewards.
        token_rewards: float64 [N, T], the outcome on the last sampled token, turn rewards on their turn's last.
        mask: bool [N, T], sampled tokens that train.
        groups: int64 [N], any ids.
        scored: bool [N], rows with a valid reward.
        row_weights: float64 [N], 1 / rows of the row's role in its episode: ``player_weights`` of the batch.
        lengths: float64 [N], sampled tokens of the row, also those that do not train.
        turns: int64 [N, T], assistant turn of a sampled token, from 0; -1 elsewhere. For users' estimators.
        options: section ``algorithm.advantage_options`` of the config.
        parts: float64 [N] each, the named parts of the reward.
        baselines: float64 [N], reward of the group's greedy episode, or None if none was played.
        values: float64 [N, T], the critic's, or None without one.
        logprobs: float64 [N, T], log pi_old, or None where it was not computed.
        reference: float64 [N, T], log-probabilities by the reference model, or None without one.
        process: float64 [N, T], log-probabilities by the process reward model, or None without one.
        sum_squares: float64 [N, T], sum of pi_old^2 over the vocabulary, for the estimators that declare it.
        importance: float64 [N, T], the correction's weights, 0 where it rejects; None if bypassed.
        states: int64 [N, T], a checksum of the messages that the turn of a sampled token answers, for the estimators
            that declare it.
        cut: bool [N], rows that ended because of a limit on tokens, turns or time.
        rows: the places of packed rows.
    """

    rewards: Tensor
    token_rewards: Tensor
    mask: Tensor
    groups: Tensor
    scored: Tensor
    row_weights: Tensor
    lengths: Tensor
    turns: Tensor
    options: AdvantageOptions
    parts: dict[str, Tensor]
    baselines: Tensor | None = None
    values: Tensor | None = None
    logprobs: Tensor | None = None
    reference: Tensor | None = None
    process: Tensor | None = None
    sum_squares: Tensor | None = None
    importance: Tensor | None = None
    states: Tensor | None = None
    cut: Tensor | None = None
    rows: Rows | None = None

    @property
    def weights(self) -> Tensor:
        """float64 [N], the weight of each row in a statistic over episodes."""
        return torch.where(self.scored, self.row_weights, 0.0)

    @property
    def bootstrap(self) -> Tensor | None:
        """bool [N], the rows whose last state `gae` treats as unfinished; None if it treats none so."""
        return self.cut if self.options.bootstrap_cut else None

    @property
    def lam(self) -> float | Tensor:
        """GAE's lambda, or float64 [N], that of each row by its length.

        1 - 1 / (alpha l), at least 0, for a row with l tokens: the sum of its powers is then about alpha l. Source:
        length-adaptive GAE, VAPO (arXiv:2504.05118), section 4.2, with alpha 0.05.
        """
        alpha = self.options.lam_alpha
        if alpha is None:
            return self.options.lam
        return (1 - 1 / (alpha * row_sums(self.mask, self.rows).clamp(min=1))).clamp(min=0)

    def spread(self, rows: Tensor) -> Tensor:
        """Put one number per row [N] on each of its sampled tokens."""
        return torch.where(self.mask, on_tokens(rows, self.rows), 0.0)

    def padded(self) -> "AdvantageInputs":
        """Return a copy with padded tensors in place of packed ones."""
        assert self.rows is not None
        pad = self.rows.pad_all
        return replace(
            self,
            token_rewards=pad(self.token_rewards),
            mask=pad(self.mask),
            turns=pad(self.turns, fill=-1),
            values=None if self.values is None else pad(self.values),
            logprobs=None if self.logprobs is None else pad(self.logprobs),
            reference=None if self.reference is None else pad(self.reference),
            process=None if self.process is None else pad(self.process),
            sum_squares=None if self.sum_squares is None else pad(self.sum_squares),
            importance=None if self.importance is None else pad(self.importance),
            states=None if self.states is None else pad(self.states),
            rows=None,
        )


# Returns float64 [N, T] or packed [M], 0 for tokens that were not sampled.
AdvantageFn = Callable[[AdvantageInputs], Tensor]


@dataclass(frozen=True)
class Groups:
    """The groups of N rows, numbered from 0, and their weighted statistics."""

    index: Tensor  # int64 [N]
    weights: Tensor  # float64 [N]
    count: int

    @classmethod
    def of(cls, groups: Tensor, weights: Tensor) -> "Groups":
        """Number the groups [N] in the order of their ids."""
        ids, index = torch.unique(groups, return_inverse=True)
        return cls(index, weights, len(ids))

    def sum(self, values: Tensor) -> Tensor:
        """Sum values [N] with their weights over each row's group, [N]."""
        weighted = torch.where(self.weights > 0, self.weights * values, 0.0)
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.index, weighted)[self.index]

    @property
    def size(self) -> Tensor:
        """The number of scored episodes in each row's group, float64 [N], rounded, since sums of 1/9 miss integers."""
        return self.sum(torch.ones_like(self.weights)).round(decimals=9)

    def mean(self, values: Tensor) -> Tensor:
        """Average values over each row's group, [N]; 0 for a group without a scored episode."""
        return self.sum(values) / self.size.clamp(min=1)

    def std(self, values: Tensor) -> Tensor:
        """Compute the unbiased standard deviation over each row's group, [N]; 0 for a group of one."""
        variance = self.sum((values - self.mean(values)) ** 2) / (self.size - 1).clamp(min=1)
        return variance.sqrt()

    def max(self, values: Tensor, where: Tensor) -> Tensor:
        """Return the largest value with ``where`` [N] in each row's group, [N]; -inf without any."""
        start = torch.full((self.count,), -torch.inf, dtype=values.dtype)
        return start.scatter_reduce(0, self.index[where], values[where], "amax")[self.index]

    def differs(self, values: Tensor) -> Tensor:
        """Whether the values [N] in each row's group differ, bool [N]; rounding would spoil a deviation for this."""
        counts = self.weights > 0
        return self.max(values, counts) > -self.max(-values, counts)

    def centred(self, values: Tensor) -> Tensor:
        """Subtract the group's mean from values [N]; exactly 0 in a group of equal values, and for rows of weight 0.

        Otherwise a division, whitening or the optimizer would scale up rounding errors.
        """
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
    """A_i = r_i - mean, without a standard deviation, which would favour groups that are nearly always right or wrong.

    Source: Dr. GRPO (arXiv:2503.20783); its other half is the aggregation ``seq-mean-token-sum-norm``.
    """
    return x.spread(_groups(x).centred(x.rewards))


def max_rl(x: AdvantageInputs) -> Tensor:
    """A_i = (r_i - mean) / mean, and 0 in a group whose mean is not positive.

    For rewards of 0 and 1, group size n makes it the gradient of the likelihood of success to order n: tasks that are
    rarely solved weigh 1 / pass rate. Source: MaxRL (arXiv:2602.02710).
    """
    groups = _groups(x)
    mean = groups.mean(x.rewards)
    return x.spread(torch.where(mean > 0, groups.centred(x.rewards) / mean, 0.0))


def rloo(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) (r_i - mean). Source: RLOO (arXiv:2402.14740)."""
    groups = _groups(x)
    factor = groups.size / (groups.size - 1).clamp(min=1)
    return x.spread(factor * groups.centred(x.rewards))


def dpo(x: AdvantageInputs) -> Tensor:
    """Online DPO on all pairs of a group with different rewards: A_i = s (sum over pairs of +-beta sigmoid(-h)).

    h = beta (log pi_old/pi_ref of the better row - log pi_old/pi_ref of the worse one), over their sampled tokens; the
    sign is + for the better. s is the batch's rows per pair: with loss ``reinforce`` and ``seq-mean-token-sum`` the
    first gradient is that of the mean of -log sigmoid(h) over pairs (DPO, arXiv:2305.18290, equation 7; from own
    samples: arXiv:2402.04792).
    """
    assert x.logprobs is not None and x.reference is not None, "dpo needs a reference"
    beta, groups, pairs = x.options.dpo_beta, _groups(x), 0
    ratios = row_sums(torch.where(x.mask, x.logprobs - x.reference, 0.0), x.rows)
    advantages = torch.zeros_like(ratios)
    for group in range(groups.count):
        rows = ((groups.index == group) & x.scored).nonzero().flatten()
        better = x.rewards[rows, None] > x.rewards[None, rows]
        slopes = beta * torch.sigmoid(-beta * (ratios[rows, None] - ratios[None, rows])) * better
        advantages[rows] = slopes.sum(1) - slopes.sum(0)
        pairs += int(better.sum())
    return x.spread(x.row_weights.sum() / max(pairs, 1) * advantages)


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

    Source: GPG (arXiv:2504.02546) with F_norm = 1: alpha compensates for groups without gradient.
    """
    groups = _groups(x)
    centred = groups.centred(x.rewards)
    teaching = groups.differs(x.rewards)
    alpha = x.weights.sum() / x.weights[teaching].sum().clamp(min=1)
    return x.spread(alpha * centred)


def grpo_passk(x: AdvantageInputs) -> Tensor:
    """Only the best episode of a group learns: A = (r_best - r_second) / (std + 1e-4), all others 0.

    Rows count as episodes here, so two rows of the same episode may be best and second best.

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
    """Normalise every part of the reward separately in its group, then sum the parts and whiten over the batch.

    A = whiten(sum_k w_k (r_k - mean_k) / (std_k + 1e-4)), so that no part is drowned by another of larger spread. w_k
    is that of ``gdpo_weights``, by default 1 (``advantage_inputs`` names all, so that a penalty stays one). Without
    parts, the reward is the only one; turn rewards are left out. Source: GDPO (arXiv:2601.05242).
    """
    groups = _groups(x)
    total = torch.zeros_like(x.rewards)
    for name, values in (x.parts or {"": x.rewards}).items():
        weight = x.options.gdpo_weights.get(name, 1.0)
        total += weight * groups.centred(values) / (groups.std(values) + EPSILON)
    return _whitened(total, x)


def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Tensor:
    """Subtract the group's mean as a baseline, then whiten over all sampled tokens of the batch.

    Source: REINFORCE++ (arXiv:2501.03262), the variant with a group baseline.
    """
    return _whitened(_groups(x).centred(x.rewards), x)


def remax(x: AdvantageInputs) -> Tensor:
    """A_i = r_i - r_greedy, the reward of the greedy episode of the same task, both with their turn rewards.

    Source: ReMax (arXiv:2310.10505). A group whose greedy episode has no score gets 0.
    """
    assert x.baselines is not None, "remax needs greedy episodes"
    return x.spread(torch.where(x.scored, x.rewards - x.baselines, 0.0))


def _whitened(rows: Tensor, x: AdvantageInputs) -> Tensor:
    """Spread numbers of rows [N] over their tokens, whitened over the scored tokens of the batch."""
    return whiten(x.spread(rows), x.mask & on_tokens(x.scored, x.rows))


# --- Token estimators


def gae_advantage(x: AdvantageInputs) -> Tensor:
    """Generalised advantage estimation with a critic's values (``gae``), optionally whitened over the batch."""
    assert x.values is not None, "gae needs a critic"
    advantages, _ = gae(x.token_rewards, x.values, x.mask, x.options.gamma, x.lam, x.bootstrap, x.rows)
    if not x.options.whiten:
        return torch.where(on_tokens(x.scored, x.rows), advantages, 0.0)
    return whiten(advantages, x.mask & on_tokens(x.scored, x.rows))


def returns_to_go(x: AdvantageInputs, gamma: float = 1.0) -> Tensor:
    """Sum a row's rewards from each sampled token on, discounted by the number of sampled tokens in between."""
    returns, _ = gae(x.token_rewards, torch.zeros_like(x.token_rewards), x.mask, gamma, 1.0, rows=x.rows)
    return returns


def reinforce_plus_plus(x: AdvantageInputs) -> Tensor:
    """Compute returns to go, discounted by gamma per sampled token, whitened over all sampled tokens of the batch.

    Source: REINFORCE++ (arXiv:2501.03262). It needs no groups.
    """
    return whiten(returns_to_go(x, x.options.gamma), x.mask & on_tokens(x.scored, x.rows))


def prime(x: AdvantageInputs) -> Tensor:
    """Discounted sums of implicit process rewards from each token on, and RLOO of the outcome, optionally whitened.

    A token's process reward is r_t = beta (log pi_phi - log pi_ref), pi_phi the process reward model. From each of a
    row's rewards the mean of the other rows' means is subtracted:

        A_t = c sum_{s >= t} gamma^(s - t) (r_s - mean_{j != i} mean_s r_s^j) + n / (n - 1) (R_i - mean R)

    Source: PRIME (arXiv:2502.01456), equation 5; c is ``prime_coef``, which is 1 there, as verl's reward_dpo_coef over
    its reward_gt_coef. A group's only scored row gets 0.
    """
    groups, rewards = _groups(x), process_rewards(x)
    means = row_sums(rewards, x.rows) / row_sums(x.mask, x.rows).clamp(min=1)
    others = (groups.sum(means) - means) / (groups.size - 1).clamp(min=1)
    compared = x.scored & (groups.size > 1)
    centred = torch.where(x.mask & on_tokens(compared, x.rows), rewards - on_tokens(others, x.rows), 0.0)
    returns = returns_to_go(replace(x, token_rewards=centred), x.options.gamma)
    advantages = x.options.prime_coef * returns + rloo(x)
    return whiten(advantages, x.mask & on_tokens(x.scored, x.rows)) if x.options.whiten else advantages


def gigpo(x: AdvantageInputs) -> Tensor:
    """The episode's advantage in its group, plus that of each turn among the group's turns that answered the same.

    A = A_E + w A_S. A_E is (r_i - mean) / (std + 1e-4) of the episode's reward. A_S is the same of the turn's return,
    the sum of gamma^k r over its row's turns from it on, k counting turns. Turns of a group are compared if equal
    messages stood before them (since the turn before), and alone get 0. With ``gigpo_by=turn`` those of one number are
    compared in place of those of one state. Without ``gigpo_std`` nothing is divided.

    Source: GiGPO (arXiv:2505.10978), equations 3, 6 to 8; w is omega there, and `step_advantage_w` in verl-agent.
    """
    assert x.states is not None, "gigpo needs the states that turns answer"

    def compared(groups: Groups, values: Tensor) -> Tensor:
        return groups.centred(values) / (groups.std(values) + EPSILON if x.options.gigpo_std else 1.0)

    episodes = x.spread(compared(_groups(x), x.rewards))
    tokens = (x.turns >= 0).nonzero(as_tuple=True)
    row = tokens[0] if x.rows is None else torch.arange(len(x.rows.lengths)).repeat_interleave(x.rows.lengths)[tokens]
    # Turns in the order of rows and of their numbers, and the turn of each token.
    turns, turn = torch.unique(torch.stack([row, x.turns[tokens]], 1), dim=0, return_inverse=True)
    rewards = torch.zeros(len(turns), dtype=torch.float64).index_add_(0, turn, x.token_rewards[tokens].double())
    returns, rows, following = rewards.clone(), turns[:, 0].tolist(), 0.0
    for place in reversed(range(len(rows))):
        last = place + 1 == len(rows) or rows[place] != rows[place + 1]
        following = float(rewards[place]) + (0.0 if last else x.options.gamma * following)
        returns[place] = following
    state = torch.zeros(len(turns), dtype=torch.int64).index_copy_(0, turn, x.states[tokens])
    answered = turns[:, 1] if x.options.gigpo_by == "turn" else state
    _, same = torch.unique(torch.stack([x.groups[turns[:, 0]], answered], 1), dim=0, return_inverse=True)
    among = Groups.of(same, x.scored[turns[:, 0]].double())
    steps = torch.zeros_like(episodes).index_put_(tokens, compared(among, returns)[turn])
    return episodes + torch.where(x.mask, x.options.gigpo_weight * steps, 0.0)


def process_rewards(x: AdvantageInputs) -> Tensor:
    """Return beta (log pi_phi - log pi_ref) of sampled tokens, 0 elsewhere (arXiv:2502.01456, equation 3)."""
    assert x.process is not None and x.reference is not None, "prime needs a process reward model and a reference"
    return torch.where(x.mask, x.options.prime_beta * (x.process - x.reference), 0.0)


def optimal_token_baseline(x: AdvantageInputs) -> Tensor:
    """A_t = G_t - sum_i(G_t W_t) / sum_i(W_t) over the group's rows that sampled column t.

    G is the return to go, W_t = sum over sampled j <= t of w_j^2 (1 - 2 pi_j + sum_v pi_j(v)^2), a proxy for the
    squared norm of the gradient so far; the correction's weight w scales the gradient of each token. Source: the
    Optimal Token Baseline with the Logit-Gradient Proxy (arXiv:2602.07078), as verl defines it (its equations were not
    at hand). Tokens in the same column of the group's rows are compared, which suits single-turn episodes, whose
    answers all follow the same prompt. Beyond the end of the second longest row, the longest keeps its return. A group
    of one gets 0.
    """
    return _baseline_per_position(x, by_column=True)


def tir_optimal_token_baseline(x: AdvantageInputs) -> Tensor:
    """``optimal_token_baseline`` by the number of the sampled token instead of its column, for multi-turn episodes.

    Tool results of different lengths shift the columns of later turns; counting only sampled tokens aligns them again.
    As verl defines it (`tir_optimal_token_baseline`).
    """
    return _baseline_per_position(x, by_column=False)


def _baseline_per_position(x: AdvantageInputs, *, by_column: bool) -> Tensor:
    """Subtract a weighted mean of the group's returns at the same column, or the same number of sampled tokens."""
    assert x.logprobs is not None and x.sum_squares is not None, "the baseline needs the distribution of pi_old"
    # Rounding may turn the squared norm of a nearly certain token negative, but weights must not be.
    norms = (1 - 2 * x.logprobs.exp() + x.sum_squares).clamp(min=0)
    if x.importance is not None:
        norms = norms * x.importance**2
    (energy,) = by_rows(lambda values: (values.cumsum(1),), x.rows, torch.where(x.mask, norms, 0.0))
    groups = Groups.of(x.groups, x.weights)
    # From here on only sampled tokens, [m], by row and position.
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
    # The place of each token's position in the concatenated sums of all groups.
    most = torch.zeros(groups.count, dtype=torch.int64).scatter_reduce(0, groups.index, ends, "amax")
    place = (most.cumsum(0) - most)[groups.index][row] + position
    weight = torch.where(compared, energy * groups.weights[row], 0.0)
    sums = torch.zeros(2, int(most.sum()), dtype=torch.float64)
    total, weighted = sums[0].index_add_(0, place, weight), sums[1].index_add_(0, place, weight * returns)
    # A total of 0 means that there was no gradient so far.
    there = compared & (total[place] > 0) & (position < second[row])
    baseline = torch.where(there, weighted[place] / total[place], 0.0)
    advantages = torch.where(compared, returns - baseline, 0.0)
    return torch.zeros_like(x.mask, dtype=torch.float64).masked_scatter_(x.mask, advantages)


def _columns(x: AdvantageInputs) -> Tensor:
    """Return the column of each token in its row, in the shape of the mask."""
    if x.rows is None:
        return torch.arange(x.mask.shape[1]).expand(x.mask.shape)
    return torch.arange(len(x.mask)) - on_tokens(x.rows.starts, x.rows)


def _second_ends(groups: Groups, ends: Tensor, scored: Tensor) -> Tensor:
    """Return the end of the second longest scored row in each row's group, int64 [N]; 0 for a single row."""
    order = torch.where(scored, ends, -1).argsort(descending=True)
    order = order[groups.index[order].argsort(stable=True)]
    first = torch.searchsorted(groups.index[order], torch.arange(groups.count))
    second = order[(first + 1).clamp(max=len(order) - 1)]
    alone = (groups.index[second] != torch.arange(groups.count)) | ~scored[second]
    return torch.where(alone, 0, ends[second])[groups.index]


ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "max_rl": max_rl,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "rloo": rloo,
    "dpo": dpo,
    "opo": opo,
    "gpg": gpg,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae_advantage,
    "prime": prime,
    "gigpo": gigpo,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}


VARIANCE_EPSILON = 1e-8


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of sampled tokens, float64, 0 elsewhere.

    An episode's steps are the tokens of ``mask``. The state after one is that of the row's next one, even if tool
    output lies in between, and after the last one the episode is over (value 0).

        delta_k = r_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lam A_{k+1},   return_k = A_k + V_k

    A row of ``bootstrap`` did not end: its final state gets the value of the state before, since no value after the
    last token was computed.

    Source: Schulman et al. (arXiv:1506.02438), eq. 16, for episodes that end. Bootstrapping at a limit: Pardo et al.
    (arXiv:1712.00378), section 3.2.

    Args:
        token_rewards: [N, T], or packed [M] with their ``rows``, as all tensors per token
        values: [N, T], the value of the state before each token
        mask: bool [N, T]; rewards and values elsewhere do not matter
        lam: one for all rows, or float64 [N]
        bootstrap: bool [N]; none by default
        rows: the places of packed rows
    """
    value, counts = values[mask].double(), row_sums(mask, rows).long()
    ends, row = counts.cumsum(0), torch.arange(len(counts)).repeat_interleave(counts)
    last = ends[counts > 0] - 1
    following = value.roll(-1)
    following[last] = 0.0 if bootstrap is None else torch.where(bootstrap[counts > 0], value[last], 0.0)
    delta = token_rewards[mask].double() + gamma * following - value
    # Steps at equal distance from the ends of their rows are computed at once: ``order`` makes them adjacent, with
    # those of the longest rows first.
    rank = torch.empty_like(counts).scatter_(0, counts.argsort(descending=True), torch.arange(len(counts)))
    distance = ends[row] - 1 - torch.arange(len(row))
    order = (distance * len(counts) + rank[row]).argsort()
    steps, start, advantage = delta[order], 0, delta[:0]
    decay = gamma * (lam[row][order] if isinstance(lam, Tensor) else torch.full_like(steps, lam))
    for number in torch.bincount(distance).tolist():
        following_steps, advantage = advantage, steps[start : start + number]
        if start:
            advantage = advantage + decay[start : start + number] * following_steps[:number]
        steps[start : start + number] = advantage
        start += number
    delta[order] = steps
    advantages = torch.zeros_like(mask, dtype=torch.float64).masked_scatter_(mask, delta)
    return advantages, torch.zeros_like(advantages).masked_scatter_(mask, delta + value)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale values to mean 0 and variance 1 over the tokens of ``mask``, 0 elsewhere.

    Equal values, which only differ by rounding after the shift, become 0, and so does a single value.

    (A - mean) / sqrt(var + 1e-8) with the unbiased variance, as in verl and TRL. It is not in the paper on PPO, but in
    its authors' ``ppo2`` (openai/baselines), there over a mini-batch and biased.
    """
    picked = values[mask]
    if len(picked) < 2 or bool(picked.min() == picked.max()):
        return torch.zeros_like(values)
    return torch.where(mask, (values - picked.mean()) * torch.rsqrt(picked.var() + VARIANCE_EPSILON), 0.0)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Compute the squared error of each value [B, T], or that of the value clipped around the old one, if larger.

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
    """Compute 1 - Var(R - V) / Var(R) over the tokens of ``mask``: 1 is perfect, 0 no better than a constant.

    It is also 0 if the returns do not vary, so that there is nothing to explain.
    """
    if not mask.any():
        return 0.0
    target, guess = returns[mask].double(), values[mask].double()
    variance = target.var(unbiased=False).item()
    return 1.0 - (target - guess).var(unbiased=False).item() / variance if variance > 0 else 0.0


SHAPING_EPSILON = 1e-8
# Seeds this draw together with (seed, step), so that it is independent of that of mini-batches.
RESAMPLE = 1
# Finish reasons of trajectories that reached a limit on tokens or time, or any limit.
CUT_OFF = ("length", TIMEOUT)
LIMITS = (*CUT_OFF, "max_turns")
# The weights of max_random.
BEST_AND_OTHERS = (0.4, 0.1)


def shaped_rewards(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Compute the rewards for advantages, float64 [N]; those of unscored rows are 0."""
    scored = torch.tensor([h.scored for h in headers])
    values = torch.where(scored, by_length(headers, options) + overlong_penalties(headers, options), 0.0)
    values = values / reward_divisor(headers, options)
    if options.reward_clip is not None:
        values = values.clamp(-options.reward_clip, options.reward_clip)
    return values


def overlong_penalties(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Compute the soft overlong punishment, float64 [N], from -factor to 0.

    With L sampled tokens in all rows of the episode, or of the row's role in it, which share a reward: 0 up to
    max - cache, ((max - cache) - L) / cache up to max, -1 beyond. Source: DAPO (arXiv:2503.14476), eq. 13, where the
    factor is 1.
    """
    lengths = episode_tokens(headers)
    overlong = options.overlong
    if overlong is None:
        return torch.zeros_like(lengths)
    begins = overlong.max_tokens - overlong.cache_tokens
    return overlong.factor * ((begins - lengths) / overlong.cache_tokens).clamp(-1.0, 0.0)


def episode_tokens(headers: Sequence[TrajectoryHeader]) -> Tensor:
    """Count the sampled tokens of the row's role in all rows of its episode, float64 [N]."""
    sampled = Counter[tuple[str, str]]()
    for h in headers:
        sampled[h.episode_id, h.role] += h.sampled
    return torch.tensor([sampled[h.episode_id, h.role] for h in headers], dtype=torch.float64)


def by_length(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Return the scored outcomes as ``options.length`` changes them, float64 [N].

    With L sampled tokens and the wanted T: l1: r - coef |T - L|, L1-Exact (arXiv:2503.04697, equation 1). cosine:
    b + (a - b) (1 + cos(pi L / T)) / 2 from a at no tokens to b at T, ``beyond`` from there on (arXiv:2502.03373,
    section 4.1).
    """
    rewards = torch.tensor([h.reward for h in headers], dtype=torch.float64)
    config = options.length
    if config is None:
        return rewards
    lengths = episode_tokens(headers)
    if config.kind == "l1":
        return rewards - config.coef * (config.tokens - lengths).abs()
    good = rewards > config.above
    start, end = (torch.where(good, right, wrong) for right, wrong in zip(config.good, config.bad, strict=True))
    curve = end + (start - end) * (1 + torch.cos(torch.pi * lengths / config.tokens)) / 2
    return torch.where(lengths < config.tokens, curve, config.beyond)


def reward_divisor(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> float:
    """Return the divisor of outcome and turn rewards: the biased standard deviation of the scored outcomes that train.

    Penalties are included. The divisor is 1 if the deviation is 0 or ``reward_scale`` is none.

    The mean is not subtracted, so signs stay. Source: reward scaling, arXiv:2005.12729, section 2, which divides by the
    deviation of a rolling sum of discounted rewards. Here it is that of the batch, so that a step depends on its batch
    alone and checkpoints need no further state.
    """
    penalised = by_length(headers, options) + overlong_penalties(headers, options)
    known = penalised[torch.tensor([h.scored and not h.baseline for h in headers])]
    if options.reward_scale == "none" or not known.numel():
        return 1.0
    deviation = known.std(correction=0).item()
    return deviation if deviation > SHAPING_EPSILON else 1.0


def trainable_rows(headers: Sequence[TrajectoryHeader], options: ShapingConfig) -> Tensor:
    """Return the rows that train, bool [N]. Source: overlong filtering, DAPO (arXiv:2503.14476), section 3.4."""
    return torch.tensor([not (options.overlong_filter and h.finish_reason in CUT_OFF) for h in headers])


def cut_rows(headers: Sequence[TrajectoryHeader]) -> Tensor:
    """Return the rows that ended because of a limit on tokens, turns or time, bool [N]."""
    return torch.tensor([h.finish_reason in LIMITS for h in headers])


def row_repeats(headers: Sequence[TrajectoryHeader], options: ShapingConfig, seed: int, step: int) -> Tensor:
    """Count how often each row is drawn, float64 [N]: N_scored draws with replacement, seeded by (seed, step).

    Source: PF-PPO (arXiv:2409.06957), which prefers rows with reliable rewards. The weights are those of verl's
    ``compute_pf_ppo_reweight_data``, over the whole batch; the paper's own table of weights was not at hand.

    A row that is drawn k times has its advantage multiplied by k, which equals k copies of it in every loss that is
    linear in positive factors of the advantage. The loss is divided by the counts of the original batch, and KL and
    entropy terms include every row once.
    """
    scored = torch.tensor([h.scored and not h.baseline for h in headers])
    counts = torch.ones(len(headers), dtype=torch.float64)
    values = shaped_rewards(headers, options)
    if options.resample == "none" or not scored.any() or not values.isfinite().all():
        # An infinite reward makes the loss diverge, and the error for that names the step.
        return counts
    odds = resample_weights(values[scored].numpy(), options.resample)
    draw = np.random.default_rng([seed & 0xFFFFFFFF, step, RESAMPLE])
    counts[scored] = torch.from_numpy(draw.multinomial(len(odds), odds / odds.sum())).double()
    return counts


# The exponent of PF-PPO's weights in verl.
RESAMPLE_POWER = 2.0


def resample_weights(values: np.ndarray, method: str, power: float = RESAMPLE_POWER) -> np.ndarray:
    """Compute weights of the scored rewards for drawing, float64 [n], never 0."""
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
    """Summarize the effects of shaping on a batch; empty if no option changes rewards or rows."""
    if options == ShapingConfig(dynamic_sampling=options.dynamic_sampling):
        return {}
    scored = torch.tensor([h.scored and not h.baseline for h in headers])
    return {
        "shaping/reward_mean": shaped_rewards(headers, options)[scored].mean().item(),
        "shaping/overlong_penalty_mean": overlong_penalties(headers, options).mean().item(),
        "shaping/filtered_fraction": 1.0 - trainable_rows(headers, options).double().mean().item(),
    }
