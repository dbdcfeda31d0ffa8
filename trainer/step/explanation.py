"""Explains for the recorded trajectories why each token trained, or did not."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_async.configs.schema.correction import RULES
from rl_async.messages import Explanation, RuleRun, Trajectory
from rl_async.trainer.algorithms.correction import Corrected
from rl_async.trainer.algorithms.rows import Rows, on_tokens
from rl_async.trainer.step.whole_batch import WholeBatch

DIGITS = 4  # of a number that are recorded


@dataclass(frozen=True)
class TokenOutcomes:
    """What became of each token of a batch, [M] on the host; position t of a row stands for its token t + 1."""

    rows: Rows
    corrected: Corrected  # as ``attributed`` completes it
    logprobs: Tensor  # the target of the correction: log pi_old, or with bypass log pi_theta of the first pass
    advantages: Tensor


def attributed(corrected: Corrected, whole: WholeBatch, filtered: Tensor) -> Corrected:
    """Complete a correction [M]: every sampled token that does not train names a rule and has weight 0.

    ``filtered``: bool [N], rows that overlong_filter took out. Else a token that the correction never saw was masked
    by the queue's bound.
    """
    greedy = torch.tensor([h.baseline for h in whole.headers])
    cause = torch.full_like(corrected.rule, RULES.index("max_staleness"))
    cause[on_tokens(filtered, whole.rows)] = RULES.index("overlong_filter")
    cause[on_tokens(greedy, whole.rows)] = RULES.index("greedy")
    cause[whole.mask] = RULES.index("correction")
    unnamed = ~corrected.keep & (corrected.rule == 0)
    weights = torch.where(corrected.keep, corrected.weights, 0.0)
    return Corrected(weights, corrected.keep, torch.where(unnamed, cause, corrected.rule))


def explain(row: Trajectory, index: int, outcomes: TokenOutcomes) -> Explanation:
    """Collect what became of the sampled tokens of row ``index``, in order."""
    # Position t of a row in the tensors stands for token t + 1.
    sampled = int(outcomes.rows.starts[index]) + np.flatnonzero(row.loss_mask[1:])
    weights = outcomes.corrected.weights.numpy()[sampled]
    rule = outcomes.corrected.rule.numpy()[sampled]
    advantages = outcomes.advantages.numpy()[sampled]
    edges = [0, *(np.flatnonzero(np.diff(rule)) + 1).tolist(), len(rule)]
    runs = [RuleRun(RULES[rule[start]], start, end) for start, end in itertools.pairwise(edges) if start < end]
    return Explanation(
        weights=_rounded(weights),
        rules=[run for run in runs if run.rule],
        logprobs=_rounded(outcomes.logprobs.numpy()[sampled]),
        advantages=_rounded(advantages[:1] if (advantages == advantages[:1]).all() else advantages),
    )


def _rounded(weights: np.ndarray) -> list[float]:
    values = weights.astype(np.float64)
    exponents = np.floor(np.log10(np.where(values != 0, np.abs(values), 1.0))).astype(int)
    return [round(value, DIGITS - 1 - exponent) for value, exponent in zip(values.tolist(), exponents.tolist())]
