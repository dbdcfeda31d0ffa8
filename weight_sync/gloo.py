"""Buckets over a gloo process group: one broadcast per bucket, from rank 0 to the engines of one wave.

Facts that shape this file: a broadcast may return although a peer hangs (the bytes fit into socket buffers); a peer
that dies during a large one is noticed only at the deadline; after any failure the group is useless.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.rendezvous import group_store

_LOOPBACK = ("127.0.0.1", "localhost")


class GlooSender:
    """Rank 0 of a fresh group with ``engines`` members, meeting at a free port of ``host``."""

    def __init__(self, engines: int, group_name: str, timeout_s: float, host: str = "127.0.0.1") -> None:
        self._world_size, self._name, self._timeout_s, self._host = engines + 1, group_name, timeout_s, host
        try:
            self._store: dist.TCPStore | None = _listening_store(host, timeout_s)
        except (OSError, RuntimeError) as error:
            raise WeightSyncError(f"gloo: no store on {host}: {error}") from error
        self._port: int = self._store.port
        self._group: dist.ProcessGroupGloo | None = None

    def init_info(self, member: int) -> InitInfo:
        """How engine ``member`` joins, as rank ``member + 1``."""
        return InitInfo(
            backend="gloo",
            master_address=self._host,
            master_port=self._port,
            rank_offset=member + 1,
            world_size=self._world_size,
            timeout_s=self._timeout_s,
            group_name=self._name,
        )

    def connect(self) -> None:
        """Meet all engines."""
        self._group = _make_group(
            self.store(), 0, self._world_size, self._name, self._timeout_s, loopback=self._host in _LOOPBACK
        )

    def store(self) -> dist.TCPStore:
        """Where the group meets. Raises WeightSyncError when it is closed."""
        if self._store is None:
            raise WeightSyncError(f"gloo group {self._name} is closed")
        return self._store

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Nothing to prepare."""
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        """Broadcast the bucket's bytes."""
        if self._group is None:
            raise WeightSyncError(f"gloo group {self._name} is not connected")
        broadcast(self._group, bucket.data, self._timeout_s)

    def unstage(self) -> None:
        """Nothing was prepared."""

    def close(self) -> None:
        """Drop the group's sockets, which also fails a peer that still waits for us."""
        self._group = self._store = None


class GlooReceiver:
    """One engine's side of a group; joins on construction."""

    def __init__(self, info: InitInfo) -> None:
        self._timeout_s = info.timeout_s
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._store = joined_store(info)
        self._group = _make_group(
            self._store,
            info.rank_offset,
            info.world_size,
            info.group_name,
            info.timeout_s,
            loopback=info.master_address in _LOOPBACK,
        )

    def receive(self, info: UpdateInfo) -> Tensor:
        """The bytes that travelled for one bucket, uint8[nbytes], valid until the next one.

        One buffer serves all: touching fresh memory costs as much as copying.
        """
        nbytes = wire_bytes(info)
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        data = self._buffer[:nbytes]
        broadcast(self._group, data, self._timeout_s)
        return data


def joined_store(info: InitInfo) -> dist.TCPStore:
    """The sender's store. Raises WeightSyncError if it does not answer in time."""
    try:
        return dist.TCPStore(
            info.master_address, info.master_port, is_master=False, timeout=timedelta(seconds=info.timeout_s)
        )
    except RuntimeError as error:
        raise WeightSyncError(
            f"{info.backend}: no store at {info.master_address}:{info.master_port}: {error}"
        ) from error


def _listening_store(host: str, timeout_s: float) -> dist.TCPStore:
    """A store on a free port of this one IPv4 address.

    By itself it listens on all interfaces and over IPv6, where it looks up the name of every peer: seconds with a slow
    resolver.
    """
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _make_group(
    store: dist.TCPStore, rank: int, world_size: int, name: str, timeout_s: float, *, loopback: bool
) -> dist.ProcessGroupGloo:
    """Meet the other ranks under ``name``; outside torch's default group, which the trainer's ranks use."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    # The host name may resolve to an interface that is down or filtered; on one machine loopback always works.
    device = (
        dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        if loopback
        else dist.ProcessGroupGloo.create_default_device()
    )
    options._devices = [device]
    try:
        return dist.ProcessGroupGloo(group_store(store, name, "cpu"), rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(f"gloo group {name}: rank {rank} of {world_size} could not meet: {error}") from error


def broadcast(group: dist.ProcessGroupGloo, data: Tensor, timeout_s: float) -> None:
    """From rank 0 into everyone's ``data``, uint8[nbytes]. Raises WeightSyncError after ``timeout_s`` at the latest."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    try:
        group.broadcast([data], options).wait()  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise WeightSyncError(f"gloo broadcast of {data.numel()} bytes: {error}") from error
