"""Broadcasts buckets over an NCCL process group, from GPU to GPU. Not yet run: it needs two GPUs.

Three things differ from ``gloo.py``. Each side needs a GPU of its own, since NCCL refuses two ranks on one. Bytes are
copied to the GPU and back, since buckets are packed and verified on the host. A broken group has to be aborted, which
fails the peers that wait in it.
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
from rl_async.weight_sync.transports.gloo import GlooSender, store_of
from rl_async.weight_sync.transports.rendezvous import group_store


class NcclSender:
    """Rank 0 of a new group with ``engines`` members, which meet at the same kind of store as gloo's."""

    def __init__(self, engines: int, group_name: str, timeout_s: float, host: str = "127.0.0.1") -> None:
        _require_nccl()
        self._rendezvous = GlooSender(engines, group_name, timeout_s, host)
        self._world_size, self._name, self._timeout_s = engines + 1, group_name, timeout_s
        self._group: Any = None  # builds of torch without NCCL do not define its type

    def init_info(self, member: int) -> InitInfo:
        """Describe how engine ``member`` joins, as rank ``member + 1``."""
        return msgspec.structs.replace(self._rendezvous.init_info(member), backend="nccl")

    def connect(self) -> None:
        """Create the group. NCCL itself connects at the first broadcast."""
        self._group = _make_group(self._rendezvous.store(), 0, self._world_size, self._name, self._timeout_s)

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Return the manifest; ``send`` does the work."""
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        """Broadcast the bucket's bytes from this process's current GPU and wait for the end."""
        if self._group is None:
            raise WeightSyncError(f"nccl group {self._name} is not connected")
        _broadcast(self._group, bucket.data.cuda(), self._timeout_s)

    def unstage(self) -> None:
        """Do nothing: ``stage`` prepared nothing."""

    def close(self) -> None:
        """Abort the group; a kernel that waits for a dead peer would never end by itself."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._rendezvous.close()


class NcclReceiver:
    """The engine's side of a group; the constructor joins it, on the engine's current GPU."""

    def __init__(self, info: InitInfo) -> None:
        _require_nccl()
        self._timeout_s = info.timeout_s
        self._store = store_of(info)
        self._group = _make_group(self._store, info.rank_offset, info.world_size, info.group_name, info.timeout_s)

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return the bytes sent for one bucket, uint8[nbytes], on the host, where they are verified."""
        data = torch.empty(wire_bytes(info), dtype=torch.uint8, device="cuda")
        try:
            _broadcast(self._group, data, self._timeout_s)
        except WeightSyncError:
            self._group.abort()
            raise
        return data.cpu()

    def close(self) -> None:
        """Drop this side of the group without waiting for peers."""
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
        raise WeightSyncError(f"nccl group {name}: rank {rank} of {world_size} could not join: {error}") from error


def _broadcast(group: Any, data: Tensor, timeout_s: float) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([data], options).wait(timedelta(seconds=timeout_s))  # with a deadline it blocks the host thread
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise WeightSyncError(f"nccl broadcast of {data.numel()} bytes: {error}") from error
