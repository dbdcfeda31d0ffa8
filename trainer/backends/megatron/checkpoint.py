"""Checkpoints of a model that is spread over ranks: whole tensors, in the names and files of the FSDP2 backend.

Any number of ranks can continue from them, and so can the FSDP2 backend, whose own shards are read here too.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_async.errors import CheckpointDamaged, UserError
from rl_async.trainer.backends.megatron.mapping import VALUE_HEAD
from rl_async.trainer.backends.megatron.optimizer import MOMENTS, DistributedAdamW
from rl_async.trainer.backends.megatron.weights import (
    Fetch,
    ShardedModel,
    checkpoint_name,
    fill,
    open_model,
    open_shards,
    stream,
)
from rl_async.trainer.checkpoints.export import SHARDS, WEIGHTS, WHOLE
from rl_async.trainer.checkpoints.shards import MOMENT, UNREADABLE, StoredShards, on_all_ranks
from rl_async.trainer.model.heads import MODEL_FOLDER, VALUE_HEAD_FILE

STEPS = "schedule|steps"
OPTIMIZER_FILE = "optimizer.safetensors"


class Collected(NamedTuple):
    """Whole tensors of model, value head and optimizer, on the host of rank 0."""

    model: dict[str, Tensor]
    value_head: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write the tensors, without what describes them. ``folder`` has a folder for the model."""
        save_file(self.model, folder / MODEL_FOLDER / WHOLE, {"format": "pt"})
        if self.value_head:  # not in the model's folder, from which engines load every tensor
            save_file(self.value_head, folder / VALUE_HEAD_FILE)
        save_file(self.optimizer, folder / OPTIMIZER_FILE)


def read_weights(model: ShardedModel, optimizer: DistributedAdamW | None, fetch: Fetch) -> None:
    """Write this rank's part of the tensors from ``fetch``, each read once, into the weights and their masters."""

    def write(parameter: torch.nn.Parameter, whole: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(whole)
        if optimizer is not None:
            optimizer.set_master(parameter, whole)

    fill(model, fetch, write)


def collect(model: ShardedModel, optimizer: DistributedAdamW) -> Collected | None:
    """Gather whole tensors under the FSDP2 backend's names on rank 0; None on the others. A collective."""
    head = model.shape.head
    weights = _on_rank0(stream(model, optimizer.master))
    state: dict[str, Tensor] = {}
    for key in MOMENTS if optimizer.has_moments else ():
        moments = _on_rank0(stream(model, functools.partial(optimizer.moment, key=key)))
        state |= {f"{checkpoint_name(name, head)}{MOMENT}{key}": moment for name, moment in moments.items()}
    if dist.get_rank() != 0:
        return None
    if optimizer.has_moments:
        steps = float(optimizer.steps)
        state |= {f"{checkpoint_name(name, head)}{MOMENT}step": torch.tensor(steps) for name in weights}
    state[STEPS] = torch.tensor(optimizer.steps)
    named = {checkpoint_name(name, head): tensor for name, tensor in weights.items()}
    return Collected(
        model={name.removeprefix(WEIGHTS): tensor for name, tensor in named.items() if name.startswith(WEIGHTS)},
        value_head={
            name.removeprefix(VALUE_HEAD): tensor for name, tensor in named.items() if name.startswith(VALUE_HEAD)
        },
        optimizer=state,
    )


def restore(model: ShardedModel, optimizer: DistributedAdamW, folder: Path) -> None:
    """Continue from what either backend wrote: weights, moments and step.

    Raises CheckpointDamaged for shards that cannot be read, and UserError if a value head is missing.
    """
    if (folder / SHARDS).is_dir():
        shards = folder / SHARDS
        on_all_ranks(
            lambda: _restore_shards(model, optimizer, StoredShards(shards)), None, CheckpointDamaged, UNREADABLE
        )
        return
    if model.shape.has_values and not (folder / VALUE_HEAD_FILE).is_file():
        raise UserError(f"{folder} has no value head, which critic needs; set critic as in that run")
    read_weights(model, optimizer, open_model(folder, model.shape))
    state = load_file(folder / OPTIMIZER_FILE)

    def fetch_of(key: str) -> Fetch:
        return lambda name: state[f"{checkpoint_name(name, model.shape.head)}{MOMENT}{key}"]

    _set_moments(model, optimizer, int(state[STEPS]), fetch_of if len(state) > 1 else None)


def _restore_shards(model: ShardedModel, optimizer: DistributedAdamW, shards: StoredShards) -> None:
    """Read what the FSDP2 backend wrote."""
    head = model.shape.head
    read_weights(model, optimizer, open_shards(shards, head))
    moments = any(name.endswith(f"{MOMENT}{MOMENTS[0]}") for name in shards.sizes)

    def fetch_of(key: str) -> Fetch:
        return open_shards(shards, head, f"{MOMENT}{key}")

    _set_moments(model, optimizer, int(shards.whole(STEPS)), fetch_of if moments else None)


def _set_moments(
    model: ShardedModel, optimizer: DistributedAdamW, done: int, fetch_of: Callable[[str], Fetch] | None
) -> None:
    """Continue after ``done`` steps, with the moments of each key from its function, if there are any."""
    optimizer.steps = done
    steps = torch.tensor(float(done))
    for key in MOMENTS if fetch_of is not None else ():
        assert fetch_of is not None
        fill(model, fetch_of(key), functools.partial(optimizer.set_moment, key=key, steps=steps))


def _on_rank0(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Consume a stream that is a collective; rank 0 keeps its tensors, on the host."""
    kept = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    return kept
