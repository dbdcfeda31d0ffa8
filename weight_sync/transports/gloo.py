"""Buckets over a gloo process group: one broadcast per bucket, from rank 0 to the engines of one wave.

Two broadcasts are under way at a time, on gloo's own two threads: while a bucket is loaded the next one arrives. Both
sides begin them in the order of the buckets, by which gloo tells them apart.

Facts that shape this file: a broadcast may return although a peer hangs (the bytes fit into socket buffers); a peer
that dies during a large one is noticed only at the deadline; after any failure the group is useless; a group that is
dropped waits for its broadcasts.
"""

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports.rendezvous import group_store


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
        self._under_way: deque[_Broadcast] = deque()

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
        self._group = _make_group(self.store(), 0, self._world_size, self._name, self._timeout_s, address=self._host)

    def store(self) -> dist.TCPStore:
        """Where the group meets. Raises WeightSyncError when it is closed."""
        if self._store is None:
            raise WeightSyncError(f"gloo group {self._name} is closed")
        return self._store

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Begin to broadcast the bucket's bytes."""
        group = self._group
        if group is None:
            raise WeightSyncError(f"gloo group {self._name} is not connected")
        self._under_way.append(_begin(group, bucket.data, self._timeout_s))
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        """Wait for the oldest broadcast."""
        self._under_way[0].wait()

    def unstage(self) -> None:
        """Forget the oldest broadcast."""
        if self._under_way:
            self._under_way.popleft()

    def close(self) -> None:
        """Drop the group. Peers that wait for us fail: at once if no broadcast is under way, else at its deadline."""
        self._group = self._store = None
        _settle(self._under_way)


class GlooReceiver:
    """One engine's side of a group; joins on construction."""

    def __init__(self, info: InitInfo) -> None:
        self._timeout_s = info.timeout_s
        self._buffers = deque([torch.empty(0, dtype=torch.uint8)] * 2)
        self._under_way: deque[_Broadcast] = deque()
        self._store = joined_store(info)
        self._group: dist.ProcessGroupGloo | None = _make_group(
            self._store,
            info.rank_offset,
            info.world_size,
            info.group_name,
            info.timeout_s,
            address=own_address(info.master_address, info.master_port),
        )

    def receive(self, info: UpdateInfo) -> Tensor:
        """The bytes that travelled for one bucket, uint8[nbytes], valid until the next one is asked for.

        The bucket after it begins to arrive meanwhile, if ``info`` tells its size. Two buffers serve all: touching
        fresh memory costs as much as copying.
        """
        nbytes = wire_bytes(info)
        if not self._under_way:
            self._begin(nbytes)
        current = self._under_way[0]
        if current.data.numel() != nbytes:
            raise WeightSyncError(f"a bucket of {nbytes} bytes, after one of {current.data.numel()} was announced")
        if info.next_bytes:
            self._begin(info.next_bytes)
        current.wait()
        self._under_way.popleft()
        return current.data

    def close(self) -> None:
        """Leave the group."""
        self._group = None
        _settle(self._under_way)

    def _begin(self, nbytes: int) -> None:
        if self._group is None:
            raise WeightSyncError("this gloo group was left")
        if self._buffers[0].numel() < nbytes:
            self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8)
        self._under_way.append(_begin(self._group, self._buffers[0][:nbytes], self._timeout_s))
        self._buffers.rotate()


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


def own_address(peer: str, port: int) -> str:
    """The IPv4 address from which this host reaches ``peer``. Sends nothing. Raises WeightSyncError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, port))
        except OSError as error:
            raise WeightSyncError(f"gloo: {peer} cannot be reached from here: {error}") from error
        return probe.getsockname()[0]


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
    store: dist.TCPStore, rank: int, world_size: int, name: str, timeout_s: float, *, address: str
) -> dist.ProcessGroupGloo:
    """Meet the other ranks under ``name``; outside torch's default group, which the trainer's ranks use."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    # By itself it takes the address of the host's name, which may be of an interface that is down or filtered.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    try:
        return dist.ProcessGroupGloo(group_store(store, name, "cpu"), rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(f"gloo group {name}: rank {rank} of {world_size} could not meet: {error}") from error


def broadcast(group: dist.ProcessGroupGloo, data: Tensor, timeout_s: float) -> None:
    """From rank 0 into everyone's ``data``, uint8[nbytes]. Raises WeightSyncError after ``timeout_s`` at the latest."""
    _begin(group, data, timeout_s).wait()


@dataclass(frozen=True)
class _Broadcast:
    """One that is under way, from rank 0 into everyone's ``data``, uint8[nbytes]. It keeps its group."""

    group: dist.ProcessGroupGloo
    data: Tensor
    work: dist.Work
    timeout_s: float

    def wait(self) -> None:
        """Raises WeightSyncError if it failed, or does not end within ``timeout_s`` from now."""
        with _named(self.data):
            self.work.wait(timedelta(seconds=self.timeout_s))


def _begin(group: dist.ProcessGroupGloo, data: Tensor, timeout_s: float) -> _Broadcast:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=2 * timeout_s)  # it may have to wait for the one before
    with _named(data):
        return _Broadcast(group, data, group.broadcast([data], options), timeout_s)  # type: ignore[attr-defined]


@contextmanager
def _named(data: Tensor) -> Iterator[None]:
    """Torch's errors as ours."""
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(f"gloo broadcast of {data.numel()} bytes: {error}") from error


def _settle(under_way: deque[_Broadcast]) -> None:
    """Forget these, and with the last one their group; in a thread, if they are to end first (at their deadlines)."""
    rest = list(under_way)
    under_way.clear()
    if all(broadcast.work.is_completed() for broadcast in rest):
        return

    def wait() -> None:
        while rest:
            with suppress(RuntimeError):  # the transfer was given up
                rest[0].work.wait()
            rest.pop(0)

    threading.Thread(target=wait, name="weight-transfer-end", daemon=True).start()
