"""Estimates from samples of held-out tasks. All intervals are of 95 %, over tasks: one number for each."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Z = NormalDist().inv_cdf(0.975)  # of a 95 % interval
EXACT = 14  # changes of which all 2^n signs are tried
DRAWS = 1 << 14  # of signs for more changes
# Rewards that differ by less are equal: weighted sums such as 0.7 + 0.2 + 0.1 miss by the last bit.
ROUNDING = 1e-9


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def passes(reward: float, solved: float) -> bool:
    """Whether a reward is ``solved`` or more."""
    return reward >= solved - ROUNDING


def change_of(before: float, after: float) -> float:
    """Return by how much a number has changed; 0 for what rounding alone may have changed."""
    change = after - before
    return 0.0 if abs(change) < ROUNDING else change


def average(values: Sequence[float]) -> float:
    """Return the mean of numbers, the same in whatever order they come."""
    return math.fsum(values) / len(values)


def pass_at(k: int, samples: int, passed: int) -> float:
    """Estimate the chance that one of ``k`` samples passes from ``samples``, of which ``passed`` did, without bias.

    1 - C(n - c, k) / C(n, k): Chen et al. (arXiv:2107.03374), section 2.1.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Return the interval of a share ``mean`` of ``count`` trials: Wilson (1927), without continuity correction.

    For the mean of ``count`` numbers between 0 and 1 it is not too narrow, as none of that mean varies more than a
    share does.
    """
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_of(values: Sequence[float]) -> Interval:
    """Return the mean of one number per task: Wilson's interval for numbers between 0 and 1, else as for changes."""
    mean = average(values)
    if all(0.0 <= value <= 1.0 for value in values):
        return Interval(mean, *wilson(min(max(mean, 0.0), 1.0), len(values)))
    return mean_change_of(values)


def mean_change_of(values: Sequence[float]) -> Interval:
    """Return the mean of one number per task: of numbers between -1 and 1 with Agresti and Min's interval.

    That is the normal one after adding two tasks to the ``n`` of the sample, with changes of 1, -1, 0 and 0 counted
    half each: Agresti and Min (2005), Statistics in Medicine 24, for differences of matched shares. Its width follows
    how many tasks changed and by how much, and does not shrink to nothing where none did, as Student's does. For
    numbers that are no differences of single answers it is a little too wide.

    Other numbers have Student's interval, which has no bounds for fewer than three numbers or for equal ones.
    """
    count, mean = len(values), average(values)
    if all(-1.0 <= value <= 1.0 for value in values):
        centre = math.fsum(values) / (count + 2)
        variance = (sum(value * value for value in values) + 1) / (count + 2) - centre * centre
        half = Z * math.sqrt(variance / (count + 2))
        return Interval(mean, max(-1.0, centre - half), min(1.0, centre + half))
    variance = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    half = _student(count - 1) * math.sqrt(variance / count) if count >= 3 and variance else math.inf
    return Interval(mean, mean - half, mean + half)


def _student(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t, to 1 % from 2 degrees of freedom on: Abramowitz and Stegun, 26.7.5."""
    return Z + sum(
        polynomial / freedom**power
        for power, polynomial in enumerate(
            (
                (Z**3 + Z) / 4,
                (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
                (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
                (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
            ),
            start=1,
        )
    )


def paired_p(changes: Sequence[float]) -> float:
    """Return how likely a mean at least as far from 0 is if each task's change had its sign by chance; two-sided.

    Fisher's randomization test for paired samples: exact for up to ``EXACT`` tasks that changed, else of ``DRAWS``
    draws, with the observed one counted among them (Phipson and Smyth, 2010), and the same for the same changes.
    """
    changed = np.array([change for change in changes if change], dtype=np.float64)
    observed = abs(changed.sum()) * (1 - 1e-12)  # sums in another order may differ in the last bit
    if len(changed) <= EXACT:
        signs = 1 - 2 * ((np.arange(1 << len(changed))[:, None] >> np.arange(len(changed))) & 1)
        return float(np.mean(np.abs(signs @ changed) >= observed))
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(DRAWS >> 8):  # in parts, for memory
        signs = generator.choice(np.array([-1.0, 1.0]), (1 << 8, len(changed)))
        hits += int(np.count_nonzero(np.abs(signs @ changed) >= observed))
    return (hits + 1) / (DRAWS + 1)
