"""The layout of a batch: which rank trains which row in which forward pass, as a pure function of the headers.

Every rank sees the headers of the whole batch, so all ranks compute the same layout without communicating.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl_async.configs.schema.run import RunConfig
from rl_async.messages import TrajectoryHeader, VersionRun
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.partition import imbalance, karmarkar_karp

WORTH_DIVIDING = 0.95  # of the busiest rank's work


class Sized(Protocol):
    """What the layout reads of a row; every TrajectoryHeader has it."""

    @property
    def tokens(self) -> int: ...

    @property
    def baseline(self) -> bool: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def prompt(self) -> Hashable: ...


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

    Groups are permuted with (seed, step) and their rows cut into ``minibatches`` equal parts, so that rows of one
    prompt stay together but for those at a cut; greedy episodes, which do not train, are dealt out to them afterwards,
    so that no part has nothing else. Within a part ranks get nearly equal cost, and so do the micro-batches of a rank,
    none of which holds more than ``max_tokens`` tokens (a single longer row stands alone). For a model that shares
    prefixes, a prompt counts once in each micro-batch. For one that pads, a micro-batch holds rows of similar length,
    and padding counts.
    """
    sizes = Sizes(headers, cost)
    groups = sizes.by_prompt([row for row, header in enumerate(headers) if not header.baseline])
    order = np.random.default_rng([seed & 0xFFFFFFFF, step]).permutation(len(groups))
    train = np.array([row for group in order for row in groups[group]], dtype=np.int64)
    parts = [part.tolist() for part in np.array_split(train, minibatches) if len(part)] or [[]]
    for number, row in enumerate(row for row, header in enumerate(headers) if header.baseline):
        parts[number % len(parts)].append(row)
    result = []
    for part in parts:
        shares = _over_ranks(part, sizes, ranks)
        if cost.padded:
            per_rank = [_similar(rows, headers, max_tokens) for rows in shares]
        else:
            best_fit = [_best_fit(rows, sizes, max_tokens) for rows in shares]
            deepest = max(len(micro) for micro in best_fit)
            per_rank = [_even(micro, deepest, sizes, max_tokens) for micro in best_fit]
        deepest = max(len(micro) for micro in per_rank)
        for micro in per_rank:
            micro.extend([] for _ in range(deepest - len(micro)))
        result.append(MiniBatch(ranks=per_rank, rows=sorted(part)))
    return result


@dataclass(frozen=True)
class Sizes:
    """How large rows are together, in one micro-batch."""

    headers: Sequence[Sized]
    cost: RowCost

    def tokens(self, rows: Sequence[int]) -> int:
        """The tokens that are computed."""
        return self._sum(rows, lambda tokens: tokens)

    def work(self, rows: Sequence[int]) -> int:
        """Their cost."""
        return self._sum(rows, self.cost.of)

    def _sum(self, rows: Sequence[int], of: Callable[[int], int]) -> int:
        if not self.cost.shares_prefixes:
            return sum(of(self.headers[row].tokens) for row in rows)
        prompts = {self.headers[row].prompt: of(self.headers[row].prompt_tokens) for row in rows}
        own = sum(of(self.headers[row].tokens) - of(self.headers[row].prompt_tokens) for row in rows)
        return own + sum(prompts.values())

    def by_prompt(self, rows: Sequence[int]) -> list[list[int]]:
        """Rows with the same prompt together, in order of their first."""
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            header = self.headers[row]
            groups.setdefault(header.prompt if header.prompt_tokens else ("alone", row), []).append(row)
        return list(groups.values())

    def pieces(self, rows: Sequence[int], most: int) -> list[list[int]]:
        """Rows that share a prompt in pieces of at most ``most``; single ones if nothing is shared."""
        if not self.cost.shares_prefixes:
            return [[row] for row in rows]
        return [group[at : at + most] for group in self.by_prompt(rows) for at in range(0, len(group), most)]


def _balance(pieces: list[list[int]], sizes: Sizes, parts: int) -> list[list[list[int]]]:
    """Deal pieces out to parts of nearly equal cost, each with its most expensive piece first."""
    shares = karmarkar_karp([sizes.work(piece) for piece in pieces], parts)
    return [[pieces[number] for number in share] for share in shares]


def _over_ranks(rows: list[int], sizes: Sizes, ranks: int) -> list[list[int]]:
    """Give each rank its rows. Groups are halved, and halved again, only while that relieves the busiest rank: a prompt
    that two ranks have is computed by both."""
    if ranks == 1:
        return [rows]
    best, busiest = list[list[int]](), 0.0
    most = max((len(piece) for piece in sizes.pieces(rows, len(rows) or 1)), default=1)
    while most:
        shares = [_rows(share) for share in _balance(sizes.pieces(rows, most), sizes, ranks)]
        work = max(sizes.work(share) for share in shares)
        if not best or work < WORTH_DIVIDING * busiest:
            best, busiest = shares, work
        most //= 2
    return best


def _rows(pieces: list[list[int]]) -> list[int]:
    return [row for piece in pieces for row in piece]


def token_imbalance(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> float:
    """How far the rank with the most tokens is above the mean, in the worst mini-batch; 0 for one rank."""
    return cost_imbalance(plan, headers, RowCost(shares_prefixes=cost.shares_prefixes))


def cost_imbalance(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> float:
    """How far the rank with the highest cost is above the mean, in the worst mini-batch; 0 for one rank."""
    sizes = Sizes(headers, cost)
    return max(imbalance([sum(sizes.work(micro) for micro in micros) for micros in mini.ranks]) for mini in plan)


def forward_flops(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> int:
    """Floating-point operations of one forward pass over the batch, on all ranks together."""
    sizes = Sizes(headers, cost)
    return sum(sizes.work(micro) for mini in plan for micros in mini.ranks for micro in micros)


def _best_fit(rows: list[int], sizes: Sizes, max_tokens: int) -> list[list[list[int]]]:
    """Few micro-batches within the budget: each group that fits into one, largest first, goes into the fullest that has
    room, and a larger one is divided."""
    micros, rooms = list[list[list[int]]](), list[tuple[int, int]]()
    pieces = [part for piece in sizes.pieces(rows, len(rows)) for part in _divided(piece, sizes, max_tokens)]
    for tokens, piece in sorted(((sizes.tokens(piece), piece) for piece in pieces), key=lambda sized: -sized[0]):
        place = bisect_left(rooms, (tokens, 0))
        if place == len(rooms):
            micros.append([piece])
            insort(rooms, (max_tokens - tokens, len(micros) - 1))
        else:
            room, number = rooms.pop(place)
            micros[number].append(piece)
            insort(rooms, (room - tokens, number))
    return micros


def _divided(group: list[int], sizes: Sizes, max_tokens: int) -> list[list[int]]:
    """Parts of a group within the budget; a single longer row stands alone."""
    parts, filled = list[list[int]](), 0
    for row in group:
        added = sizes.tokens([row]) - (sizes.headers[row].prompt_tokens if parts and sizes.cost.shares_prefixes else 0)
        if parts and filled + added <= max_tokens:
            parts[-1].append(row)
            filled += added
        else:
            parts.append([row])
            filled = sizes.tokens([row])
    return parts


def _even(micros: list[list[list[int]]], count: int, sizes: Sizes, max_tokens: int) -> list[list[int]]:
    """Spread the pieces of ``micros`` over ``count`` micro-batches of nearly equal cost, unless those overflow."""
    even = [_rows(pieces) for pieces in _balance([piece for micro in micros for piece in micro], sizes, count)]
    fits = all(len(micro) <= 1 or sizes.tokens(micro) <= max_tokens for micro in even)
    return even if fits else [_rows(micro) for micro in micros]


def _similar(rows: list[int], headers: Sequence[Sized], max_tokens: int) -> list[list[int]]:
    micro: list[list[int]] = []
    longest = 0
    for row in sorted(rows, key=lambda row: -headers[row].tokens):  # the first row of a micro-batch sets its width
        if micro and longest * (len(micro[-1]) + 1) <= max_tokens:
            micro[-1].append(row)
        else:
            micro.append([row])
            longest = headers[row].tokens
    return micro
