"""The engine's side of a weight update, whatever the transport."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets import Piece, unpack, verify
from rl_async.weight_sync.gloo import GlooReceiver
from rl_async.weight_sync.ipc import SharedMemoryReceiver
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo


class _Source(Protocol):
    def receive(self, info: UpdateInfo) -> Tensor:
        """The bytes of one bucket, uint8[nbytes]."""
        ...


class WeightReceiver:
    """Receives buckets, verifies them and hands their pieces to ``load``.

    ``load`` gets views that are valid during its call only, so it must copy. All methods block and raise
    WeightSyncError; call them in a thread, one at a time. An engine whose update failed holds mixed weights until the
    next complete update.
    """

    def __init__(self, load: Callable[[list[Piece]], None]) -> None:
        self._load = load
        self._source: _Source | None = None

    def init(self, info: InitInfo) -> None:
        """Join a transfer, leaving any earlier one; blocks until the group has met."""
        self.close()
        self._source = GlooReceiver(info) if info.backend == "gloo" else SharedMemoryReceiver()

    def update(self, info: UpdateInfo) -> None:
        """Receive, verify and load one bucket."""
        if self._source is None:
            raise WeightSyncError("an update before the transfer was initialised")
        data = self._source.receive(info)
        verify(data, info)
        self._load(unpack(data, info))

    def close(self) -> None:
        """Leave the transfer."""
        self._source = None
