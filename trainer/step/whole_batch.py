"""The batch of a step as tensors that every rank holds whole, so that formulas over it need no communication.

Only numbers per token are exchanged (log-probabilities, turns, turn rewards), never the rows themselves, and they are
packed: a tensor of 4 bytes takes 4 bytes of host memory for each token of the batch, however long its longest row is.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rl_async.messages import Trajectory, TrajectoryHeader
from rl_async.trainer.algorithms.correction import grammar_weights
from rl_async.trainer.algorithms.rows import Rows, on_tokens
from rl_async.trainer.batches.batch import Batch
from rl_async.trainer.batches.data_parallel import DataParallel
from rl_async.trainer.batches.layout import fresh_runs
from rl_async.trainer.batches.tensors import Tensors

# Codes of a token in ``assemble``: 0 not sampled, 1 sampled outside any turn, 2 in assistant turn 0, 3 in turn 1, ...
FIRST_TURN = 2
CONSTRAINED = 1 << 30  # added to the code of a token that was sampled under a grammar's mask


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of this rank: indexes of its rows in the batch, and their tensors on the device."""

    rows: list[int]
    tensors: Tensors
    batch: Rows

    def cut(self, whole: Tensor) -> Tensor:
        """Copy this micro-batch's part [B, T-1] of a whole-batch tensor [M] to the device, padded with zeros.

        For a micro-batch without rows: zeros [1, 1].
        """
        if not self.rows:
            return torch.zeros((1, 1), dtype=whole.dtype, device=self.tensors.mask.device)
        return self.batch.pad(whole, self.rows, self.tensors.mask.shape[1]).to(self.tensors.mask.device)


@dataclass(frozen=True)
class WholeBatch:
    """N rows with M predicted tokens in all; on the host, in batch order, the same on every rank."""

    headers: Sequence[TrajectoryHeader]
    rows: Rows
    mask: Tensor  # bool [M], tokens that train
    behaviour: Tensor  # [M], log mu
    age: Tensor  # int64 [M], staleness in steps
    turns: Tensor  # int64 [M], assistant turn of each sampled token; -1 elsewhere
    turn_rewards: Tensor  # [M], on the last token of their turn
    constrained: Tensor  # bool [M], tokens that were sampled under a grammar's mask
    grammar_weights: Tensor | None = None  # [M], set by ``without_masks``

    def without_masks(self, proximal: Tensor) -> "WholeBatch":
        """Replace log mu of constrained tokens by log pi_old [M], and keep their ratio as ``grammar_weights``.

        To a formula per token they are then as if the policy had sampled them without a mask when the step began. What
        is measured over a row or the batch leaves them out (``free``).
        """
        if not self.constrained.any():
            return self
        return replace(
            self,
            behaviour=torch.where(self.constrained, proximal, self.behaviour),
            grammar_weights=grammar_weights(proximal, self.behaviour, self.constrained),
        )

    @cached_property
    def free(self) -> Tensor:
        """bool [M], tokens that train and were sampled without a mask.

        They alone tell how far policies have moved apart: corrections, ratios of rows, selections and metrics of drift
        are over them.
        """
        return self.mask & ~self.constrained

    @property
    def players(self) -> Tensor:
        """int64 [N], the number of each row's player: its role in its episode, all of an episode that has no roles.

        The rows of a player have one reward.
        """
        return numbered([(h.episode_id, h.role) for h in self.headers])

    @property
    def groups(self) -> Tensor:
        """int64 [N], the number of what each row is compared in: its group, and there its role."""
        return numbered([(h.group_id, h.role) for h in self.headers])

    @property
    def row_weights(self) -> Tensor:
        """float64 [N], 1 / rows of the row's episode: in the loss an episode counts once, however many rows it became.

        0 for a greedy episode, which never trains.
        """
        rows = Counter(h.episode_id for h in self.headers)
        weights = [0.0 if h.baseline else 1.0 / rows[h.episode_id] for h in self.headers]
        return torch.tensor(weights, dtype=torch.float64)

    @property
    def player_weights(self) -> Tensor:
        """float64 [N], 1 / rows of the row's player: in its group an episode counts once for each of its roles.

        0 for a greedy episode, which never trains.
        """
        rows = Counter((h.episode_id, h.role) for h in self.headers)
        weights = [0.0 if h.baseline else 1.0 / rows[h.episode_id, h.role] for h in self.headers]
        return torch.tensor(weights, dtype=torch.float64)


def numbered(keys: Sequence[Hashable]) -> Tensor:
    """Number keys [N] from 0 in the order in which they first occur, int64 [N]."""
    found: dict[Hashable, int] = {}
    return torch.tensor([found.setdefault(key, len(found)) for key in keys], dtype=torch.int64)


def assemble(ranks: DataParallel, batch: Batch, max_staleness: int | None, trains: Tensor) -> WholeBatch:
    """Build the whole batch from each rank's own rows. A collective: one all-reduce of 12 bytes per token.

    A rank fills in the rows that the plan gives it and the all-reduce adds those of the others. Floats travel as the
    integers that have their bits, since adding 0 then changes no bit. Staleness and mask follow from the headers, which
    every rank has. Tokens staler than ``max_staleness`` are masked (None applies no bound), and so are rows where
    ``trains``, bool [N], is false.
    """
    headers = batch.headers
    lengths = torch.tensor([header.tokens for header in headers])
    starts = Rows(lengths).starts.numpy()
    spans = [slice(start, start + header.tokens) for start, header in zip(starts, headers, strict=True)]
    packed = np.zeros((3, int(lengths.sum())), np.int32)
    behaviour, turn_rewards, codes = packed[0].view(np.float32), packed[1].view(np.float32), packed[2]
    for i in (i for mini in batch.plan for micro in mini.ranks[ranks.rank] for i in micro):
        row = batch.rows[headers[i].key]
        behaviour[spans[i]], codes[spans[i]] = row.logprobs, row.loss_mask
        _mark_turns(row, codes[spans[i]], turn_rewards[spans[i]])
        _mark_constrained(row, codes[spans[i]])
    ranks.all_reduce(torch.from_numpy(packed))
    constrained = codes >= CONSTRAINED
    codes -= constrained * np.int32(CONSTRAINED)
    mask, age = np.zeros(codes.shape, bool), np.zeros(codes.shape, np.int64)
    for header, span in zip(headers, spans, strict=True):
        sampled = span.start + np.flatnonzero(codes[span])
        for run in header.versions:
            age[sampled[run.start : run.end]] = batch.step - run.version.step
        for run in fresh_runs(header, batch.step, max_staleness):
            mask[sampled[run.start : run.end]] = True
    # No token predicts the first one of a row.
    predicted, rows = np.ones(codes.shape, bool), Rows(lengths - 1)
    predicted[starts] = False

    def of_predicted(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[predicted])

    return WholeBatch(
        headers=headers,
        rows=rows,
        mask=of_predicted(mask) & on_tokens(trains, rows),
        behaviour=of_predicted(behaviour),
        age=of_predicted(age),
        turns=of_predicted(np.maximum(codes - FIRST_TURN, -1)).long(),
        turn_rewards=of_predicted(turn_rewards),
        constrained=of_predicted(constrained),
    )


def _mark_turns(row: Trajectory, codes: np.ndarray, rewards: np.ndarray) -> None:
    """Write the code of the assistant turn on its sampled tokens [T], and its reward on the last of them."""
    for number, turn in enumerate(turn for turn in row.turns if turn.role == "assistant"):
        sampled = turn.start + np.flatnonzero(row.loss_mask[turn.start : turn.end])
        codes[sampled] = FIRST_TURN + number
        if len(sampled) and turn.reward is not None:
            rewards[sampled[-1]] = turn.reward


def _mark_constrained(row: Trajectory, codes: np.ndarray) -> None:
    """Mark the codes [T] of sampled tokens that a grammar's mask restricted."""
    sampled = np.flatnonzero(row.loss_mask) if row.constrained else ()
    for start, end in row.constrained:
        codes[sampled[start:end]] += CONSTRAINED


def gather(ranks: DataParallel, micros: Sequence[MicroBatch], parts: Sequence[Tensor], rows: Rows) -> Tensor:
    """Bring one tensor [B, T-1] per micro-batch of every rank together, as [M] on the host of all of them.

    A collective. float64 if the parts are, else float32. One data-parallel rank holds each row, so the sum is exact.
    """
    double = any(part.dtype == torch.float64 for part in parts)
    whole = torch.zeros(int(rows.lengths.sum()), dtype=torch.float64 if double else torch.float32)
    for micro, part in zip(micros, parts, strict=True):
        if micro.rows:
            there = rows.there(micro.rows, part.shape[1])
            whole[rows.positions(micro.rows)] = part.detach().to("cpu", whole.dtype)[there]
    ranks.all_reduce(whole)
    return whole
