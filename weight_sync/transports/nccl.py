"""Buckets over an NCCL process group: as ``gloo.py``, from GPU to GPU. NOT YET RUN: it needs two GPUs.

What differs: each side needs a GPU of its own (NCCL refuses two ranks on one), bytes are copied to it and back, since
buckets are made and verified on the host, and a broken group has to be aborted, which fails the peers that wait in it.
"""

from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports.gloo import GlooSender, joined_store
from rl_async.weight_sync.transports.rendezvous import group_store


class NcclSender:
    """Rank 0 of a fresh group with ``engines`` members; they meet at the store that gloo's would."""

    def __init__(self, engines: int, group_name: str, timeout_s: float, host: str = "127.0.0.1") -> None:
        _require_nccl()
        self._meeting = GlooSender(engines, group_name, timeout_s, host)
        self._world_size, self._name, self._timeout_s = engines + 1, group_name, timeout_s
        self._group: Any = None  # builds of torch without NCCL have no name for its type

    def init_info(self, member: int) -> InitInfo:
        """How engine ``member`` joins, as rank ``member + 1``."""
        return msgspec.structs.replace(self._meeting.init_info(member), backend="nccl")

    def connect(self) -> None:
        """Meet all engines. NCCL itself connects at the first broadcast."""
        self._group = _make_group(self._meeting.store(), 0, self._world_size, self._name, self._timeout_s)

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Nothing to prepare."""
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        """Broadcast the bucket's bytes from this process's current GPU."""
        if self._group is None:
            raise WeightSyncError(f"nccl group {self._name} is not connected")
        _broadcast(self._group, bucket.data.cuda(), self._timeout_s)

    def unstage(self) -> None:
        """Nothing was prepared."""

    def close(self) -> None:
        """Abort the group: a kernel that waits for a dead peer would never end by itself."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._meeting.close()


class NcclReceiver:
    """One engine's side of a group; joins on construction, on the engine's current GPU."""

    def __init__(self, info: InitInfo) -> None:
        _require_nccl()
        self._timeout_s = info.timeout_s
        self._store = joined_store(info)
        self._group = _make_group(self._store, info.rank_offset, info.world_size, info.group_name, info.timeout_s)

    def receive(self, info: UpdateInfo) -> Tensor:
        """The bytes that travelled for one bucket, uint8[nbytes], on the host, where they are verified."""
        data = torch.empty(wire_bytes(info), dtype=torch.uint8, device="cuda")
        try:
            _broadcast(self._group, data, self._timeout_s)
        except WeightSyncError:
            self._group.abort()
            raise
        return data.cpu()

    def close(self) -> None:
        """Drop the group."""
        self._group = None


def _require_nccl() -> None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise WeightSyncError(
            "weight_sync.transport=nccl needs a CUDA device and a torch that has NCCL in trainer and engines; "
            "use gloo, ipc or disk"
        )


def _make_group(store: dist.TCPStore, rank: int, world_size: int, name: str, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        return dist.ProcessGroupNCCL(group_store(store, name, "cuda"), rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(f"nccl group {name}: rank {rank} of {world_size} could not be made: {error}") from error


def _broadcast(group: Any, data: Tensor, timeout_s: float) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([data], options).wait(timedelta(seconds=timeout_s))  # a deadline makes it wait on the host
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise WeightSyncError(f"nccl broadcast of {data.numel()} bytes: {error}") from error
