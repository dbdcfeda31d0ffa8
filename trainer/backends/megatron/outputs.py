"""Outputs per token: from logits whose vocabulary is split over tensor-parallel ranks, and values.

Ranks exchange a few numbers per token, never the vocabulary. The gradient of a sum over ranks reaches every rank
unchanged; a value that is equal on all ranks and enters their parts again sums the gradients of all (Megatron-LM,
Shoeybi et al. 2019, arXiv:1909.08053, the functions f and g of section 3).
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_async.trainer.backends.interface import OutputName, Outputs
from rl_async.trainer.backends.megatron.parallel import Axis
from rl_async.trainer.model.heads import Head, ValueHead


def vocab_parallel_outputs(
    logits: Tensor, chosen: Tensor, requested: frozenset[OutputName], tensor: Axis, vocabulary: int
) -> Outputs:
    """Compute outputs [N], equal on all ranks of ``tensor``, from this rank's columns of the logits, [N, V / ranks].

    ``chosen``, int64 [N], are the tokens that follow. Columns beyond ``vocabulary`` are padding and have probability 0.
    """
    first = tensor.rank * logits.shape[1]
    padding = first + torch.arange(logits.shape[1], device=logits.device) >= vocabulary
    logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor.group)
    logits = logits - largest[:, None]
    normaliser = _sum(logits.exp().sum(1), tensor).log()
    logprobs = _sum(_pick(logits, chosen - first), tensor) - normaliser
    if not requested:
        return Outputs(logprobs)
    distribution = logits - mappings.copy_to_tensor_model_parallel_region(normaliser, group=tensor.group)[:, None]
    distribution = distribution.masked_fill(padding, torch.finfo(logits.dtype).min / 4)  # exp is 0 and 0 * it is 0
    return Outputs(
        logprobs=logprobs,
        entropy=-_sum((distribution.exp() * distribution).sum(1), tensor) if "entropy" in requested else None,
        sum_squares=_sum((2 * distribution).exp().sum(1), tensor) if "sum_squares" in requested else None,
    )


def _pick(logits: Tensor, column: Tensor) -> Tensor:
    """Return the logit in each row's column, [N]; 0 where another rank holds it."""
    mine = (column >= 0) & (column < logits.shape[1])
    picked = logits.gather(1, torch.where(mine, column, 0)[:, None]).squeeze(1)
    return torch.where(mine, picked, 0.0)


def _sum(part: Tensor, tensor: Axis) -> Tensor:
    return mappings.reduce_from_tensor_model_parallel_region(part, group=tensor.group)


class ParallelValueHead(ValueHead):
    """A value head, whole on every rank of the last stage. It keeps the values of the last pass for ``take``.

    Its input are hidden states of Megatron-Core's layers, [N, 1, H], or with sequence parallelism a part of the tokens.
    Each rank's gradient of the head is then that of its tokens, and Megatron-Core sums it over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, tensor: Axis) -> None:
        super().__init__(config.hidden_size)
        self._shares, self._group = config.sequence_parallel, tensor.group
        self._kept: Tensor | None = None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def keep(self, hidden: Tensor) -> None:
        """Compute the values of these tokens, with gradient if the pass has one."""
        values = self(hidden)[:, 0]
        if self._shares:
            values = mappings.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._group
            )
        self._kept = values.float()

    def take(self) -> Tensor:
        """Return the values of the last pass, float32 [N] on every rank, and forget them."""
        assert self._kept is not None
        values, self._kept = self._kept, None
        return values


class NoLogits(torch.nn.Module):
    """Stands in for Megatron-Core's output layer where there are values alone."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return logits of no vocabulary, [N, 1, 0]."""
        return hidden[..., :0], None


def add_value_head(chunk: Any, head: Head, config: TransformerConfig, tensor: Axis) -> None:
    """Give the last part of a model a value head, ``output_layer.value_head``, beside its logits or in their place."""
    if head == "value":
        chunk.output_layer = NoLogits()
    value_head = chunk.output_layer.value_head = ParallelValueHead(config, tensor)
    chunk.output_layer.register_forward_pre_hook(lambda _, inputs: value_head.keep(inputs[0]))
