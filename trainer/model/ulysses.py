"""Ranks that share each packed row: DeepSpeed-Ulysses (arXiv:2309.14509).

Each of S ranks holds N / S tokens of a row of N, for everything that a token does by itself. Around attention an
all-to-all exchanges sequence for heads, so that every rank attends over the whole row with 1 / S of the heads, and
a second one goes back:

    [heads, N / S] ──> to_heads ──> [heads / S, N] ──> attention ──> to_sequence ──> [heads, N / S]

What the model says of its tokens (log-probabilities, entropies, values) is gathered, so that all S ranks compute the
same loss L from the same numbers of the whole row, and nothing after the forward pass is aware of the exchange: losses
of whole sequences, means over tokens and returns need no change.

Why the gradient is right. ``gathered`` passes to each rank dL / d(its own outputs) alone, so over the S ranks L is
counted once, and every exchange passes gradients back to the rank whose tokens they belong to. A rank's gradient of a
weight is then the part of dL / dw that goes through its tokens and its heads, and dL / dw is the sum over ranks. That
is what FSDP adds up over all ranks, those of one row and those of different rows alike: no factor depends on S. The
transpose of a plain all-gather would add up S equal losses, each of which would have to be divided by S.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.trainer.batches.data_parallel import DataParallel, adjacent_and_strided, pure_data_parallel


@dataclass(frozen=True)
class Sharing:
    """The ranks that share each packed row: which of them this is, how many there are, and their group."""

    rank: int
    size: int
    group: dist.ProcessGroup


def join_groups(size: int, timeout_s: float) -> tuple[DataParallel, Sharing | None]:
    """Let runs of ``size`` adjacent processes share rows, as one data-parallel rank each. A collective.

    The second result is None if every process has rows of its own.

    Exchanges wait no longer than ``timeout_s``. ``size`` divides the number of ranks.
    """
    if size == 1:
        return pure_data_parallel(), None
    inside, across = adjacent_and_strided(size, timeout_s)
    number, place = divmod(dist.get_rank(), size)
    data_parallel = DataParallel(number, dist.get_world_size() // size, is_recorder=place == 0, group=across)
    return data_parallel, Sharing(place, size, inside)


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of all heads [1, heads, n, D] to the whole row's of its heads, [1, heads / S, N, D].

    Heads that S does not divide are repeated, each as often as it takes: with grouped queries a rank needs a copy of
    those of the keys that its queries look at. S divides the heads of the queries, so each rank's go together still.
    """
    size = group.size()
    heads = x.shape[1]
    x = x.repeat_interleave(math.lcm(heads, size) // heads, 1)
    by_rank = x[0].unflatten(0, (size, -1))  # [S, heads / S, n, D]
    return _swapped(by_rank, group).transpose(0, 1).flatten(1, 2)[None]


def to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What this rank's heads found for the whole row [1, N, heads / S, D] to what all found for its tokens,
    [1, n, heads, D]."""
    by_rank = x[0].unflatten(0, (group.size(), -1))  # [S, n, heads / S, D]
    return _swapped(by_rank, group).transpose(0, 1).flatten(1, 2)[None]


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's part [n, ...] one after another, [N, ...]; the gradient is that of this rank's own part."""
    whole: Tensor = _Gather.apply(part, group)
    return whole


def _swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S, ...]: x[r] goes to rank r, and result[r] came from it. It is its own transpose."""
    result: Tensor = _Swap.apply(x, group)
    return result


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.length = group.rank(), len(part)
        whole = part.new_empty(group.size() * len(part), *part.shape[1:])
        dist.all_gather(list(whole.split(len(part))), part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(0, ctx.rank * ctx.length, ctx.length), None
