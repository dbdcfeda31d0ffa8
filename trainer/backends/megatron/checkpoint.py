"""Saves what this rank's optimizer keeps, as boxes of tensors under the FSDP2 backend's names, and reads it.

Any number of ranks, laid out in any way, can continue from it, and so can the FSDP2 backend, whose checkpoints are read
here too. Nothing is gathered: beside what it keeps, or copies to save it, a rank holds one parameter at most.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.errors import CheckpointDamaged, UserError
from rl_async.trainer.backends.megatron.mapping import TIED_OUTPUT
from rl_async.trainer.backends.megatron.optimizer import MOMENTS, DistributedAdamW
from rl_async.trainer.backends.megatron.slices import Fill, Shard, fill, parts_of
from rl_async.trainer.backends.megatron.weights import (
    ShardedModel,
    checkpoint_name,
    local_parameters,
    open_model,
    open_shards,
)
from rl_async.trainer.checkpoints.export import SHARDS
from rl_async.trainer.checkpoints.shards import MOMENT, STEPS, UNREADABLE, Part, StoredShards, on_all_ranks
from rl_async.trainer.model.heads import VALUE_HEAD_FILE

HOST = torch.device("cpu")


def host_copy(model: ShardedModel, optimizer: DistributedAdamW) -> Iterator[Part]:
    """Copy what this rank saves to host memory: masters, moments and, on rank 0, the number of steps. Not a collective.

    One rank saves each number: the data-parallel one whose optimizer keeps it, and of tensor-parallel copies the first.
    """
    for parameter, shard in local_parameters(model):
        own = optimizer.own(parameter)
        if own is None or not _saves(shard):
            continue
        kept = {"": own.master} | {f"{MOMENT}{key}": own.moments[key] for key in MOMENTS if key in own.moments}
        for part in parts_of(shard, model.shape, range(own.start, own.start + own.master.numel())):
            name = checkpoint_name(part.name, model.shape.head)
            for ending, flat in kept.items():
                for box, numbers in part.split(part.copy_to(HOST, flat)):
                    yield Part(f"{name}{ending}", box, numbers)
    if dist.get_rank() == 0:
        yield Part(STEPS, (), torch.tensor(optimizer.steps))


def _saves(shard: Shard) -> bool:
    """Return whether this rank saves the shard; tensor-parallel ranks have copies of some, a last stage of the
    embedding."""
    return shard.rule != TIED_OUTPUT and (shard.rule.form != "copy" or shard.rank == 0)


def read_weights(model: ShardedModel, optimizer: DistributedAdamW | None, source: Fill) -> None:
    """Read this rank's part of the weights from ``source``, each tensor once, into parameters and their masters."""
    for parameter, shard in local_parameters(model):
        weights = parameter.detach()
        if optimizer is None or weights.dtype == torch.float32:
            fill(shard, model.shape, 0, weights.view(-1), source)
            continue
        unrounded = torch.empty_like(weights, dtype=torch.float32)
        fill(shard, model.shape, 0, unrounded.view(-1), source)
        weights.copy_(unrounded)
        own = optimizer.own(parameter)
        if own is not None:
            own.master.copy_(unrounded.view(-1)[own.start : own.start + own.master.numel()])


def restore(model: ShardedModel, optimizer: DistributedAdamW, folder: Path) -> None:
    """Continue from what either backend wrote: weights, moments and steps. A collective.

    Raises CheckpointDamaged on all ranks if one of them cannot read its part, and UserError if a value head is missing.
    """
    if model.shape.has_values and not (folder / VALUE_HEAD_FILE).is_file():
        raise UserError(f"{folder} has no value head, which critic needs; set critic as in that run")
    try:
        on_all_ranks(lambda: _restore(model, optimizer, folder), None, CheckpointDamaged, (*UNREADABLE, UserError))
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{folder}: {error}") from error


def _restore(model: ShardedModel, optimizer: DistributedAdamW, folder: Path) -> None:
    """Read weights, moments if there are any, and the number of steps."""
    head, sharded = model.shape.head, (folder / SHARDS).is_dir()
    stored = StoredShards(folder / SHARDS if sharded else folder)
    # Older formats have the weights in the Hugging Face folder alone: see checkpoints/folder.py.
    read_weights(model, optimizer, open_shards(stored, head) if sharded else open_model(folder, model.shape))
    optimizer.steps = int(stored.whole(STEPS))
    if not any(name.endswith(f"{MOMENT}{MOMENTS[0]}") for name in stored.sizes):
        return
    sources = {key: open_shards(stored, head, f"{MOMENT}{key}") for key in MOMENTS}
    for parameter, shard in local_parameters(model):
        own = optimizer.own(parameter)
        if own is None:
            continue
        moments: dict[str, Tensor] = {}
        for key, source in sources.items():
            moments[key] = torch.empty_like(own.master)
            fill(shard, model.shape, own.start, moments[key], source)
        optimizer.set_moments(parameter, moments)
