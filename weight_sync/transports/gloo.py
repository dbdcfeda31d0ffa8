"""Broadcasts buckets over a gloo process group: one broadcast per bucket, from rank 0 to the engines of one wave.

Two broadcasts are in flight at a time, on gloo's own two threads: while a bucket is loaded the next one arrives. Both
sides start them in the order of the buckets, by which gloo tells them apart.

Four facts shape this file. A broadcast may return although a peer hangs, if the bytes fit into socket buffers. A peer
that dies during a large one is noticed only at the deadline. After any failure the group is unusable. Dropping a group
waits for its broadcasts.
"""

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports.rendezvous import (
    group_store,
    joined_store,
    listening_store,
    own_address,
    transfer_store,
)


class GlooSender:
    """Rank 0 of a new group with the ``workers`` of each engine, who meet in a file of ``folder``, which only the user
    can enter, or without one at a free port of ``host``."""

    def __init__(
        self,
        workers: Sequence[int],
        group_name: str,
        timeout_s: float,
        host: str = "127.0.0.1",
        folder: Path | None = None,
    ) -> None:
        self._workers, self._world_size = workers, 1 + sum(workers)
        self._name, self._timeout_s, self._host = group_name, timeout_s, host
        self._file = folder and folder / f"weights-{secrets.token_hex(8)}"
        self._port = 0
        self._store: dist.Store | None
        try:
            if self._file:
                self._file.touch(0o600, exist_ok=False)
                self._store = transfer_store(self._file, timeout_s)
            else:
                self._store = listening_store(host, 0, timeout_s)
                self._port = self._store.port
        except (OSError, RuntimeError) as error:
            raise WeightSyncError(f"gloo: cannot open a store at {self._file or host}: {error}") from error
        self._group: dist.ProcessGroupGloo | None = None
        self._in_flight: deque[_Broadcast] = deque()

    def init_info(self, member: int) -> InitInfo:
        """Describe how engine ``member`` joins, its workers after those of the engines before it."""
        return InitInfo(
            backend="gloo",
            master_address=self._host,
            master_port=self._port,
            store=str(self._file or ""),
            rank_offset=1 + sum(self._workers[:member]),
            world_size=self._world_size,
            timeout_s=self._timeout_s,
            group_name=self._name,
        )

    def connect(self) -> None:
        """Form the group; blocks until every engine has joined."""
        self._group = _make_group(self.store(), 0, self._world_size, self._name, self._timeout_s, address=self._host)

    def store(self) -> dist.Store:
        """Return the store where the group meets. Raises WeightSyncError after ``close``."""
        if self._store is None:
            raise WeightSyncError(f"gloo group {self._name} is closed")
        return self._store

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Start broadcasting the bucket's bytes and return its manifest."""
        group = self._group
        if group is None:
            raise WeightSyncError(f"gloo group {self._name} is not connected")
        self._in_flight.append(_start(group, bucket.data, self._timeout_s))
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        """Wait for the oldest broadcast, that of this bucket."""
        self._in_flight[0].wait()

    def unstage(self) -> None:
        """Release the oldest broadcast and the bucket that it refers to."""
        if self._in_flight:
            self._in_flight.popleft()

    def close(self) -> None:
        """Drop the group. Peers that wait in it fail: at once if no broadcast is in flight, else at its deadline."""
        self._group = self._store = None
        _release(self._in_flight)
        if self._file:
            self._file.unlink(missing_ok=True)


class GlooReceiver:
    """The engine's side of a group; the constructor joins it."""

    def __init__(self, info: InitInfo) -> None:
        self._timeout_s = info.timeout_s
        self._buffers = deque([torch.empty(0, dtype=torch.uint8)] * 2)
        self._in_flight: deque[_Broadcast] = deque()
        self._store = store_of(info)
        self._group: dist.ProcessGroupGloo | None = _make_group(
            self._store,
            info.rank_offset,
            info.world_size,
            info.group_name,
            info.timeout_s,
            address=info.master_address if info.store else own_address(info.master_address, info.master_port),
        )

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return the bytes sent for one bucket, uint8[nbytes], valid until the next call.

        The next bucket starts to arrive meanwhile if ``info`` has its size. Two buffers are reused for all buckets,
        since touching fresh memory costs as much as copying.
        """
        nbytes = wire_bytes(info)
        if not self._in_flight:
            self._start(nbytes)
        current = self._in_flight[0]
        if current.data.numel() != nbytes:
            raise WeightSyncError(
                f"received a bucket of {nbytes} bytes where {current.data.numel()} bytes were announced"
            )
        if info.next_bytes:
            self._start(info.next_bytes)
        current.wait()
        self._in_flight.popleft()
        return current.data

    def close(self) -> None:
        """Leave the group; broadcasts in flight are left to their deadlines."""
        self._group = None
        _release(self._in_flight)

    def _start(self, nbytes: int) -> None:
        if self._group is None:
            raise WeightSyncError("this engine has left its gloo group")
        if self._buffers[0].numel() < nbytes:
            self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8)
        self._in_flight.append(_start(self._group, self._buffers[0][:nbytes], self._timeout_s))
        self._buffers.rotate()


def store_of(info: InitInfo) -> dist.Store:
    """Connect to the sender's store. Raises WeightSyncError if it does not answer in time, or is not there."""
    if info.store:
        return transfer_store(Path(info.store), info.timeout_s)
    try:
        return joined_store(info.master_address, info.master_port, info.timeout_s)
    except RuntimeError as error:
        raise WeightSyncError(
            f"{info.backend}: no store answers at {info.master_address}:{info.master_port}: {error}"
        ) from error


def _make_group(
    store: dist.Store, rank: int, world_size: int, name: str, timeout_s: float, *, address: str
) -> dist.ProcessGroupGloo:
    """Join the group ``name``, which is independent of torch's default group of trainer ranks."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    # By default it takes the address of the host name, which may belong to an interface that is down or filtered.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    try:
        return dist.ProcessGroupGloo(group_store(store, name, "cpu"), rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(f"gloo group {name}: rank {rank} of {world_size} could not join: {error}") from error


def broadcast(group: dist.ProcessGroupGloo, data: Tensor, timeout_s: float) -> None:
    """Broadcast rank 0's ``data`` into everyone's, uint8[nbytes]. Raises WeightSyncError after ``timeout_s``."""
    _start(group, data, timeout_s).wait()


@dataclass(frozen=True)
class _Broadcast:
    """A broadcast in flight, from rank 0 into everyone's ``data``, uint8[nbytes]. It keeps its group alive."""

    group: dist.ProcessGroupGloo
    data: Tensor
    work: dist.Work
    timeout_s: float

    def wait(self) -> None:
        """Wait for its end. Raises WeightSyncError if it fails or does not end within ``timeout_s`` from now."""
        with _as_sync_error(self.data):
            self.work.wait(timedelta(seconds=self.timeout_s))


def _start(group: dist.ProcessGroupGloo, data: Tensor, timeout_s: float) -> _Broadcast:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=2 * timeout_s)  # it may have to wait for the broadcast before it
    with _as_sync_error(data):
        return _Broadcast(group, data, group.broadcast([data], options), timeout_s)  # type: ignore[attr-defined]


@contextmanager
def _as_sync_error(data: Tensor) -> Iterator[None]:
    """Raise torch's errors as WeightSyncError with the size of the broadcast."""
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(f"gloo broadcast of {data.numel()} bytes: {error}") from error


def _release(in_flight: deque[_Broadcast]) -> None:
    """Release broadcasts and, with the last one, their group; a thread waits for those that still run."""
    rest = list(in_flight)
    in_flight.clear()
    if all(broadcast.work.is_completed() for broadcast in rest):
        return

    def wait() -> None:
        while rest:
            with suppress(RuntimeError):  # the transfer was abandoned
                rest[0].work.wait()
            rest.pop(0)

    threading.Thread(target=wait, name="weight-transfer-end", daemon=True).start()
