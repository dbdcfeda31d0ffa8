"""The layout of a batch: which rank trains which row in which forward pass, as a pure function of the headers.

Every rank sees the headers of the whole batch, so all ranks compute the same layout without communicating.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_async.configs.schema.run import RunConfig
from rl_async.messages import TrajectoryHeader, VersionRun
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.partition import imbalance, karmarkar_karp


class Sized(Protocol):
    """What the layout reads of a row; every TrajectoryHeader has it."""

    @property
    def tokens(self) -> int: ...

    @property
    def baseline(self) -> bool: ...


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step. ``ranks[r]`` lists rank r's micro-batches (row indexes into the batch).

    All ranks have the same number of micro-batches, since every forward pass is a collective; short ranks get empty
    ones. ``rows`` are those of all ranks.
    """

    ranks: list[list[list[int]]]
    rows: list[int]


def mask_bound(config: RunConfig) -> int | None:
    """The staleness beyond which tokens are masked; None where the queue's own bound suffices."""
    return config.queue.max_staleness if config.queue.on_straggler == "mask" else None


def fresh_runs(header: TrajectoryHeader, step: int, max_staleness: int | None) -> list[VersionRun]:
    """Return the runs of sampled tokens that may train at ``step``; a bound of None keeps all."""
    if header.baseline:
        return []
    if max_staleness is None:
        return header.versions
    return [run for run in header.versions if step - run.version.step <= max_staleness]


def layout(
    headers: Sequence[Sized],
    *,
    step: int,
    minibatches: int,
    ranks: int,
    max_tokens: int,
    seed: int,
    cost: RowCost,
) -> list[MiniBatch]:
    """Split a batch into mini-batches, ranks and token-budget micro-batches.

    Rows are permuted with (seed, step) and cut into ``minibatches`` equal parts; greedy episodes, which do not train,
    are dealt out to them afterwards, so that no part has nothing else. Within a part ranks get nearly
    equal cost, and so do the micro-batches of a rank, none of which holds more than ``max_tokens`` tokens (a
    single longer row stands alone). For a model that pads, a micro-batch holds rows of similar length, and padding
    counts.
    """
    train = [row for row, header in enumerate(headers) if not header.baseline]
    order = np.random.default_rng([seed & 0xFFFFFFFF, step]).permutation(train)
    parts = [part.tolist() for part in np.array_split(order, minibatches) if len(part)] or [[]]
    for number, row in enumerate(row for row, header in enumerate(headers) if header.baseline):
        parts[number % len(parts)].append(row)
    result = []
    for part in parts:
        shares = _balance(part, headers, ranks, cost)
        if cost.padded:
            per_rank = [_similar(rows, headers, max_tokens) for rows in shares]
        else:
            first_fit = [_first_fit(rows, headers, max_tokens) for rows in shares]
            deepest = max(len(micro) for micro in first_fit)
            per_rank = [_even(micro, deepest, headers, max_tokens, cost) for micro in first_fit]
        deepest = max(len(micro) for micro in per_rank)
        for micro in per_rank:
            micro.extend([] for _ in range(deepest - len(micro)))
        result.append(MiniBatch(ranks=per_rank, rows=sorted(part)))
    return result


def _balance(rows: list[int], headers: Sequence[Sized], parts: int, cost: RowCost) -> list[list[int]]:
    """Parts of nearly equal cost, each with its longest row first."""
    shares = karmarkar_karp([cost.of(headers[row].tokens) for row in rows], parts)
    return [[rows[index] for index in share] for share in shares]


def token_imbalance(plan: Sequence[MiniBatch], headers: Sequence[Sized]) -> float:
    """How far the rank with the most tokens is above the mean, in the worst mini-batch; 0 for one rank."""
    return cost_imbalance(plan, headers, RowCost())


def cost_imbalance(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> float:
    """How far the rank with the highest cost is above the mean, in the worst mini-batch; 0 for one rank."""
    return max(
        imbalance([sum(cost.of(headers[row].tokens) for micro in micros for row in micro) for micros in mini.ranks])
        for mini in plan
    )


def _first_fit(rows: list[int], headers: Sequence[Sized], max_tokens: int) -> list[list[int]]:
    """Few micro-batches within the budget: each row, longest first, goes into the first that has room."""
    micros, sums = list[list[int]](), list[int]()
    for row in rows:
        tokens = headers[row].tokens
        place = next((i for i, filled in enumerate(sums) if filled + tokens <= max_tokens), None)
        if place is None:
            micros.append([row])
            sums.append(tokens)
        else:
            micros[place].append(row)
            sums[place] += tokens
    return micros


def _even(
    micros: list[list[int]], count: int, headers: Sequence[Sized], max_tokens: int, cost: RowCost
) -> list[list[int]]:
    """Spread the rows of ``micros`` over ``count`` micro-batches of nearly equal cost; unchanged if those overflow."""
    rows = [row for micro in micros for row in micro]
    even = _balance(rows, headers, count, cost)
    fits = all(len(micro) <= 1 or sum(headers[row].tokens for row in micro) <= max_tokens for micro in even)
    return even if fits else micros


def _similar(rows: list[int], headers: Sequence[Sized], max_tokens: int) -> list[list[int]]:
    micro: list[list[int]] = []
    longest = 0
    for row in rows:  # longest first, so the first row of a micro-batch sets its width
        if micro and longest * (len(micro[-1]) + 1) <= max_tokens:
            micro[-1].append(row)
        else:
            micro.append([row])
            longest = headers[row].tokens
    return micro
