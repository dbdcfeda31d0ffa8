"""The batch of a step as tensors that every rank holds whole, so that formulas over it need no communication.

Only numbers per token are gathered (log-probabilities, masks, ages), never the rows themselves: for a batch of 1,024
rows of 8,192 tokens each tensor takes 32 MiB of host memory.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_async.messages import TrajectoryHeader
from rl_async.trainer.batches.batching import Tensors
from rl_async.trainer.batches.data_parallel import DataParallel


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of this rank: indexes of its rows in the batch, and their tensors on the device."""

    rows: list[int]
    tensors: Tensors

    def cut(self, whole: Tensor) -> Tensor:
        """This micro-batch's part [B, T-1] of a whole-batch tensor [N, T]; for one without rows, zeros [1, 1]."""
        if not self.rows:
            return torch.zeros((1, 1), dtype=whole.dtype, device=self.tensors.mask.device)
        return whole[self.rows, : self.tensors.mask.shape[1]].to(self.tensors.mask.device)


@dataclass(frozen=True)
class WholeBatch:
    """N rows, T predicted tokens of the longest row; on the host, in batch order, the same on every rank."""

    headers: Sequence[TrajectoryHeader]
    mask: Tensor  # bool [N, T]
    behaviour: Tensor  # [N, T], log mu
    age: Tensor  # int64 [N, T], staleness in steps
    turns: Tensor  # int64 [N, T], assistant turn of each sampled token; -1 elsewhere
    turn_rewards: Tensor  # [N, T], on the last token of their turn

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.shape[0], self.mask.shape[1]

    @property
    def row_weights(self) -> Tensor:
        """float64 [N], 1 / rows of the row's episode: an episode counts once, however many rows it became."""
        rows = Counter(h.episode_id for h in self.headers)
        return torch.tensor([1.0 / rows[h.episode_id] for h in self.headers], dtype=torch.float64)


def gather(
    data_parallel: DataParallel, micros: Sequence[MicroBatch], parts: Sequence[Tensor], shape: tuple[int, int]
) -> Tensor:
    """One tensor [B, T-1] per micro-batch of each cell, as [N, T] on every rank: float64 if they are, else float32.

    A collective. Every row is held by exactly one cell, so adding up is exact.
    """
    double = any(part.dtype == torch.float64 for part in parts)
    whole = torch.zeros(shape, dtype=torch.float64 if double else torch.float32)
    for micro, part in zip(micros, parts, strict=True):
        if micro.rows:
            whole[micro.rows, : part.shape[1]] = part.detach().to("cpu", whole.dtype)
    data_parallel.all_reduce(whole)
    return whole


def assemble(
    data_parallel: DataParallel, headers: Sequence[TrajectoryHeader], micros: Sequence[MicroBatch]
) -> WholeBatch:
    """Gather what the rows themselves say. A collective."""
    shape = (len(headers), max(max(h.tokens for h in headers) - 1, 1))
    tensors = [micro.tensors for micro in micros]
    return WholeBatch(
        headers=headers,
        mask=gather(data_parallel, micros, [t.mask for t in tensors], shape).bool(),
        behaviour=gather(data_parallel, micros, [t.behaviour for t in tensors], shape),
        age=gather(data_parallel, micros, [t.age for t in tensors], shape).long(),
        turns=gather(data_parallel, micros, [t.turns + 1 for t in tensors], shape).long() - 1,
        turn_rewards=gather(data_parallel, micros, [t.turn_rewards for t in tensors], shape),
    )
