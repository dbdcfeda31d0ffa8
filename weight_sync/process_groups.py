"""Broadcasts buckets over a process group: gloo on the host, or from device to device by NCCL, which AMD's collectives
are called too, or Ascend's HCCL (not yet run: it needs two devices).

First the stores where the members of a group meet. On one machine a store is a file that only the user can open.
Between machines it listens on one address; it asks for no credential, and nor does gloo, so both listen only where the
members are.

Gloo: one broadcast per bucket, from rank 0 to the engines of one wave. Two are in flight at a time, on gloo's own two
threads: while a bucket is loaded the next one arrives. Four facts shape it. A broadcast may return although a peer
hangs, if the bytes fit into socket buffers. A peer that dies during a large one is noticed only at the deadline. After
any failure the group is unusable. Dropping a group waits for its broadcasts.

NCCL differs in five things. Each side needs a device of its own, since NCCL refuses two ranks on one. Buckets are sent
from the device where they were filled, and arrive on the engine's. A broken group has to be aborted, which fails the
peers that wait in it. Both sides need the same version, or the first broadcast hangs or fails without saying why. And
torch's watchdog would end the process whose peer died, so these groups have none: the thread that waits has a deadline.
"""

import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.accelerators import NO_WATCHDOG, accelerator_here, collectives_of, collectives_version
from rl_async.concurrency import in_daemon_thread
from rl_async.errors import UserError, WeightSyncError
from rl_async.process.private_folder import require_private
from rl_async.weight_sync.buckets import Bucket, wire_bytes
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo

# torch has this much longer to raise its own error, which says more.
GRACE_S = 1.0

log = logging.getLogger("rl_async.rendezvous")


def file_store(path: Path, rank: int, members: int, timeout_s: float) -> dist.FileStore:
    """Meet the other members at this file, which the first makes and the last removes; it must be new.

    Who waits for a key looks every 10 ms. Raises DistStoreError if a member does not arrive in time.
    """
    store = dist.FileStore(str(path), members)
    store.set_timeout(timedelta(seconds=timeout_s))
    store.set(f"arrived/{rank}", "")
    try:
        store.wait([f"arrived/{member}" for member in range(members)])
    except RuntimeError as error:
        raise dist.DistStoreError(f"not all of {members} members met at {path}: {error}") from error
    return store


def transfer_store(path: Path, timeout_s: float) -> dist.FileStore:
    """Open the store of a weight transfer, a file that is there and that only this user can reach.

    Raises WeightSyncError if it is not. Who waits for a key looks every 10 ms.
    """
    try:
        require_private(path.parent)
        if not path.is_file():
            raise FileNotFoundError
    except (UserError, OSError) as error:
        why = "it does not exist" if isinstance(error, OSError) else str(error)
        raise WeightSyncError(
            f"the trainer's store {path} cannot be used here: {why}; an engine that sees other files than the trainer, "
            "as one in a container does, needs weight_sync.way=disk"
        ) from error
    store = dist.FileStore(str(path))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def listening_store(host: str, port: int, timeout_s: float, members: int | None = None) -> dist.TCPStore:
    """Open a store on this one IPv4 address, on a free port if ``port`` is 0. Waits for ``members`` if they are given.

    By default a store listens on all interfaces and over IPv6, where it looks up the name of every peer, which takes
    seconds with a slow resolver. Raises OSError if the address cannot be used.
    """
    listener = socket.create_server((host, port))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        world_size=members,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=members is not None,
        master_listen_fd=listener.detach(),
    )


def joined_store(host: str, port: int, timeout_s: float, members: int | None = None) -> dist.TCPStore:
    """Connect to the store at this address. Raises RuntimeError if it does not answer in time.

    The constructor looks up the name of the address before it connects, and nothing turns that off: where a resolver
    does not answer, each group forms that much later, by default 5 s for one lost packet. It also waits for ever for a
    peer that takes the connection and is silent, so a thread calls it.
    """

    def join() -> dist.TCPStore:
        return dist.TCPStore(host, port, members, is_master=False, timeout=timedelta(seconds=timeout_s))

    try:
        return in_daemon_thread(join, "store").result(timeout_s + GRACE_S)
    except TimeoutError as error:
        raise dist.DistStoreError(f"{host}:{port} took the connection, but did not answer as a store") from error


def own_address(peer: str, port: int) -> str:
    """Return this host's IPv4 address on the route to ``peer``; sends nothing.

    Raises WeightSyncError without a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, port))
        except OSError as error:
            raise WeightSyncError(f"gloo: {peer} cannot be reached from here: {error}") from error
        return probe.getsockname()[0]


def bind_groups(address: str, *, devices: bool = True) -> None:
    """Let the groups that torch makes from now on, whose options it chooses itself, listen on ``address`` only:
    gloo's, and with ``devices`` also those of accelerators.

    They take the name of an interface. A user's own setting stays. By default gloo takes the address of the host's
    name, and NCCL the first interface that is not loopback.
    """
    variable = accelerator_here().interface
    name = interface_of(address)
    if name is None:
        log.warning("no interface has the address %s; set GLOO_SOCKET_IFNAME and %s", address, variable)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if devices:
        os.environ.setdefault(variable, f"={name}")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has the IPv4 address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            return name
    return None


def group_store(store: dist.Store, name: str, device: str) -> dist.Store:
    """Return the part of ``store`` that a backend of group ``name`` uses; ``device`` is torch's type.

    The prefixes are those that torch's ``_new_process_group_helper`` applies to a store which already carries the
    group's name. Engines that create their side with torch's own functions (SGLang's ``init_custom_process_group``,
    after OpenRLHF and slime) therefore meet us there.
    """
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))


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
    # A broadcast may have to wait for the previous one.
    options.timeout = timedelta(seconds=2 * timeout_s)
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
            # An abandoned transfer fails, which nobody needs to hear of.
            with suppress(RuntimeError):
                rest[0].work.wait()
            rest.pop(0)

    threading.Thread(target=wait, name="weight-transfer-end", daemon=True).start()


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
        # The type depends on the build of torch.
        self._group: Any = None

    def init_info(self, member: int) -> InitInfo:
        """Describe how engine ``member`` joins, as gloo's does."""
        info = self._rendezvous.init_info(member)
        return msgspec.structs.replace(
            info, backend="nccl", collectives=collectives_version(torch.get_device_module(_device()))
        )

    def connect(self) -> None:
        """Create the group. Its members connect at the first broadcast."""
        self._group = _make_device_group(self._rendezvous.store(), 0, self._world_size, self._name, self._timeout_s)

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Return the manifest; ``send`` does the work."""
        return bucket.info

    def send(self, bucket: Bucket) -> None:
        """Broadcast the bucket's bytes from the device where it was filled and wait for the end."""
        if self._group is None:
            raise WeightSyncError(f"nccl group {self._name} is not connected")
        device = bucket.device if bucket.device.type != "cpu" else _device()
        _broadcast_on_device(self._group, bucket.data.to(device), self._timeout_s)

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
        require_same_collectives(info.collectives, collectives_version(torch.get_device_module(_device())))
        self._timeout_s, self._device = info.timeout_s, _device()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._store = store_of(info)
        self._group: Any = _make_device_group(
            self._store, info.rank_offset, info.world_size, info.group_name, info.timeout_s
        )

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return the bytes sent for one bucket, uint8[nbytes] on this side's device, valid until the next call."""
        nbytes = wire_bytes(info)
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        data = self._buffer[:nbytes]
        try:
            _broadcast_on_device(self._group, data, self._timeout_s)
        except WeightSyncError:
            self._group.abort()
            raise
        return data

    def close(self) -> None:
        """Drop this side of the group without waiting for peers."""
        self._group = None


def device_groups() -> Any:
    """Return torch's class of process groups over the collectives of this process's accelerator.

    Raises WeightSyncError without an accelerator, or without such a class in this torch.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    groups = None if device is None else getattr(dist, f"ProcessGroup{collectives_of(device.type).upper()}", None)
    if groups is None:
        raise WeightSyncError(
            "weight_sync.way=nccl needs accelerators, and a torch that has their collectives, in trainer and "
            "engines; use gloo, ipc or disk"
        )
    return groups


def require_same_collectives(sender: str, engine: str) -> None:
    """Raise WeightSyncError if both versions of the collectives are known and differ."""
    if sender and engine and sender != engine:
        raise WeightSyncError(
            f"weight_sync.way=nccl: the trainer's collectives have version {sender} and this engine's {engine}, "
            "which refuse each other; install one torch for both (rollout.python), or choose "
            "weight_sync.way=ipc, gloo or disk"
        )


def _device() -> torch.device:
    """Return this thread's current accelerator."""
    device = torch.accelerator.current_accelerator()
    assert device is not None, "device_groups saw one"
    return torch.device(device.type, torch.accelerator.current_device_index())


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Have the groups of devices that are made in this context raise at a deadline instead of ending the process."""
    before = os.environ.get(NO_WATCHDOG)
    os.environ[NO_WATCHDOG] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_WATCHDOG]
        else:
            os.environ[NO_WATCHDOG] = before


def _make_device_group(store: dist.Store, rank: int, world_size: int, name: str, timeout_s: float) -> Any:
    groups = device_groups()
    options = groups.Options()
    # The caller's own deadline comes first.
    options._timeout = timedelta(seconds=2 * timeout_s)
    try:
        with without_watchdog():
            return groups(group_store(store, name, _device().type), rank, world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(f"nccl group {name}: rank {rank} of {world_size} could not join: {error}") from error


def _broadcast_on_device(group: Any, data: Tensor, timeout_s: float) -> None:
    """Broadcast on a stream of its own: kernels of this device's other threads would otherwise wait for a late peer."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    stream = torch.Stream(device=data.device)
    # The bytes were written on the current stream.
    stream.wait_stream(torch.accelerator.current_stream(data.device))
    try:
        with stream:
            # With a deadline, ``wait`` blocks the host thread.
            group.broadcast([data], options).wait(timedelta(seconds=timeout_s))
        stream.synchronize()
    except RuntimeError as error:
        raise WeightSyncError(f"nccl broadcast of {data.numel()} bytes: {error}") from error
