"""What the coordinator needs of a transport on the sending side, and the table of transports."""

from collections.abc import Callable
from typing import Protocol

from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.options import SyncOptions
from rl_async.weight_sync.protocol import Backend, InitInfo, UpdateInfo
from rl_async.weight_sync.transports.disk import DiskSender
from rl_async.weight_sync.transports.gloo import GlooSender
from rl_async.weight_sync.transports.ipc import SharedMemorySender
from rl_async.weight_sync.transports.nccl import NcclSender


class Sender(Protocol):
    """Sends buckets to one fixed set of engines. All methods block for at most the sender's deadline.

    They raise WeightSyncError. A sender that has failed is closed and never used again. For each bucket in turn
    ``stage``, ``send``, ``unstage``; the bucket after it may be staged before it is unstaged, from another thread, so
    that at most two are staged.
    """

    def init_info(self, member: int) -> InitInfo:
        """How the engine with this number (from 0) joins."""
        ...

    def connect(self) -> None:
        """Meet all engines; they join at the same time."""
        ...

    def stage(self, bucket: Bucket) -> UpdateInfo:
        """Make a bucket ready, or begin to send it; returns the manifest to give to the engines."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Transfer the oldest staged bucket, this one, while the engines receive it.

        Returning proves nothing: ask the engines.
        """
        ...

    def unstage(self) -> None:
        """All engines have the oldest staged bucket, or never will."""
        ...

    def close(self) -> None:
        """Release everything; may be called twice."""
        ...


# Engines, name of the group, deadline in seconds; of the options, where engines meet and the folder for files.
SenderFactory = Callable[[int, str, float, SyncOptions], Sender]

SENDERS: dict[Backend, SenderFactory] = {
    "gloo": lambda engines, name, timeout_s, options: GlooSender(engines, name, timeout_s, options.host),
    "ipc": lambda engines, name, timeout_s, _: SharedMemorySender(engines, name, timeout_s),
    "nccl": lambda engines, name, timeout_s, options: NcclSender(engines, name, timeout_s, options.host),
    "disk": lambda engines, name, timeout_s, options: DiskSender(options.folder / name),
}
