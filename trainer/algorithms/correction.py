"""Off-policy correction: a weight for each token, whether it trains, and metrics of both, overall and by age.

``configs/schema/algorithm.py`` declares the options. Every rule considers all sampled tokens of its row, regardless of
the other rules' decisions, so their order only determines which of them is named; tokens that were sampled under a
grammar's mask are not measured. The ratio of a token is r = pi/mu. Metrics measure the distance between the policies,
and count the effects of the rules.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_async.configs.schema.algorithm import RULES, Correction, band, limits
from rl_async.trainer.packing import Rows, by_rows, row_sums

# Beyond exp(20) a ratio signals numerical trouble, not a usable weight.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Corrected:
    """Weight, mask and reason for each token of whole rows, [B, T] or packed [M], without gradient.

    Attributes:
        weights: 0 where ``keep`` is false.
        keep: bool, tokens that train.
        rule: uint8, the index in RULES of the rule that masked a token or set its weight to 0, else 0.
    """

    weights: Tensor
    keep: Tensor
    rule: Tensor

    def times(self, weights: Tensor | None) -> "Corrected":
        """Multiply the weights of all tokens, or leave them for None."""
        return self if weights is None else Corrected(self.weights * weights, self.keep, self.rule)


def grammar_weights(target: Tensor, behaviour: Tensor, constrained: Tensor) -> Tensor:
    """Weigh tokens that were sampled under a grammar's mask: min(1, pi_old / mu), 1 for all others, [B, T].

    mu is the policy restricted to the allowed tokens and renormalised, so on-policy the weight is the policy's total
    probability of these tokens: an importance weight that never exceeds 1 and needs no truncation. For stale data it is
    truncated at 1, a possible value of rho-bar in V-trace (arXiv:1802.01561, section 4.1).

    Args:
        target: float [B, T], log pi_old.
        behaviour: float [B, T], log mu.
        constrained: bool [B, T], tokens that were sampled under a mask.
    """
    return torch.where(constrained, target.detach() - behaviour, 0.0).clamp(max=0.0).exp()


def correct(
    target: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    age: Tensor,
    correction: Correction,
    free: Tensor | None = None,
    rows: Rows | None = None,
) -> Corrected:
    """Weigh and mask tokens. Every rule is local to a row, so any split into whole rows gives the same result.

    Only free tokens are measured; for the rules and in the weight of a sequence, the others have a ratio of 1. A
    decision about a row (a rejection, the weight of the sequence) applies to all of its tokens.

    Only ``normalise`` needs the whole batch: it divides the weights by their mean over all sampled tokens, rejected or
    not, where weights of sequences are averaged over rows. That is verl's `rollout_is_batch_normalize`.

    Three policies instead of two: Hilton et al. (arXiv:2110.00641). A band zeroes weights outside it and leaves the
    mask alone: IcePop, Ring-1T (arXiv:2510.18855), section 2.3.2.

    Tensors are [B, T], or packed [M] with their ``rows``.

    Args:
        target: float [B, T], log pi_old (decoupled) or log pi_theta (bypass).
        behaviour: float [B, T], log mu.
        mask: bool [B, T], sampled tokens.
        age: int [B, T], staleness of each token in steps.
        correction: the options.
        free: bool [B, T], tokens of ``mask`` that were sampled without a grammar's mask, by default all.
        rows: the places of packed rows.
    """
    free = mask if free is None else free
    weigh = functools.partial(_weigh, correction=correction)
    weights, keep, rule = by_rows(weigh, rows, target.detach(), behaviour, mask, age, free)
    if correction.normalise:
        weights = (weights.double() / _mean_weight(weights, free, correction, rows)).to(weights.dtype)
    return Corrected(keep.to(weights.dtype).mul_(weights), keep.view(torch.bool), rule)


def _weigh(
    target: Tensor, behaviour: Tensor, mask: Tensor, age: Tensor, free: Tensor, *, correction: Correction
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute weights, [B, T] or [B, 1], the tokens that train, uint8 [B, T], and the rules that mask the others."""
    # On a CPU, bytes in place of booleans and in-place changes are several times faster than masks and new tensors.
    keep, rule = mask.to(torch.uint8), torch.zeros_like(mask, dtype=torch.uint8)
    log_ratio = torch.where(mask, target - behaviour, 0.0)
    measured = torch.where(free, log_ratio, 0.0)
    for name, rejected in _rejected(measured, free, age, correction):
        hit = keep * rejected.view(torch.uint8)
        rule.add_(hit, alpha=RULES.index(name))
        keep -= hit
    weights = _weights(log_ratio if correction.weight == "token" else measured, correction)
    if correction.band is not None:
        outside = _is_outside(weights, *band(correction.band)).view(torch.uint8)
        rule.add_(outside * keep, alpha=RULES.index("band"))
        weights = weights.mul_((1 - outside).to(weights.dtype))
    if correction.age_weights:
        factors = torch.tensor(correction.age_weights, dtype=weights.dtype, device=weights.device)
        weights = weights * factors[age.long().clamp(0, len(factors) - 1)]
    return weights, keep, rule


def _mean_weight(weights: Tensor, free: Tensor, correction: Correction, rows: Rows | None) -> float:
    """Average weights over free tokens, or those of sequences over rows; return 1 if all are 0."""
    sampled = row_sums(free, rows)
    sums = row_sums(torch.where(free, weights.double(), 0.0), rows)
    if correction.weight == "sequence":
        sums, sampled = sums / sampled.clamp(min=1), sampled > 0
    return (sums.sum() / sampled.sum().clamp(min=1)).item() or 1.0


def _weights(log_ratio: Tensor, correction: Correction) -> Tensor:
    """Compute weights, [B, T] or [B, 1]: 1, r, or the product of r over the row, truncated at the cap.

    Truncated importance sampling: Espeholt et al. (arXiv:1802.01561), rho-bar of section 4.1. The product over a
    sequence is the importance weight of the whole trajectory, e.g. Precup, Sutton & Singh (2000), section 3.
    """
    if correction.weight == "none":
        return torch.ones_like(log_ratio[:, :1])
    total = log_ratio if correction.weight == "token" else _sum(log_ratio).to(log_ratio)
    weights = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_()
    return weights if correction.cap is None else weights.clamp_(max=correction.cap)


def _rejected(log_ratio: Tensor, free: Tensor, age: Tensor, correction: Correction) -> Iterator[tuple[str, Tensor]]:
    """Yield each rejecting rule and its rejections, bool [B, T] or [B, 1], in the order of ``correction.rules``."""
    if correction.max_age is not None:
        yield "max_age", age > correction.max_age
    if correction.veto is not None:
        # Tokens that are not free have a log ratio of 0.
        yield "veto", (log_ratio < math.log(correction.veto)).any(1, keepdim=True)
    for name, limit in correction.reject.items():
        level, _, measure = name.rpartition("_")
        low, high = limits(name, limit)
        yield name, _outside(log_ratio, free, level, measure, low, high)


def _outside(log_ratio: Tensor, free: Tensor, level: str, measure: str, low: float, high: float) -> Tensor:
    """Find where a measure, over a token [B, T] or a row [B, 1], is outside [low, high].

    k1 is log r, so its sum and mean are the logarithms of the product and the geometric mean of r; a row's seq_max_k1
    is outside if r of some token is. k2 = log(r)^2 / 2 and k3 = r - 1 - log r estimate KL(mu || pi). Source of the
    estimators: Schulman, "Approximating KL divergence" (2020).
    """
    values = log_ratio
    if measure == "k2":
        values = log_ratio**2 / 2
    elif measure == "k3":
        clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        values = clamped.exp().sub_(1).sub_(clamped)
    if measure == "k1":
        low, high = math.log(low) if low > 0 else -math.inf, math.log(high)
    if level == "seq_sum":
        values = _sum(values)
    if level == "seq_mean":
        values = _sum(values) / free.sum(1, keepdim=True).clamp(min=1)
    outside = _is_outside(values, low, high)
    return (outside & free).any(1, keepdim=True) if level == "seq_max" else outside


def _is_outside(values: Tensor, low: float, high: float) -> Tensor:
    """Whether each value lies outside [low, high]."""
    return values.clamp(low, high) != values


def _sum(values: Tensor) -> Tensor:
    """Sum each row in float64, [B, 1], so that padding cannot change a decision through the order of additions."""
    return values.sum(1, keepdim=True, dtype=torch.float64)


# The first and last age of each bucket, in steps.
AGES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))


def correction_metrics(
    target: Tensor,
    behaviour: Tensor,
    mask: Tensor,
    age: Tensor,
    corrected: Corrected,
    rules: Sequence[str],
    rows: Rows | None = None,
) -> dict[str, float]:
    """Compute ``correction/...`` over the tokens of a whole batch where ``mask``; empty without such tokens.

    Tensors are [N, T], or packed [M] with their ``rows``.

    They are repeated for the tokens of each age that occurs, as ``correction/age_0/...``, ``age_3-4``, ``age_9+``;
    sequences then are the tokens of that age in each row. ``rules`` are those that the correction may apply.
    """
    log_ratio = torch.where(mask, (target - behaviour).double(), 0.0)
    entropies = -target.double(), -behaviour.double()
    metrics: dict[str, float] = {}
    for name, chosen in [("", mask), *_buckets(mask, age)]:
        if chosen.any():
            found = (
                _drift_metrics(log_ratio, chosen, rows)
                | _perplexities(*entropies, chosen)
                | _weight_metrics(corrected, chosen)
            )
            found |= _rule_metrics(corrected, chosen, rules)
            metrics |= {f"correction/{name}{key}": value for key, value in found.items()}
    return metrics


def _buckets(mask: Tensor, age: Tensor) -> list[tuple[str, Tensor]]:
    buckets = []
    for first, last in AGES:
        name = f"{first}+" if last is None else f"{first}" if first == last else f"{first}-{last}"
        inside = (age >= first) if last is None else (age >= first) & (age <= last)
        buckets.append((f"age_{name}/", mask & inside))
    return buckets


def _drift_metrics(log_ratio: Tensor, chosen: Tensor, rows: Rows | None) -> dict[str, float]:
    """Measure the distance between the policies from log r = log pi - log mu in float64, regardless of the correction.

    ``kl``: mean of -log r, an estimate of KL(mu || pi) (k1); ``k3``: mean of r - 1 - log r, its low-variance form;
    ``ess``: (sum r)^2 / (n sum r^2), 1 when on-policy, and ``seq_ess`` the same of the products over rows;
    ``chi2`` and ``seq_chi2``: mean of r^2 less 1, an estimate of chi^2(pi || mu); ``logprob_diff_max``: largest
    |log r|.
    """
    logs = log_ratio[chosen]
    ratio = _ratio(logs)
    products = _ratio(row_sums(torch.where(chosen, log_ratio, 0.0), rows)[row_sums(chosen, rows) > 0])
    return {
        "kl": -logs.mean().item(),
        "k3": (ratio - 1 - logs).mean().item(),
        "logprob_diff_max": logs.abs().max().item(),
        "ess": _ess(ratio),
        "seq_ess": _ess(products),
        "chi2": (ratio.square().mean() - 1).item(),
        "seq_chi2": (products.square().mean() - 1).item(),
    }


def _perplexities(policy: Tensor, behaviour: Tensor, chosen: Tensor) -> dict[str, float]:
    """Compute the perplexity per token under pi and under mu, and their ratio."""
    ours, theirs = policy[chosen].mean(), behaviour[chosen].mean()
    return {
        "ppl_policy": ours.exp().item(),
        "ppl_behaviour": theirs.exp().item(),
        "ppl_ratio": (ours - theirs).exp().item(),
    }


def _weight_metrics(corrected: Corrected, chosen: Tensor) -> dict[str, float]:
    """Summarise the weights of the tokens that train; ``weight_ess`` is their effective share."""
    weights = corrected.weights[chosen & corrected.keep].double()
    if weights.numel() == 0:
        return {}
    return {
        "weight_mean": weights.mean().item(),
        "weight_min": weights.min().item(),
        "weight_max": weights.max().item(),
        "weight_std": weights.std(correction=0).item(),
        "weight_ess": _ess(weights),
    }


def _rule_metrics(corrected: Corrected, chosen: Tensor, rules: Sequence[str]) -> dict[str, float]:
    """Compute the shares of tokens masked by any rule, and by each; a token rejected by several counts for the first.

    ``rule/band`` is the share of tokens with weight 0, which are not masked.
    """
    counts = {"masked": (chosen & ~corrected.keep).sum()}
    for name in rules:
        counts[f"rule/{name}"] = (chosen & (corrected.rule == RULES.index(name))).sum()
    total = chosen.sum().item()
    return {name: count.item() / total for name, count in counts.items()}


def _ratio(logs: Tensor) -> Tensor:
    return logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _ess(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2), from 1/n to 1; 0 if all are 0. Source: Kong (1992)."""
    squares = weights.square().sum()
    return (weights.sum().square() / (weights.numel() * squares)).item() if squares > 0 else 0.0
