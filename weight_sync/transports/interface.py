"""What the coordinator and the engines need of a transport, and the table of transports."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from rl_async.accelerators import shares_memory
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.protocol import InitInfo, TransportName, UpdateInfo
from rl_async.weight_sync.transports.disk import DiskReceiver, DiskSender
from rl_async.weight_sync.transports.gloo import GlooReceiver, GlooSender
from rl_async.weight_sync.transports.ipc import SharedMemoryReceiver, SharedMemorySender
from rl_async.weight_sync.transports.nccl import NcclReceiver, NcclSender
from rl_async.weight_sync.transports.nearest import NearestReceiver, NearestSender


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
        """Release the oldest staged bucket: every engine has received it, or never will."""
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
    """Everything a sender may be built from; each transport takes what it needs."""

    workers: tuple[int, ...]  # of each engine
    group_name: str  # unique within the run
    timeout_s: float  # for forming the group and for each transfer
    host: str  # address of this process as engines reach it
    folder: Path  # disk: parent of the sender's own folder
    bucket_bytes: int  # size of the largest bucket, if that is known
    # The folder of files in which engines on this machine meet the sender.
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
    "ipc": Transport(lambda _: SharedMemorySender(), SharedMemoryReceiver),
    "nccl": Transport(lambda s: NcclSender(s.workers, s.group_name, s.timeout_s, s.host, s.stores), NcclReceiver),
    "disk": Transport(lambda s: DiskSender(s.folder / s.group_name), DiskReceiver),
}


def bucket_device(transport: TransportName, device: str) -> str:
    """Return where a trainer whose model is on ``device`` fills its buckets: there if the transport takes them there,
    else on the host.
    """
    there = transport == "nccl" or (transport == "ipc" and shares_memory(device.partition(":")[0]))
    return device if there else "cpu"
