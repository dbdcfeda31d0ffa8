"""One pass of micro-batches through the pipeline, as callbacks of Megatron-Core's schedules.

The rows of a micro-batch are packed into one sequence, of which ranks that share rows hold a part each.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_async.trainer.backends.interface import LossFn, OutputName, Outputs
from rl_async.trainer.backends.megatron.attention import shared_places
from rl_async.trainer.backends.megatron.mapping import Shape
from rl_async.trainer.backends.megatron.parallel import Axis, Parallel
from rl_async.trainer.backends.megatron.routing import ReplayedRouter, hand_out
from rl_async.trainer.batches.tensors import Tensors


class PackedRows(NamedTuple):
    """A packed micro-batch: which tokens each of the S ranks that share its rows holds, [S, N].

    Rows are padded at their ends so that ranks hold equal parts, and behind the last one so that these divide further.
    """

    rows: Tensor  # int64, number in the batch
    places: Tensor  # int64, position in the row
    there: Tensor  # bool, whether it is a token and not padding, which has row and position of any token
    lengths: Tensor  # int64 [B] or [B + 1], with padding, on the host


OutputsOf = Callable[[Tensor, Tensors, PackedRows], Outputs]  # of the last stage's output
RoutersOf = Callable[[Any], Sequence[ReplayedRouter]]  # of a part of the model


class Pass:
    """The callbacks of one pass, and what they collect: ``outputs`` and ``losses`` by micro-batch.

    Micro-batches beyond ``count`` only fill the pipeline. A rank's tokens are padded to a ``multiple``. ``gives`` names
    the fields of the outputs, ``given`` those of a model and a request.
    """

    def __init__(
        self,
        loss_fn: LossFn | None,
        count: int,
        gives: Sequence[str],
        outputs_of: OutputsOf,
        routers_of: RoutersOf,
        context: Axis,
        multiple: int,
    ) -> None:
        self._loss_fn, self._count, self._gives, self._outputs_of = loss_fn, count, gives, outputs_of
        self._routers_of, self._context, self._multiple = routers_of, context, multiple
        self.outputs: list[Outputs] = []
        self.losses = list[Tensor]()  # on the device: reading one would wait for it

    def forward(self, batches: Iterator[tuple[int, Tensors]], chunk: Any) -> tuple[Tensor, Any]:
        """Pass the next micro-batch through a part of the model; return its output and the loss function for it."""
        number, batch = next(batches)
        packed = pack_rows(batch, self._context.size, self._multiple)
        rows, places = packed.rows[self._context.rank], packed.places[self._context.rank]
        record = None if batch.experts is None else batch.experts[rows.cpu(), places.cpu()].to(rows.device)
        hand_out(self._routers_of(chunk), record)
        tokens = batch.tokens[rows, places]
        out = chunk(tokens[None], places[None], None, packed_seq_params=_packing(packed.lengths, tokens.device))
        return out, functools.partial(self._loss, number, batch, packed)

    def _loss(
        self, number: int, batch: Tensors, packed: PackedRows, out: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return self._take(number, self._outputs_of(out, batch, packed)), torch.zeros((), dtype=torch.int), {}

    def _take(self, number: int, outputs: Outputs) -> Tensor:
        """Keep a micro-batch's outputs and return its loss; 0 for one that only fills the pipeline."""
        self.outputs.append(_detached(outputs))
        if self._loss_fn is None or number >= self._count:
            any_part: Tensor = getattr(outputs, self._gives[0])
            return any_part.sum() * 0.0
        loss = self._loss_fn(number, outputs)
        self.losses.append(loss.detach())
        return loss

    def share(self, batches: Sequence[Tensors], parallel: Parallel) -> None:
        """Broadcast the last stage's outputs to the other stages, which evaluate the loss on them."""
        pipeline = parallel.pipeline
        source = dist.get_global_rank(pipeline.group, pipeline.size - 1)
        for number, batch in enumerate(batches):
            if parallel.is_last_stage:
                found = self.outputs[number]
            else:
                device = batch.tokens.device
                found = Outputs(**{name: torch.empty(batch.mask.shape, device=device) for name in self._gives})
            for name in self._gives:
                dist.broadcast(getattr(found, name), source, group=pipeline.group)
            if not parallel.is_last_stage:
                with torch.no_grad():
                    self._take(number, found)


def given(shape: Shape, requested: frozenset[OutputName]) -> list[str]:
    """Return the outputs that a model of this shape gives on this request."""
    policy = ["logprobs", *sorted(requested - {"values"})] if shape.has_logits else []
    return [*policy, "values"] if "values" in requested or not shape.has_logits else policy


def pack_rows(batch: Tensors, ranks: int, multiple: int) -> PackedRows:
    """Pack a micro-batch for so many ``ranks`` that share its rows, each with a ``multiple`` of tokens."""
    device, count = batch.tokens.device, len(batch.lengths)
    unit = 1 if ranks == 1 else 2 * ranks
    lengths = (batch.lengths + unit - 1) // unit * unit
    if missing := -int(lengths.sum()) % math.lcm(unit, ranks * multiple):
        lengths = torch.cat([lengths, lengths.new_tensor([missing])])
    rows, places = shared_places(_bounds(lengths, device), ranks)
    known = torch.cat([batch.lengths, batch.lengths.new_zeros(1)]).to(device)
    there = places < known[rows]
    return PackedRows(rows.clamp(max=count - 1), places.clamp(max=batch.tokens.shape[1] - 1), there, lengths)


def _bounds(lengths: Tensor, device: torch.device) -> Tensor:
    """Return the bounds of packed rows of these lengths [B], int64 [B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)


def _packing(lengths: Tensor, device: torch.device) -> PackedSeqParams:
    bounds, longest = _bounds(lengths, device).int(), int(lengths.max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _detached(outputs: Outputs) -> Outputs:
    def kept(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.detach().contiguous()

    return Outputs(
        logprobs=kept(outputs.logprobs),
        entropy=kept(outputs.entropy),
        sum_squares=kept(outputs.sum_squares),
        values=kept(outputs.values),
        agreement=outputs.agreement,
    )
