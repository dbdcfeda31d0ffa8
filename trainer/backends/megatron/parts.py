"""What Megatron's ranks hold, for a gathering of the weights: boxes of the tensors that each parameter is fused of."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.trainer.backends.megatron.weights import Spread, held, names_of, shapes_in
from rl_async.weight_sync.buckets.buckets import dtype_name
from rl_async.weight_sync.layout import Box, Layout, TensorSpec, lengths
from rl_async.weight_sync.reshard.execute import split_fused
from rl_async.weight_sync.reshard.gather import ShardedWeights
from rl_async.weight_sync.reshard.model_layouts import fused_parts, megatron


def layout_of(spread: Spread, folder: Path, dtype: torch.dtype) -> Layout:
    """Who holds what, of tensors with the shapes of those in ``folder``; in ``dtype`` they travel."""
    shape, parallel = spread.shape, spread.parallel
    shapes = shapes_in(folder, names_of(shape))
    specs = {name: TensorSpec(size, dtype_name(dtype)) for name, size in shapes.items()}
    return megatron(
        specs,
        kv_heads=shape.groups,
        tp=parallel.tensor.size,
        pp=parallel.pipeline.size,
        ep=parallel.expert.size,
        dp=parallel.data.size,
        virtual_stages=parallel.virtual_stages,
    )


def parts_of(spread: Spread, layout: Layout) -> ShardedWeights:
    """This rank's parameters as views under Hugging Face names."""
    rank = dist.get_rank()
    found: dict[tuple[str, Box], Tensor] = {}
    for parameter, _, names in held(spread):
        values = parameter.detach()
        rows = sum(lengths(box)[0] for _, box in fused_parts(layout, rank, names))
        found |= split_fused(values[:rows], layout, rank, names)  # below may be rows that pad a vocabulary
    return ShardedWeights(layout, found)
