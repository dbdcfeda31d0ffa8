"""An engine's own copy of the buckets that it received last: what deltas are applied to and adapters added to, and what
waits to be loaded.

It costs as much host memory as the weights that travel. Only updates with ``hold`` keep one.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    """Buckets by place. ``version`` names them when all are of one version; else it is empty."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._coming = self._base = ""  # the version that is being received, and the one that was here before
        self._next = 0  # place of its next bucket
        self.version = ""

    def put(self, wire: Tensor, info: UpdateInfo) -> Tensor:
        """Keep one bucket of ``info.version`` and return its bytes, verified: uint8[nbytes], valid until the next put.

        Raises WeightSyncError for a delta against other weights, a bucket out of order, or a wrong checksum; what is
        held is of no use then until a full update.
        """
        if info.index == 0:
            self._coming, self._base, self._next, self.version = info.version, self.version, 0, ""
        if (info.version, info.index) != (self._coming, self._next):
            coming = self._coming or "none"
            self._coming = ""
            raise WeightSyncError(
                f"bucket {info.index} of {info.version} came where bucket {self._next} of {coming} was expected"
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
        """Hand all buckets to ``load``. Raises WeightSyncError unless all of ``version`` are here."""
        self.require(version, f"asked to load {version}")
        for held in self._held:
            load(unpack(held.data, held.info))

    def require(self, version: str, what: str) -> None:
        """Raise WeightSyncError, saying ``what`` it was for, unless all of ``version`` are here."""
        if self.version != version:
            raise WeightSyncError(f"{what}, but what is here complete is {self.version or 'nothing'}")

    def _patched(self, wire: Tensor, info: UpdateInfo) -> Tensor:
        if info.base != self._base or info.index >= len(self._held):
            raise WeightSyncError(
                f"a delta against version {info.base}, but this engine holds {self._base or 'no complete version'}"
            )
        data = self._held[info.index].data
        apply_delta(wire, data, info)
        verify(data, info)
        self._held[info.index].info = info
        return data

    def _copied(self, wire: Tensor, info: UpdateInfo) -> Tensor:
        verify(wire, info)
        if info.index < len(self._held) and self._held[info.index].data.shape == wire.shape:
            data = self._held[info.index].data.copy_(wire)
            self._held[info.index].info = info
            return data
        del self._held[info.index :]
        self._held.append(_Held(wire.clone(), info))
        return self._held[-1].data
