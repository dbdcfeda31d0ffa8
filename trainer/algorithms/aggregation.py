"""Aggregate a loss per token to one number, divided by counts of the global mini-batch.

Every rank divides its micro-batches' sums by the same global counts, so the gradient does not depend on how the
mini-batch was split into micro-batches and ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """The divisors of a mini-batch, over all ranks."""

    tokens: int  # that train
    sequences: float  # sum of the row weights of all rows, also of those in which no token trains
    width: int  # tokens of the longest possible response, the constant of seq-mean-token-sum-norm


def count(mask: Tensor, row_weights: Tensor, width: int) -> Counts:
    """Count a mini-batch from its mask, padded or packed, and row weights [N]; never zero, since they are divisors.

    A row that was rejected whole stays in a mean over rows, as in verl and TRL: the step then shrinks with the share of
    rejected rows, and does not depend on whether they were rejected before the loss (decoupled) or in it (bypass).
    """
    return Counts(tokens=max(int(mask.sum()), 1), sequences=row_weights.sum().item() or 1.0, width=width)


def token_mean(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Every token of the mini-batch counts the same (DAPO, arXiv:2503.14476, eq. 12)."""
    return _tokens(values, mask).sum() / counts.tokens


def token_sum(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Sum over all tokens, not divided by anything."""
    return _tokens(values, mask).sum()


def seq_mean_token_sum(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """Sum over a sequence's tokens, mean over sequences."""
    return (_tokens(values, mask).sum(1) * row_weights).sum() / counts.sequences


def seq_mean_token_sum_norm(values: Tensor, mask: Tensor, row_weights: Tensor, counts: Counts) -> Tensor:
    """``seq_mean_token_sum`` over a constant length, free of length bias (Dr. GRPO, arXiv:2503.20783)."""
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
