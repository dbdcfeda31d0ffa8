"""Spreads a model's layers over ranks, and decides where weights are kept and which activations are recomputed."""

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.batches.data_parallel import adjacent_and_strided
from rl_async.trainer.model import attention as packed_attention


def mesh_of(device: str, ranks: int, replicas: int, timeout_s: float) -> DeviceMesh:
    """Return the device mesh: one row of ranks that share one copy of the model, or HSDP's ``replicas`` rows.

    HSDP's collectives wait ``timeout_s`` at most. A collective.
    """
    kind = device.partition(":")[0]
    if replicas == 1:
        return init_device_mesh(kind, (ranks,))  # the group of all ranks, with its own deadline
    sharing, same_shard = adjacent_and_strided(ranks // replicas, timeout_s)
    rows = torch.arange(ranks).view(replicas, -1)
    return DeviceMesh.from_group([same_shard, sharing], kind, mesh=rows, mesh_dim_names=("replicate", "shard"))


def prepare(layers: torch.nn.ModuleList, config: TrainerConfig) -> None:
    """Apply compilation and activation checkpointing to layers, before sharding puts FSDP's hooks around them.

    Modules keep their names and class, so checkpoints and exports do not change.
    """
    if config.compile:
        # Its grouping differs in every micro-batch, and each would be compiled anew.
        AttentionInterface.register(packed_attention.NAME, torch.compiler.disable(packed_attention.packed_attention))
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if config.activation_checkpointing:
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def shard(model: Any, mesh: DeviceMesh, dtype: torch.dtype, cpu_offload: bool = False) -> Any:
    """Put a ``heads.Headed`` under ``fully_shard``; it remains the same module and becomes an FSDPModule too.

    It computes in ``dtype``, but values in float32: they are regression targets, and bfloat16 has three digits.
    """
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    keep = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    spread = functools.partial(fully_shard, mesh=mesh, offload_policy=keep)
    for layer in model.lm.base_model.layers:
        spread(layer, mp_policy=policy)
    if model.value_head is not None:
        spread(model.value_head, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    return spread(model, mp_policy=policy)


def allocate(model: Any, device: str) -> None:
    """Give a sharded ``heads.Headed`` memory for this rank's part of the parameters that have none yet."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
