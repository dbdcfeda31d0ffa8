"""Metrics of the off-policy correction, overall and by age: how far the policies are apart, and what was done."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_async.configs.schema.correction import RULES
from rl_async.trainer.algorithms.correction import LOG_RATIO_LIMIT, Corrected
from rl_async.trainer.algorithms.rows import Rows, row_sums

AGES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))  # first and last age of each bucket, in steps


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
            found = _policies(log_ratio, chosen, rows) | _perplexities(*entropies, chosen) | _weights(corrected, chosen)
            found |= _rules(corrected, chosen, rules)
            metrics |= {f"correction/{name}{key}": value for key, value in found.items()}
    return metrics


def _buckets(mask: Tensor, age: Tensor) -> list[tuple[str, Tensor]]:
    buckets = []
    for first, last in AGES:
        name = f"{first}+" if last is None else f"{first}" if first == last else f"{first}-{last}"
        inside = (age >= first) if last is None else (age >= first) & (age <= last)
        buckets.append((f"age_{name}/", mask & inside))
    return buckets


def _policies(log_ratio: Tensor, chosen: Tensor, rows: Rows | None) -> dict[str, float]:
    """Measure the distance between the policies from log r = log pi - log mu in float64, whatever the correction does.

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
    """Perplexity per token under pi and under mu, and the first over the second."""
    ours, theirs = policy[chosen].mean(), behaviour[chosen].mean()
    return {
        "ppl_policy": ours.exp().item(),
        "ppl_behaviour": theirs.exp().item(),
        "ppl_ratio": (ours - theirs).exp().item(),
    }


def _weights(corrected: Corrected, chosen: Tensor) -> dict[str, float]:
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


def _rules(corrected: Corrected, chosen: Tensor, rules: Sequence[str]) -> dict[str, float]:
    """Shares of tokens masked by any rule, and by each; a token that several rules reject counts for the first.

    ``rule/band`` is the share whose weight became 0, which are not masked.
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
