"""Why each token trained as it did, for the recorded trajectories."""

import itertools

import numpy as np

from rl_async.configs.correction import RULES
from rl_async.messages import Explanation, RuleRun, Trajectory
from rl_async.trainer.correction import Corrected

DIGITS = 4  # of a weight that are recorded


def explain(row: Trajectory, index: int, corrected: Corrected) -> Explanation:
    """Weights and rules of the sampled tokens of row ``index`` of the batch, in order.

    A token that the correction never saw was masked by the queue's bound before.
    """
    sampled = np.flatnonzero(row.loss_mask[1:])  # position t of the tensors stands for token t + 1
    weights = corrected.weights[index].numpy()[sampled]
    rule = corrected.rule[index].numpy()[sampled]
    unseen = ~corrected.keep[index].numpy()[sampled] & (rule == 0)
    rule = np.where(unseen, RULES.index("max_staleness"), rule)
    edges = [0, *(np.flatnonzero(np.diff(rule)) + 1).tolist(), len(rule)]
    runs = [RuleRun(RULES[rule[start]], start, end) for start, end in itertools.pairwise(edges) if start < end]
    return Explanation(weights=_rounded(weights), rules=[run for run in runs if run.rule])


def _rounded(weights: np.ndarray) -> list[float]:
    values = weights.astype(np.float64)
    exponents = np.floor(np.log10(np.where(values > 0, values, 1.0))).astype(int)
    return [round(value, DIGITS - 1 - exponent) for value, exponent in zip(values.tolist(), exponents.tolist())]
