"""Broadcasts buckets from device to device over a process group of the accelerators' own collectives: NCCL, which
AMD's are called too, or Ascend's HCCL. Not yet run: it needs two devices.

Three things differ from ``gloo.py``. Each side needs a device of its own, since NCCL refuses two ranks on one. Buckets
are sent from the device where they were filled, and arrive on the engine's. A broken group has to be aborted, which
fails the peers that wait in it.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.accelerators import collectives_of
from rl_async.errors import WeightSyncError
from rl_async.torch_shared import settle
from rl_async.weight_sync.buckets.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports.gloo import GlooSender, store_of
from rl_async.weight_sync.transports.rendezvous import group_store


class NcclSender:
    """Rank 0 of a new group with the ``workers`` of each engine, who meet at the same kind of store as gloo's."""

    def __init__(
        self,
        workers: Sequence[int],
        group_name: str,
        timeout_s: float,
        host: str = "127.0.0.1",
        folder: Path | None = None,
    ) -> None:
        device_groups()
        self._rendezvous = GlooSender(workers, group_name, timeout_s, host, folder)
        self._world_size, self._name, self._timeout_s = 1 + sum(workers), group_name, timeout_s
        self._group: Any = None  # of a type that depends on the build of torch

    def init_info(self, member: int) -> InitInfo:
        """Describe how engine ``member`` joins, as gloo's does."""
        return msgspec.structs.replace(self._rendezvous.init_info(member), backend="nccl")

    def connect(self) -> None:
        """Create the group. Its members connect at the first broadcast."""
        self._group = _make_group(self._rendezvous.store(), 0, self._world_size, self._name, self._timeout_s)

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Return the manifest; ``send`` does the work."""
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        """Broadcast the bucket's bytes from the device where it was filled and wait for the end."""
        if self._group is None:
            raise WeightSyncError(f"nccl group {self._name} is not connected")
        device = bucket.device if bucket.device.type != "cpu" else _device()
        _broadcast(self._group, bucket.data.to(device), self._timeout_s)

    def unstage(self) -> None:
        """Do nothing: ``stage`` prepared nothing."""

    def close(self) -> None:
        """Abort the group; a kernel that waits for a dead peer would never end by itself."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._rendezvous.close()


class NcclReceiver:
    """The engine's side of a group; the constructor joins it, on the engine's current device."""

    def __init__(self, info: InitInfo) -> None:
        device_groups()
        self._timeout_s, self._device = info.timeout_s, _device()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._store = store_of(info)
        self._group: Any = _make_group(self._store, info.rank_offset, info.world_size, info.group_name, info.timeout_s)

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return the bytes sent for one bucket, uint8[nbytes] on this side's device, valid until the next call."""
        nbytes = wire_bytes(info)
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        data = self._buffer[:nbytes]
        try:
            _broadcast(self._group, data, self._timeout_s)
        except WeightSyncError:
            self._group.abort()
            raise
        return data

    def close(self) -> None:
        """Drop this side of the group without waiting for peers."""
        self._group = None


def device_groups() -> Any:
    """Return torch's class of process groups over the collectives of this process's accelerator.

    Raises WeightSyncError if there is no accelerator, or no such class in this torch.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    groups = None if device is None else getattr(dist, f"ProcessGroup{collectives_of(device.type).upper()}", None)
    if groups is None:
        raise WeightSyncError(
            "weight_sync.transport=nccl needs accelerators, and a torch that has their collectives, in trainer and "
            "engines; use gloo, ipc or disk"
        )
    return groups


def _device() -> torch.device:
    """Return this thread's current accelerator."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "device_groups saw one"
    return torch.device(device.type, torch.accelerator.current_device_index())


def _make_group(store: dist.Store, rank: int, world_size: int, name: str, timeout_s: float) -> Any:
    groups = device_groups()
    options = groups.Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        return groups(group_store(store, name, _device().type), rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(f"nccl group {name}: rank {rank} of {world_size} could not join: {error}") from error


def _broadcast(group: Any, data: Tensor, timeout_s: float) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([data], options).wait(timedelta(seconds=timeout_s))  # with a deadline it blocks the host thread
        settle(data)
    except RuntimeError as error:
        raise WeightSyncError(f"nccl broadcast of {data.numel()} bytes: {error}") from error
