"""Outputs per token from logits whose vocabulary is split over tensor-parallel ranks.

Ranks exchange a few numbers per token, never the vocabulary. The gradient of a sum over ranks reaches every rank
unchanged; a value that is equal on all ranks and enters their parts again sums the gradients of all (Megatron-LM,
Shoeybi et al. 2019, arXiv:1909.08053, the functions f and g of section 3).
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from rl_async.trainer.backends.interface import OutputName, Outputs
from rl_async.trainer.backends.megatron.parallel import Axis


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
