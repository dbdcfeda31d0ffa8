"""Whole weights of a backend on every rank, for tests that compare them."""

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.trainer.backend import Backend
from rl_async.weight_sync.layout import Layout, Shard, whole
from rl_async.weight_sync.reshard import PointToPoint, plan, reshard

BUCKET, DEADLINE_S = 1 << 20, 60.0


def whole_weights(backend: Backend) -> dict[str, Tensor]:
    """Copies, by name, in the type in which they travel. A collective."""
    layout, held = backend.sharded_weights()
    ranks = range(dist.get_world_size())
    everywhere = {
        name: tuple(Shard(rank, whole(spec.shape)) for rank in ranks) for name, spec in layout.tensors.items()
    }
    found = {
        (name, whole(spec.shape)): torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=backend.device)
        for name, spec in layout.tensors.items()
    }
    made = plan(layout, Layout(layout.tensors, everywhere), BUCKET)
    wire = PointToPoint(dist.HashStore(), device=backend.device)
    reshard(made, dist.get_rank(), held, found, wire, DEADLINE_S)
    return {name: tensor for (name, _), tensor in found.items()}
