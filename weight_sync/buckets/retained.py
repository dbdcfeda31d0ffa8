"""An engine's own copy of the buckets that it received last: the base of deltas and adapters, and staged buckets.

It costs as much host memory as the weights that are sent. Only updates with ``hold`` keep one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Piece, unpack, verify
from rl_async.weight_sync.buckets.delta import apply_delta
from rl_async.weight_sync.protocol import UpdateInfo


@dataclass
class _Held:
    data: Tensor
    info: UpdateInfo


class RetainedBuckets:
    """Buckets by position. ``version`` is theirs when all of one version are complete, and otherwise empty."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._coming = self._base = ""  # the version being received, and the complete one before it
        self._next = 0  # position of the next bucket of ``_coming``
        self.version = ""

    def put(self, wire: Tensor, info: UpdateInfo) -> Tensor:
        """Keep one bucket of ``info.version`` and return its verified bytes, uint8[nbytes], valid until the next put.

        ``wire`` may be on any device. The bytes are patched and verified there, and a copy of them is kept on the host.

        Raises WeightSyncError for a delta against other weights, a bucket out of order, or a wrong checksum. After
        that, only a full update makes the copy usable again.
        """
        if info.index == 0:
            self._coming, self._base, self._next, self.version = info.version, self.version, 0, ""
        if (info.version, info.index) != (self._coming, self._next):
            coming = self._coming or "none"
            self._coming = ""
            raise WeightSyncError(
                f"bucket {info.index} of version {info.version} arrived, expected was bucket {self._next} of {coming}"
            )
        try:
            data = self._patched(wire, info) if info.kind == "delta" else self._copied(wire, info)
        except WeightSyncError:
            self._coming = ""
            raise
        self._next += 1
        if self._next == info.count:
            del self._held[info.count :]
            self.version, self._coming = self._coming, ""
        return data

    def load(self, version: str, load: Callable[[list[Piece]], None]) -> None:
        """Hand all buckets to ``load``. Raises WeightSyncError unless ``version`` is complete."""
        for pieces in self.each(version):
            load(pieces)

    def each(self, version: str) -> Iterator[list[Piece]]:
        """Yield the pieces of each bucket. Raises WeightSyncError unless ``version`` is complete."""
        self.require(version, f"cannot load version {version}")
        for held in self._held:
            yield unpack(held.data, held.info)

    def require(self, version: str, what: str) -> None:
        """Raise WeightSyncError, beginning with ``what`` failed, unless ``version`` is complete."""
        if self.version != version:
            raise WeightSyncError(f"{what}: this engine holds {self.version or 'no complete version'}")

    def _patched(self, wire: Tensor, info: UpdateInfo) -> Tensor:
        if info.base != self._base or info.index >= len(self._held):
            raise WeightSyncError(
                f"a delta against version {info.base}, but this engine holds {self._base or 'no complete version'}"
            )
        held = self._held[info.index]
        data = held.data.to(wire.device)
        apply_delta(wire, data, info)
        verify(data, info)
        held.data.copy_(data)
        held.info = info
        return data

    def _copied(self, wire: Tensor, info: UpdateInfo) -> Tensor:
        verify(wire, info)
        if info.index < len(self._held) and self._held[info.index].data.shape == wire.shape:
            self._held[info.index].data.copy_(wire)
            self._held[info.index].info = info
            return wire
        del self._held[info.index :]
        self._held.append(_Held(torch.empty_like(wire, device="cpu").copy_(wire), info))
        return wire
