"""The interface of transports for the coordinator and the engines, and the table of transports.

``nearest``, the default, chooses: shared memory if all of a group can open this process's, else gloo. Every engine
tries to open a segment that the sender names, and says in the group's store whether it could. Addresses prove nothing:
containers on one machine may have a /dev/shm of their own each, and so does another user's process.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from torch import Tensor

from rl_async.accelerators import shares_memory
from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.protocol import InitInfo, TransportName, UpdateInfo
from rl_async.weight_sync.transports.disk import DiskReceiver, DiskSender
from rl_async.weight_sync.transports.ipc import SharedMemoryReceiver, SharedMemorySender, mapped
from rl_async.weight_sync.transports.process_groups import GlooReceiver, GlooSender, NcclReceiver, NcclSender, store_of

CHOICE = "nearest"
MEMORY, NETWORK = "memory", "network"


class NearestSender:
    """A `Sender` to the ``workers`` of each engine, who meet as gloo's do. Two buckets of ``bucket_bytes`` must fit."""

    def __init__(
        self,
        workers: Sequence[int],
        group_name: str,
        timeout_s: float,
        bucket_bytes: int,
        host: str = "127.0.0.1",
        folder: Path | None = None,
    ) -> None:
        self._gloo, self._memory = GlooSender(workers, group_name, timeout_s, host, folder), SharedMemorySender()
        self._chosen: GlooSender | SharedMemorySender = self._gloo
        self._name, self._timeout_s = group_name, timeout_s
        self._members = [_key(rank) for rank in range(1, 1 + sum(workers))]
        try:
            self._segment = self._memory.reserve(bucket_bytes)
        except WeightSyncError:
            # /dev/shm is too small, as it is in a container by default.
            self._segment = ""

    def init_info(self, member: int) -> InitInfo:
        """Describe how engine ``member`` joins: as gloo's, with the name of shared memory to try."""
        return msgspec.structs.replace(self._gloo.init_info(member), backend="nearest", shm_name=self._segment)

    def connect(self) -> None:
        """Choose what all engines can do, once they have said so, and form the gloo group if it is that."""
        store = self._gloo.store()
        try:
            store.wait(self._members, timedelta(seconds=self._timeout_s))
            choice = MEMORY if all(store.get(member).decode() == MEMORY for member in self._members) else NETWORK
            store.set(CHOICE, choice)
        except RuntimeError as error:
            raise WeightSyncError(f"{self._name}: not all of {len(self._members)} workers came: {error}") from error
        if choice == MEMORY:
            self._chosen = self._memory
        else:
            self._memory.close()
            self._gloo.connect()

    def stage(self, bucket: Bucket) -> UpdateInfo:
        return self._chosen.stage(bucket)

    def send(self, bucket: Bucket) -> None:
        self._chosen.send(bucket)

    def unstage(self) -> None:
        self._chosen.unstage()

    def close(self) -> None:
        self._memory.close()
        self._gloo.close()


class NearestReceiver:
    """The engine's `Receiver`; the constructor joins."""

    def __init__(self, info: InitInfo) -> None:
        store = store_of(info)
        try:
            store.set(_key(info.rank_offset), MEMORY if _opens(info.shm_name) else NETWORK)
            choice = store.get(CHOICE).decode()
        except RuntimeError as error:
            raise WeightSyncError(f"{info.group_name}: the sender did not choose a transport: {error}") from error
        near = choice == MEMORY
        self._chosen: GlooReceiver | SharedMemoryReceiver = SharedMemoryReceiver(info) if near else GlooReceiver(info)

    def receive(self, info: UpdateInfo) -> Tensor:
        return self._chosen.receive(info)

    def close(self) -> None:
        self._chosen.close()


def _opens(segment: str) -> bool:
    """Whether this process can open the sender's memory. The mapping is dropped at once."""
    try:
        mapped(segment)
    except WeightSyncError:
        return False
    return True


def _key(rank: int) -> str:
    return f"{CHOICE}/{rank}"


class Sender(Protocol):
    """Sends buckets to one fixed set of engines. Each method blocks no longer than the sender's deadline.

    Methods raise WeightSyncError; a sender that has failed is closed and never used again. The caller goes through
    ``stage``, ``send``, ``unstage`` for each bucket in turn. It may stage the next bucket, from another thread, before
    it unstages the current one, so at most two are staged at a time.
    """

    def init_info(self, member: int) -> InitInfo:
        """Describe how the engine with this number (from 0) joins."""
        ...

    def connect(self) -> None:
        """Form the group with all engines, which join at the same time."""
        ...

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Prepare a bucket, or start sending it; return the manifest to give to the engines."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Transfer ``bucket``, the oldest staged one, while the engines receive it.

        Returning does not prove that it arrived; only the engines' replies do.
        """
        ...

    def unstage(self) -> None:
        """Release the oldest staged bucket: no engine will read it any more."""
        ...

    def close(self) -> None:
        """Release everything; may be called twice."""
        ...


class Receiver(Protocol):
    """The engine's end of a transport. The constructor joins the transfer. Methods raise WeightSyncError."""

    def receive(self, info: UpdateInfo) -> Tensor:
        """Return the bytes of one bucket, uint8[nbytes], valid until the next call."""
        ...

    def close(self) -> None:
        """Leave the transfer at once, even while a bucket is in flight."""
        ...


class SenderSetup(NamedTuple):
    """Everything a sender may be built from; each transport uses a part of it.

    ``workers`` counts those of each engine. ``group_name`` is unique within the run. ``timeout_s`` is for forming the
    group and for each transfer. ``host`` is the address of this process as engines reach it; engines on this machine
    meet it in files of the folder ``stores`` instead. The disk transport makes its folder in ``folder``. No bucket is
    larger than ``bucket_bytes``.
    """

    workers: tuple[int, ...]
    group_name: str
    timeout_s: float
    host: str
    folder: Path
    bucket_bytes: int
    stores: Path | None = None


class Transport(NamedTuple):
    """Both ends of a transport."""

    sender: Callable[[SenderSetup], Sender]
    receiver: Callable[[InitInfo], Receiver]


TRANSPORTS: dict[TransportName, Transport] = {
    "gloo": Transport(lambda s: GlooSender(s.workers, s.group_name, s.timeout_s, s.host, s.stores), GlooReceiver),
    "nearest": Transport(
        lambda s: NearestSender(s.workers, s.group_name, s.timeout_s, s.bucket_bytes, s.host, s.stores),
        NearestReceiver,
    ),
    "ipc": Transport(lambda s: SharedMemorySender(s.workers), SharedMemoryReceiver),
    "nccl": Transport(lambda s: NcclSender(s.workers, s.group_name, s.timeout_s, s.host, s.stores), NcclReceiver),
    "disk": Transport(lambda s: DiskSender(s.folder / s.group_name), DiskReceiver),
}


def bucket_device(transport: TransportName, device: str) -> str:
    """Return where a trainer with its model on ``device`` fills buckets: there, or on the host if the transport cannot
    send from there.
    """
    there = transport == "nccl" or (transport == "ipc" and shares_memory(device.partition(":")[0]))
    return device if there else "cpu"
