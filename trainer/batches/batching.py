"""Which rank trains which row in which forward pass: a pure function of the headers, and rows to tensors.

Every rank sees the headers of the whole batch, so all of them compute the same layout and advantages without talking.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from rl_async.messages import Trajectory, TrajectoryHeader, VersionRun
from rl_async.trainer.batches.cost import RowCost
from rl_async.trainer.batches.partition import imbalance, karmarkar_karp


class Sized(Protocol):
    """What the layout asks of a row; every TrajectoryHeader is one."""

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


def fresh_runs(header: TrajectoryHeader, step: int, max_staleness: int | None) -> list[VersionRun]:
    """The runs of sampled tokens that may be trained at ``step``; None: no bound is applied."""
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
    """By how much the rank with the most tokens is above the mean, in the worst mini-batch; 0 for one rank."""
    return cost_imbalance(plan, headers, RowCost())


def cost_imbalance(plan: Sequence[MiniBatch], headers: Sequence[Sized], cost: RowCost) -> float:
    """By how much the rank with the highest cost is above the mean, in the worst mini-batch; 0 for one rank."""
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
    """The rows of ``micros`` over ``count`` micro-batches of nearly equal cost, or as they are if those overflow."""
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


class Tensors(msgspec.Struct):
    """A micro-batch, padded on the right. B rows, T = longest row; position t stands for token t+1."""

    tokens: Tensor  # int64 [B, T]
    lengths: Tensor  # int64 [B] on the host, real tokens of each row
    mask: Tensor  # bool [B, T-1], true where token t+1 is trained
    behaviour: Tensor  # float32 [B, T-1], log mu of token t+1
    age: Tensor  # int32 [B, T-1], staleness of token t+1 in steps
    turns: Tensor  # int32 [B, T-1], assistant turn that sampled token t+1; -1 where none did
    turn_rewards: Tensor  # float32 [B, T-1], a turn's own reward on its last token
    temperature: Tensor  # float32 [B, 1, 1]


def collate(rows: Sequence[Trajectory], *, step: int, max_staleness: int | None, device: str) -> Tensors:
    """Pad rows to tensors. Tokens staler than ``max_staleness`` are masked; None applies no bound.

    No attention mask is needed: padding stands behind every real token, where causal attention never looks.
    """
    width = max(max(len(r.token_ids) for r in rows), 2)
    shape = len(rows), width
    tokens, age = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    mask, behaviour = np.zeros(shape, bool), np.zeros(shape, np.float32)
    turns, turn_rewards = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        n = len(row.token_ids)
        tokens[i, :n], behaviour[i, :n] = row.token_ids, row.logprobs
        sampled = np.flatnonzero(row.loss_mask)
        for run in row.versions:
            age[i, sampled[run.start : run.end]] = step - run.version.step
        for run in fresh_runs(row.header(), step, max_staleness):
            mask[i, sampled[run.start : run.end]] = True
        _mark_turns(row, turns[i], turn_rewards[i])
    return Tensors(
        tokens=torch.from_numpy(tokens).to(device),
        lengths=torch.tensor([len(r.token_ids) for r in rows]),
        mask=torch.from_numpy(mask[:, 1:]).to(device),
        behaviour=torch.from_numpy(behaviour[:, 1:]).to(device),
        age=torch.from_numpy(age[:, 1:]).to(device),
        turns=torch.from_numpy(turns[:, 1:]).to(device),
        turn_rewards=torch.from_numpy(turn_rewards[:, 1:]).to(device),
        temperature=torch.tensor([r.sampling.temperature or 1.0 for r in rows], device=device)[:, None, None],
    )


def _mark_turns(row: Trajectory, turns: np.ndarray, rewards: np.ndarray) -> None:
    """Write the number of the assistant turn on its sampled tokens [T], and its reward on the last of them."""
    spans = [turn for turn in row.turns if turn.role == "assistant"]
    for number, turn in enumerate(spans):
        sampled = turn.start + np.flatnonzero(row.loss_mask[turn.start : turn.end])
        turns[sampled] = number
        if len(sampled) and turn.reward is not None:
            rewards[sampled[-1]] = turn.reward


def empty_tensors(device: str) -> Tensors:
    """A micro-batch that trains nothing, for a rank that has to join a forward pass without rows."""
    return Tensors(
        tokens=torch.zeros((1, 2), dtype=torch.int64, device=device),
        lengths=torch.tensor([2]),
        mask=torch.zeros((1, 1), dtype=torch.bool, device=device),
        behaviour=torch.zeros((1, 1), device=device),
        age=torch.zeros((1, 1), dtype=torch.int32, device=device),
        turns=torch.full((1, 1), -1, dtype=torch.int32, device=device),
        turn_rewards=torch.zeros((1, 1), device=device),
        temperature=torch.ones((1, 1, 1), device=device),
    )
