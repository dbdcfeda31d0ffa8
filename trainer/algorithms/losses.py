"""Policy losses per token and the table that names them, the KL penalty, and the aggregation to one number.

Notation: w is the correction's weight, r = pi_theta / pi_old, A the advantage. When old log-probabilities are bypassed,
pi_old is mu, the sampling policy. Every loss is [B, T]. To add one, write the function here, name it in ``LOSSES``, and
declare its traits in ``configs/schema/algorithm.py``.

Estimators of KL(pi_theta || pi_ref) are in ``ESTIMATORS``; k1, k2, k3: Schulman, "Approximating KL divergence" (2020).
They only use the two log-probabilities of the sampled token, except ``full``, which sums over the vocabulary. As part
of a loss their gradients differ: on-policy, that of k2 is an unbiased gradient of the divergence, those of k1 and k3
are not. A name with ``+`` has the estimator's value and the gradient of k2. With d = log pi_theta - log pi_ref, only k3
grows exponentially as d falls, so only k3 has a limit.

Aggregations divide by counts of the global mini-batch: every rank divides the sums of its micro-batches by the same
counts, so the gradient does not depend on the split into micro-batches and ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import ADAPTIVE_LIMIT, AlgorithmConfig, KlConfig, TeacherConfig
from rl_async.trainer.algorithms.correction import LOG_RATIO_LIMIT
from rl_async.trainer.packing import Rows

# The limit of gspo's mean of log r over a row.
LOG_SEQUENCE_RATIO_LIMIT = 10.0
# Added to the complement of a probability, as in verl.
SMALLEST = 1e-8


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch of whole rows: tensors [B, T] on the policy's device, where T counts predicted tokens.

    A loss returns one number for each token, [B, T], with a gradient through ``logprobs``. Where ``mask`` is false all
    values are finite and must not matter.

    Attributes:
        logprobs: float, log pi_theta, which alone carries a gradient.
        proximal: float, log pi_old, or log mu when old log-probabilities are bypassed.
        behaviour: float, log mu, of the policy that sampled.
        advantages: float.
        weights: float, the off-policy correction's.
        mask: bool, tokens that train.
        free: bool, those of them that were sampled without a grammar's mask; ratios of rows are over these.
        options: section ``algorithm`` of the config.
        selected: bool, tokens that ``PolicyLoss.select`` picked in the whole mini-batch, or None without such a rule.
    """

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    free: Tensor
    options: AlgorithmConfig
    selected: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """log r = log pi_theta - log pi_old."""
        return self.logprobs - self.proximal

    @property
    def ratio(self) -> Tensor:
        """r = pi_theta / pi_old, with log r limited to +-20."""
        return self.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def clip(self, ratio: Tensor) -> Tensor:
        """Clamp ``ratio`` to [1 - clip_low, 1 + clip_high]."""
        return ratio.clamp(1 - self.options.clip_low, 1 + self.options.clip_high)

    @property
    def clipped(self) -> Tensor:
        """The tokens whose gradient PPO's clip removes, bool [B, T]: r is beyond the bound in the direction of A."""
        ratio = self.ratio.detach()
        above = (ratio > 1 + self.options.clip_high) & (self.advantages > 0)
        return above | ((ratio < 1 - self.options.clip_low) & (self.advantages < 0))


@dataclass(frozen=True)
class SelectInputs:
    """A whole mini-batch before its forward passes, the same on every rank and for every split.

    A user's rule gets padded tensors [N, T] on the host, and ``rows`` None; it returns the tokens that it picks, bool
    [N, T]. The project's own take either form, and get packed ones.

    Attributes:
        proximal: float, log pi_old.
        behaviour: float, log mu.
        advantages: float.
        mask: bool, tokens that train, without those that a grammar's mask restricted: these are neither seen nor
            picked.
        options: section ``algorithm`` of the config.
        seed: of this mini-batch, for losses that draw tokens.
        rows: the places of packed rows.
    """

    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    options: AlgorithmConfig
    seed: int
    rows: Rows | None = None

    def padded(self) -> "SelectInputs":
        """Return a copy with padded tensors in place of packed ones."""
        assert self.rows is not None
        pad = self.rows.pad_all
        return SelectInputs(
            pad(self.proximal), pad(self.behaviour), pad(self.advantages), pad(self.mask), self.options, self.seed
        )


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token [B, T], and an optional rule that first picks tokens in the whole mini-batch.

    ``select`` gets the whole mini-batch, so that its result does not depend on the split into micro-batches.
    """

    per_token: Callable[[LossInputs], Tensor]
    select: Callable[[SelectInputs], Tensor] | None = None


# --- One ratio per token


def ppo(x: LossInputs) -> Tensor:
    """-w min(r A, clip(r, 1 - low, 1 + high) A), and with ``clip_dual`` c at most -w c A where A < 0, [B, T].

    Sources: PPO (arXiv:1707.06347), eq. 7; clip-higher: DAPO (arXiv:2503.14476), eq. 10; dual clip:
    arXiv:1912.09729.
    """
    surrogate = torch.minimum(x.ratio * x.advantages, x.clip(x.ratio) * x.advantages)
    dual = x.options.loss_options.clip_dual
    if dual is not None:
        surrogate = torch.where(x.advantages < 0, torch.maximum(surrogate, dual * x.advantages), surrogate)
    return -x.weights * surrogate


def decoupled_ppo(x: LossInputs) -> Tensor:
    """-b min(r A, clip(r) A) with the behaviour weight b = pi_old / mu, 0 where it is above ``decoupled_cap``, [B, T].

    The clip is around the proximal policy, the weight outside it. Sources: Hilton et al. (arXiv:2110.00641), eq. 4, as
    used by AReaL (arXiv:2505.24298), with its cap on b. It has its own weight, so no correction may add another.
    """
    behaviour = (x.proximal - x.behaviour).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    behaviour = torch.where(behaviour <= x.options.loss_options.decoupled_cap, behaviour, 0.0)
    return behaviour * ppo(x)


def reinforce(x: LossInputs) -> Tensor:
    """-w A log pi_theta, without a ratio, [B, T]. Source: Williams 1992."""
    return -x.weights * x.advantages * x.logprobs


def cispo(x: LossInputs) -> Tensor:
    """-w sg(clip(r, 1 - low, 1 + high)) A log pi_theta: clips the weight, so every token keeps its gradient, [B, T].

    Source: MiniMax-M1 (arXiv:2506.13585), eqs. 4 and 5, without a lower bound, which is ``clip_low=1`` here.
    """
    return -x.weights * x.clip(x.ratio).detach() * x.advantages * x.logprobs


def sapo(x: LossInputs) -> Tensor:
    """-w (4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of a clip, [B, T]; tau_negative where A <= 0.

    Source: SAPO (arXiv:2511.20347). On-policy its gradient is that of r A.
    """
    options = x.options.loss_options
    tau = torch.full_like(x.advantages, options.sapo_tau_negative)
    tau = torch.where(x.advantages > 0, options.sapo_tau_positive, tau)
    return -x.weights * (4 / tau) * torch.sigmoid(tau * (x.ratio - 1)) * x.advantages


def dro(x: LossInputs) -> Tensor:
    """-w (A log pi_theta - beta / 2 (log r)^2): a quadratic penalty in place of a clip, [B, T].

    Direct reward optimisation (arXiv:2405.19107) with the advantage for r - V, expanded and without the constant: the
    per-token form that verl and others call `dro`. beta is ``dro_beta``.
    """
    penalty = 0.5 * x.options.loss_options.dro_beta * x.log_ratio**2
    return -x.weights * (x.advantages * x.logprobs - penalty)


# --- One ratio per sequence, meant for aggregation=seq-mean-token-mean, where every sequence counts the same


def _row_mean(values: Tensor, x: LossInputs) -> Tensor:
    """Average over a row's free tokens, or over all that train if none is free, [B, 1]."""
    chosen = torch.where(x.free.any(1, keepdim=True), x.free, x.mask)
    return torch.where(chosen, values, 0.0).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp(min=1)


def gspo(x: LossInputs) -> Tensor:
    """-w min(s A, clip(s, 1 - low, 1 + high) A) with the length-normalised ratio s of the sequence, [B, T].

    s = exp(mean_t log r_t). As in GSPO-token, the value is that of the sequence and the gradient goes through the token
    itself: s_t = sg(s) pi_t / sg(pi_t). A weight per token scales that token's term. s stays much closer to 1 than r:
    the paper clips at 3e-4 and 4e-4. log s is at most 10, as in verl and SkyRL. Source: GSPO (arXiv:2507.18071), eqs.
    7, 13 and 14.
    """
    log_s = _row_mean(x.log_ratio, x).detach() + x.logprobs - x.logprobs.detach()
    s = log_s.clamp(max=LOG_SEQUENCE_RATIO_LIMIT).exp()
    return -x.weights * torch.minimum(s * x.advantages, x.clip(s) * x.advantages)


def gmpo(x: LossInputs) -> Tensor:
    """-w A exp(mean_t of log r_t, limited token by token): the geometric mean of the ratios, on each token, [B, T].

    log r_t is limited to [-clip_low, clip_high] on the side where PPO would clip: the smaller of A log r_t and
    A clip(log r_t). The paper's limits are 0.4 and 0.4. Weights enter by their geometric mean over the row, and A by
    its mean over the row's tokens. Source: GMPO (arXiv:2507.20673).

    As in ``gspo``, the value of a term is that of the row and its gradient goes through the token itself, with the same
    sum over a row, so that a token that is not free can have its own weight in place of the row's.
    """
    sign = x.advantages.sign()
    log_ratio = x.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    limited = log_ratio.clamp(-x.options.clip_low, x.options.clip_high)
    log_ratio = sign * torch.minimum(sign * log_ratio, sign * limited)
    weights = torch.where(x.free, _row_mean((x.weights + 1e-10).log(), x).exp(), x.weights)
    log_mean = _row_mean(log_ratio, x).detach() + log_ratio - log_ratio.detach()
    return -weights * log_mean.exp() * _row_mean(x.advantages, x)


def sppo(x: LossInputs) -> Tensor:
    """w (S - eta A)^2 / (2 eta) of the row, S the sum of log r over it, as a share on each token, [B, T].

    The value of a term is that of the row over its tokens, and its gradient goes through the token itself, so that with
    ``seq-mean-token-sum`` the whole is the mean over rows. Source: SPPO (arXiv:2405.00675), equation 4.4, with A for
    the win rate - 1/2 and 1 / (2 eta) for the factor, which makes the first gradient that of -A log pi_theta.
    """
    eta = x.options.loss_options.sppo_eta
    chosen = torch.where(x.free.any(1, keepdim=True), x.free, x.mask)
    total = torch.where(chosen, x.log_ratio.detach(), 0.0).sum(1, keepdim=True)
    gap = total - eta * _row_mean(x.advantages, x)
    share = gap**2 / (2 * eta) / chosen.sum(1, keepdim=True).clamp(min=1)
    return x.weights * (share + gap / eta * (x.logprobs - x.logprobs.detach()))


LOG_WEIGHT_BOUNDS = math.log(1e-8), LOG_RATIO_LIMIT


def vespo(x: LossInputs) -> Tensor:
    """-sg(phi(W)) A log pi_theta with phi(W) = W^k exp(lambda (1 - W)), [B, T].

    W is the product of w r over a row's free tokens. phi is 1 on-policy and falls smoothly on both sides; k and lambda
    go by the sign of A. log W is limited to [log 1e-8, 20] and each log r to +-20, as in TRL. Weights are part of W. A
    token that is not free keeps its own weight as a factor instead. Source: VESPO (arXiv:2602.10693).
    """
    options = x.options.loss_options
    logs = x.log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    logs = logs + x.weights.log().clamp(*LOG_WEIGHT_BOUNDS)
    log_weight = torch.where(x.free, logs, 0.0).sum(1, keepdim=True).clamp(*LOG_WEIGHT_BOUNDS)
    good = x.advantages >= 0
    k = torch.where(good, options.vespo_k_positive, options.vespo_k_negative)
    decay = torch.where(good, options.vespo_lambda_positive, options.vespo_lambda_negative)
    phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return -torch.where(x.free, 1.0, x.weights) * phi * x.advantages * x.logprobs


# --- A trust region: tokens whose policy has moved too far are masked, -w r A elsewhere


def _moves_away(x: LossInputs) -> Tensor:
    """Whether the gradient moves the token's probability further from the old one: r > 1 with A > 0, or the reverse."""
    moved = x.log_ratio.detach()
    return ((moved > 0) & (x.advantages > 0)) | ((moved < 0) & (x.advantages < 0))


def _beyond(x: LossInputs, distance: Tensor, limit: float) -> Tensor:
    """Find distances above ``limit`` or, for A > 0, above an optional ``dppo_high``, bool [B, T]."""
    high = x.options.loss_options.dppo_high
    return distance > (limit if high is None else torch.where(x.advantages > 0, high, limit))


def _masked(x: LossInputs, drop: Tensor, cap: float | None = None) -> Tensor:
    """-w r A, 0 where ``drop``; with ``cap`` the gradient is that of -w min(r, cap) A log pi_theta."""
    ratio = x.ratio
    if cap is not None:
        ratio = ratio * (cap / ratio.detach()).clamp(max=1.0)
    return -x.weights * torch.where(drop, 0.0, ratio * x.advantages)


def dppo_tv(x: LossInputs) -> Tensor:
    """-w r A, but 0 for tokens that move away and are more than ``dppo_tv`` from pi_old in total variation, [B, T].

    The distance is that of the sampled token against all others: |pi_theta - pi_old|. Source: DPPO
    (arXiv:2602.04879), the binary approximation, there with mu for pi_old; the threshold 0.2 is prime-rl's.
    """
    distance = (x.logprobs.detach().exp() - x.proximal.exp()).abs()
    options = x.options.loss_options
    return _masked(x, _moves_away(x) & _beyond(x, distance, options.dppo_tv), options.dppo_cap)


def dppo_kl(x: LossInputs) -> Tensor:
    """``dppo_tv`` with KL(pi_old || pi_theta) of the sampled token against all others and ``dppo_kl``, [B, T].

    1e-8 is added to both complements, as in verl.
    """
    new, old = x.logprobs.detach().exp(), x.proximal.exp()
    others = ((1 - old + SMALLEST) / (1 - new + SMALLEST)).log()
    distance = (1 - old) * others - old * x.log_ratio.detach()
    options = x.options.loss_options
    return _masked(x, _moves_away(x) & _beyond(x, distance, options.dppo_kl), options.dppo_cap)


def ipo(x: LossInputs) -> Tensor:
    """-w (r A - ``ipo_penalty`` (log r)^2), without r A where the probability moved by more than ``ipo``, [B, T].

    The direction does not matter, and the penalty also draws masked tokens back. As prime-rl defines it (loss `ipo`,
    threshold 0.1, `kl_tau` 1e-3), with mu for pi_old; it names no paper.
    """
    distance = (x.logprobs.detach().exp() - x.proximal.exp()).abs()
    penalty = x.options.loss_options.ipo_penalty * x.log_ratio**2
    return _masked(x, distance > x.options.loss_options.ipo) + x.weights * penalty


def prime_rl(x: LossInputs) -> Tensor:
    """``dppo_tv`` + w ``ipo_penalty`` (log r)^2, with the penalty also on masked tokens, [B, T].

    prime-rl's default loss, DPPO+KL, with mu for pi_old; its threshold is 0.2 and its `kl_tau` 1e-3.
    """
    return dppo_tv(x) + x.weights * x.options.loss_options.ipo_penalty * x.log_ratio**2


def m2po(x: LossInputs) -> Tensor:
    """-w r A, 0 for the tokens that ``select_m2po`` picked, [B, T].

    Source: M2PO (arXiv:2510.01161), the objective without a clip.
    """
    assert x.selected is not None
    return _masked(x, x.selected)


def select_m2po(x: SelectInputs) -> Tensor:
    """Pick tokens so that the mean of (log pi_old - log mu)^2 over the others is at most ``m2po``.

    These are the largest squares, as few as possible, and any that equal the smallest of them. Source: M2PO
    (arXiv:2510.01161), the second-moment constraint; the budget 0.04 is the paper's.
    """
    squares = torch.where(x.mask, (x.proximal - x.behaviour).double() ** 2, 0.0)
    values = squares[x.mask].sort().values
    means = values.cumsum(0) / torch.arange(1, len(values) + 1, dtype=torch.float64)
    # The running means only rise.
    kept = int((means <= x.options.loss_options.m2po).sum())
    if kept == len(values):
        return torch.zeros_like(x.mask)
    # Tokens as extreme as the first one to be masked are masked, too.
    limit = values[kept]
    return x.mask & (squares >= limit)


# --- Against the collapse of entropy: holds back tokens whose advantage and log-probability rise together
#
# The covariance of a token is (A - mean A) (log pi_old - mean log pi_old), with means over the mini-batch. The paper
# uses the policy in training; with pi_old (mu when bypassed) tokens can be picked before the forward passes, so that
# the choice does not depend on micro-batches and ranks. In a step's first mini-batch the two are the same.


def covariance(x: SelectInputs) -> Tensor:
    """Compute each token's covariance, float64, 0 outside the mask. Source: arXiv:2505.22617."""
    count = x.mask.sum().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        kept = torch.where(x.mask, values.double(), 0.0)
        return torch.where(x.mask, kept - kept.sum() / count, 0.0)

    return centred(x.advantages) * centred(x.proximal)


def _share(share: float, mask: Tensor) -> int:
    """Convert a share of the mask's tokens to a count, at least one if the share and the mask are not empty."""
    tokens = int(mask.sum())
    return min(max(int(share * tokens), 1), tokens) if share > 0 else 0


def select_clip_cov(x: SelectInputs) -> Tensor:
    """Draw ``clip_cov_share`` of all tokens from those whose covariance is between the two bounds."""
    options = x.options.loss_options
    cov = covariance(x)
    candidates = torch.nonzero(x.mask & (cov > options.clip_cov_low) & (cov < options.clip_cov_high))
    wanted = _share(options.clip_cov_share, x.mask)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(x.seed))
    picked = candidates[order[:wanted]]
    selected = torch.zeros_like(x.mask)
    selected[picked.unbind(1)] = True
    return selected


def clip_cov(x: LossInputs) -> Tensor:
    """``ppo``, without the selected tokens, [B, T]. Source: Clip-Cov (arXiv:2505.22617)."""
    assert x.selected is not None
    return torch.where(x.selected, 0.0, ppo(x))


def select_kl_cov(x: SelectInputs) -> Tensor:
    """Pick the ``kl_cov_share`` of all tokens with the largest covariance, at least one."""
    cov = torch.where(x.mask, covariance(x), -torch.inf)
    wanted = _share(x.options.loss_options.kl_cov_share, x.mask)
    selected = torch.zeros_like(x.mask).flatten()
    selected[cov.flatten().argsort(descending=True, stable=True)[:wanted]] = True
    return selected.reshape(x.mask.shape)


def kl_cov(x: LossInputs) -> Tensor:
    """-w (r A - coef |log r| on the selected tokens), without a clip, [B, T]. Source: KL-Cov (arXiv:2505.22617)."""
    assert x.selected is not None
    penalty = torch.where(x.selected, x.options.loss_options.kl_cov_coef * x.log_ratio.abs(), 0.0)
    return -x.weights * (x.ratio * x.advantages - penalty)


LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo),
    "decoupled_ppo": PolicyLoss(decoupled_ppo),
    "reinforce": PolicyLoss(reinforce),
    # GPG (arXiv:2504.02546) is the plain gradient; only its advantage is new.
    "gpg": PolicyLoss(reinforce),
    "gspo": PolicyLoss(gspo),
    "gmpo": PolicyLoss(gmpo),
    "sapo": PolicyLoss(sapo),
    "cispo": PolicyLoss(cispo),
    "dro": PolicyLoss(dro),
    "dppo_tv": PolicyLoss(dppo_tv),
    "dppo_kl": PolicyLoss(dppo_kl),
    "ipo": PolicyLoss(ipo),
    "sppo": PolicyLoss(sppo),
    "vespo": PolicyLoss(vespo),
    "prime_rl": PolicyLoss(prime_rl),
    "m2po": PolicyLoss(m2po, select_m2po),
    "clip_cov": PolicyLoss(clip_cov, select_clip_cov),
    "kl_cov": PolicyLoss(kl_cov, select_kl_cov),
}


# --- Masks of the policy's loss, whichever it is


def high_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Find the tokens of ``mask`` whose entropy is in the top ``share`` of a mini-batch, bool, in the mask's shape.

    The threshold is the quantile 1 - share, interpolated linearly. Source: arXiv:2506.01939, which recommends 0.2.
    """
    kept = entropy[mask].double()
    if not len(kept):
        return mask
    return mask & (entropy.double() >= float(np.quantile(kept.numpy(), 1 - share)))


def near_policy(x: LossInputs, limit: float) -> Tensor:
    """Keep tokens with A >= 0, and rows whose mean of log mu - log pi_theta is at most ``limit``, bool [B, T].

    Source: the off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556), equation 9.
    """
    return (x.advantages >= 0) | (_row_mean(x.behaviour - x.logprobs.detach(), x) <= limit)


# The limit, reached at d = -2.6, keeps a single token from outweighing a whole batch.
K3_LIMIT = 10.0

# Maps log pi_theta and log pi_ref to the KL, all [B, T].
Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d, [B, T]: unbiased, often negative."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, [B, T]: biased, never negative."""
    return (logprobs - reference) ** 2 / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d, at most 10, [B, T]: unbiased up to that limit, never negative.

    A token at the limit has no gradient. The limit is that of `low_var_kl` in verl and slime; TRL has none.
    """
    d = (logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return ((-d).exp() - 1 + d).clamp(max=K3_LIMIT)


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """|d|, [B, T]: a distance, which does not estimate the divergence."""
    return (logprobs - reference).abs()


def full(logprobs: Tensor, reference: Tensor) -> Tensor:
    """sum over v of pi_theta(v) (log pi_theta(v) - log pi_ref(v)), [B, T], from log-probabilities [B, T, V]."""
    return (logprobs.exp() * (logprobs - reference)).sum(-1)


def forward_kl(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """sum over v of pi_T(v) (log pi_T(v) - log pi_theta(v)), [B, T], from log-probabilities [B, T, V]."""
    return full(teacher, logprobs)


def jensen_shannon(logprobs: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """beta KL(pi_T || m) + (1 - beta) KL(pi_theta || m), [B, T], with m = beta pi_T + (1 - beta) pi_theta.

    Source: the generalised divergence of GKD (arXiv:2306.13649), equation 1, for 0 < beta < 1. Divided by beta, it
    tends to KL(pi_T || pi_theta) as beta tends to 0; divided by 1 - beta, to KL(pi_theta || pi_T) as beta tends to 1.
    """
    mixture = torch.logaddexp(teacher + math.log(beta), logprobs + math.log1p(-beta))
    return beta * full(teacher, mixture) + (1 - beta) * full(logprobs, mixture)


# The probability of the tokens beyond the likeliest ones is at least this, as in TRL.
LEAST_TAIL = 1e-7


def with_tail(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens to those of some, [..., K] to [..., K+1].

    Source: the tail bucket of SDPO (arXiv:2601.20802), as TRL 1.16 has it.
    """
    mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=-LEAST_TAIL)
    return torch.cat([logprobs, (-mass.expm1()).log()], -1)


# Log-probabilities of a teacher, [B, T, V]; or of some tokens [B, T, K], int64, with these tokens.
Teaching = Tensor | tuple[Tensor, Tensor]


def divergence_of(config: TeacherConfig) -> Callable[[Tensor, Teaching], Tensor]:
    """Return the divergence of the policy's distributions [B, T, V] from a teacher's; the result is [B, T].

    A model may have more outputs than its tokenizer has tokens. If two models differ in it, the distributions are those
    over the outputs that both have. With ``top_k`` they are over the teacher's likeliest tokens, and all others as one.
    """

    def divergence(logprobs: Tensor, teaching: Teaching) -> Tensor:
        if isinstance(teaching, Tensor):
            teacher = teaching
            if (shared := min(logprobs.shape[-1], teacher.shape[-1])) < max(logprobs.shape[-1], teacher.shape[-1]):
                logprobs, teacher = (x[..., :shared].log_softmax(-1) for x in (logprobs, teacher))
            if config.top_k is not None:
                likeliest = teacher.topk(min(config.top_k, teacher.shape[-1]), -1)
                teacher, tokens = with_tail(likeliest.values), likeliest.indices
                logprobs = with_tail(logprobs.gather(-1, tokens))
        else:
            teacher, tokens = with_tail(teaching[0]), teaching[1]
            logprobs = with_tail(logprobs.gather(-1, tokens))
        match config.divergence:
            case "reverse":
                return full(logprobs, teacher)
            case "forward":
                return forward_kl(logprobs, teacher)
            case "jsd":
                return jensen_shannon(logprobs, teacher, config.beta)
            case "sampled":
                raise ValueError("sampled compares no distributions")

    return divergence


def straight_through(estimator: Estimator) -> Estimator:
    """Give an estimator's value the gradient of k2."""

    def value_of_one_gradient_of_the_other(logprobs: Tensor, reference: Tensor) -> Tensor:
        carrier = k2(logprobs, reference)
        return estimator(logprobs, reference).detach() + carrier - carrier.detach()

    return value_of_one_gradient_of_the_other


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
    "abs+": straight_through(absolute),
    "full": full,
}


class KlController:
    """Holds the coefficient of the KL: fixed, or adapted towards ``target``.

    coef *= max(0, 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) after each step of n trajectories. Source: Ziegler
    et al. (arXiv:1909.08593), section 2.2; n / horizon, in place of its constant 0.1, is their published code's.
    """

    def __init__(self, config: KlConfig) -> None:
        self._adaptive, self.coef = config.adaptive, config.coef

    def after_step(self, kl: float, trajectories: int) -> dict[str, float]:
        """Adapt to the mean KL per token of a step; return the coefficient of that step as a metric."""
        had = self.coef
        if adaptive := self._adaptive:
            error = min(max(kl / adaptive.target - 1, -ADAPTIVE_LIMIT), ADAPTIVE_LIMIT)
            self.coef *= max(0.0, 1 + error * trajectories / adaptive.horizon)
        return {"kl/coef": had} if had > 0 else {}


@dataclass(frozen=True)
class Counts:
    """The divisors of a mini-batch, over all ranks.

    ``tokens`` counts tokens that train. ``sequences`` is the sum of all row weights, including rows without a token
    that trains. ``width`` is the length that divides with seq-mean-token-sum-norm.
    """

    tokens: int
    sequences: float
    width: int


def count(mask: Tensor, row_weights: Tensor, width: int) -> Counts:
    """Count a mini-batch by its mask, padded or packed, and row weights [N]; counts are never zero, being divisors.

    As in verl and TRL, a row that was rejected as a whole stays in a mean over rows. The step then shrinks with the
    share of rejected rows, whether they were rejected before the loss (decoupled) or in it (bypass).
    """
    return Counts(tokens=max(int(mask.sum()), 1), sequences=row_weights.sum().item() or 1.0, width=width)


def token_mean(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Average over all tokens of the mini-batch (DAPO, arXiv:2503.14476, eq. 12)."""
    return _tokens(values, mask).sum() / counts.tokens


def token_sum(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Sum over all tokens of the mini-batch."""
    return _tokens(values, mask).sum()


def seq_mean_token_sum(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Sum over a sequence's tokens, mean over sequences."""
    return (_tokens(values, mask).sum(1) * row_weights).sum() / counts.sequences


def seq_mean_token_sum_norm(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Divide ``seq_mean_token_sum`` by a constant length, free of length bias (Dr. GRPO, arXiv:2503.20783)."""
    return seq_mean_token_sum(values, mask, row_weights, counts) / counts.width


def seq_mean_token_mean(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Mean over a sequence's tokens, mean over sequences (GRPO, arXiv:2402.03300, eq. 3)."""
    means = _tokens(values, mask).sum(1) / mask.sum(1).clamp(min=1)
    return (means * row_weights).sum() / counts.sequences


def _tokens(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Counts], Tensor]] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "seq-mean-token-mean": seq_mean_token_mean,
}
