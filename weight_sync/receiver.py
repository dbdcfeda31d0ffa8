"""The engine's side of a weight update, whatever the transport."""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.adapters import AdapterSum
from rl_async.weight_sync.buckets.assembly import Assembler
from rl_async.weight_sync.buckets.buckets import Piece, unpack, verify
from rl_async.weight_sync.buckets.retained import RetainedBuckets
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports.interface import TRANSPORTS, Receiver


class WeightReceiver:
    """Receives buckets, verifies them and hands their pieces to ``load``.

    ``load`` gets views that are valid only during the call, so it must copy. A bucket with ``hold: stage`` is not
    loaded before ``finish``, which also adds adapters to their base, on ``device``. All methods block and raise
    WeightSyncError; call them in a thread, one at a time. An engine whose update failed holds mixed weights until the
    next complete update.
    """

    def __init__(self, load: Callable[[list[Piece]], None], device: str | torch.device = "cpu") -> None:
        self._load, self._device = load, torch.device(device)
        self._transport: Receiver | None = None
        self._retained, self._adapters = RetainedBuckets(), RetainedBuckets()
        self._staged: UpdateInfo | None = None  # the last bucket of what ``finish`` loads

    def start(self) -> None:
        """Begin a new update; what an unfinished one staged will not be loaded."""
        self._staged = None

    def init(self, info: InitInfo) -> None:
        """Join a transfer, leaving any earlier one; blocks until the group has formed."""
        self.close()
        self._transport = TRANSPORTS[info.backend].receiver(info)

    def update(self, info: UpdateInfo) -> None:
        """Receive, verify and load or stage one bucket."""
        if self._transport is None:
            raise WeightSyncError("a bucket was announced before the engine joined a transfer")
        data = self._transport.receive(info)
        if info.hold == "no":
            verify(data, info)
            self._load(unpack(data, info))
            return
        if info.kind == "adapter":
            self._retained.require(info.base, f"cannot take adapters for {info.base}")
        held = (self._adapters if info.kind == "adapter" else self._retained).put(data, info)
        if info.hold == "stage":
            self._staged = info
        else:
            self._load(unpack(held, info))

    def finish(self) -> None:
        """End the update: load what was staged."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if staged.kind != "adapter":
            self._retained.load(staged.version, self._load)
            return
        named: dict[str, Tensor] = {}
        self._adapters.load(staged.version, Assembler(named.update))
        add = AdapterSum(named, staged.scale, self._device)
        self._retained.load(staged.base, lambda pieces: self._load(add(pieces)))
        add.require_all_used()

    def close(self) -> None:
        """Leave the transfer; an engine can join another one later."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
