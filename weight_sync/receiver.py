"""The engine's side of a weight update, whatever the transport."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.adapters import Addition
from rl_async.weight_sync.buckets.assembly import Assembler
from rl_async.weight_sync.buckets.buckets import Piece, unpack, verify
from rl_async.weight_sync.buckets.retained import RetainedBuckets
from rl_async.weight_sync.protocol import Backend, InitInfo, UpdateInfo
from rl_async.weight_sync.transports.disk import DiskReceiver
from rl_async.weight_sync.transports.gloo import GlooReceiver
from rl_async.weight_sync.transports.ipc import SharedMemoryReceiver
from rl_async.weight_sync.transports.nccl import NcclReceiver


class _Source(Protocol):
    def receive(self, info: UpdateInfo) -> Tensor:
        """The bytes of one bucket, uint8[nbytes], valid until the next is asked for."""
        ...

    def close(self) -> None:
        """Leave at once, whatever is under way."""
        ...


RECEIVERS: dict[Backend, Callable[[InitInfo], _Source]] = {
    "gloo": GlooReceiver,
    "ipc": SharedMemoryReceiver,
    "disk": DiskReceiver,
    "nccl": NcclReceiver,
}


class WeightReceiver:
    """Receives buckets, verifies them and hands their pieces to ``load``.

    ``load`` gets views that are valid during its call only, so it must copy. A bucket with ``hold: stage`` is not
    loaded before ``finish``, which adds adapters to their base on ``device``. All methods block and raise
    WeightSyncError; call them in a thread, one at a time. An engine whose update failed holds mixed weights until the
    next complete update.
    """

    def __init__(self, load: Callable[[list[Piece]], None], device: str | torch.device = "cpu") -> None:
        self._load, self._device = load, torch.device(device)
        self._source: _Source | None = None
        self._retained, self._adapters = RetainedBuckets(), RetainedBuckets()
        self._staged: UpdateInfo | None = None  # the last bucket of what ``finish`` loads

    def start(self) -> None:
        """A new update begins; what an unfinished one staged is not loaded any more."""
        self._staged = None

    def init(self, info: InitInfo) -> None:
        """Join a transfer, leaving any earlier one; blocks until the group has met."""
        self.close()
        self._source = RECEIVERS[info.backend](info)

    def update(self, info: UpdateInfo) -> None:
        """Receive, verify and load or stage one bucket."""
        if self._source is None:
            raise WeightSyncError("an update before the transfer was initialised")
        data = self._source.receive(info)
        if info.hold == "no":
            verify(data, info)
            self._load(unpack(data, info))
            return
        if info.kind == "adapter":
            self._retained.require(info.base, f"adapters for {info.base}")
        held = (self._adapters if info.kind == "adapter" else self._retained).put(data, info)
        if info.hold == "stage":
            self._staged = info
        else:
            self._load(unpack(held, info))

    def finish(self) -> None:
        """All buckets were received: load what was staged."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if staged.kind != "adapter":
            self._retained.load(staged.version, self._load)
            return
        named: dict[str, Tensor] = {}
        self._adapters.load(staged.version, Assembler(named.update))
        add = Addition(named, staged.scale, self._device)
        self._retained.load(staged.base, lambda pieces: self._load(add(pieces)))
        add.require_all_met()

    def close(self) -> None:
        """Leave the transfer."""
        if self._source is not None:
            self._source.close()
            self._source = None
