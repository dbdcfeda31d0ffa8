"""The engine's side of a weight update, the same for all transports.

``WeightReceiver`` receives buckets, verifies them and hands over their pieces. ``Assembler`` makes whole parameters of
pieces, for loaders that take nothing else. ``RetainedBuckets`` is an engine's own copy of the buckets that it received
last: the base of deltas and adapters, and staged buckets. It costs as much host memory as the weights that are sent,
and only updates with ``hold`` keep one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rl_async.concurrency import run_in_threads
from rl_async.errors import WeightSyncError
from rl_async.torch_shared import settle
from rl_async.weight_sync.buckets import AdapterSum, Pairs, Piece, apply_delta, paired, unpack, verify
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports import TRANSPORTS, Receiver


class AdapterLoader(NamedTuple):
    """An engine that computes adapters beside weights of its own: ``base`` names these, ``load`` takes the adapters."""

    base: Callable[[], str]
    load: Callable[[Pairs, float], None]


class WeightReceiver:
    """Receives buckets, verifies them and hands their pieces to ``load``.

    Several trainer ranks may send at the same time, each a bucket of its own; the pieces of all of them are loaded
    together, those of one parameter after one another. ``load`` gets views that are valid only during the call, so it
    must copy. A bucket with ``hold: stage`` is not loaded before ``finish``, which also adds adapters to their base, on
    ``device``. An engine with an ``adapters`` loader gets them there instead, and takes nothing else.

    All methods block and raise WeightSyncError; call them in a thread, one at a time. An engine whose update failed
    holds mixed weights until the next complete update.
    """

    def __init__(
        self,
        load: Callable[[list[Piece]], None],
        device: str | torch.device = "cpu",
        adapters: AdapterLoader | None = None,
    ) -> None:
        self._load, self._device, self._loader = load, torch.device(device), adapters
        # One for each rank that sends.
        self._transports: list[Receiver] = []
        self._retained, self._adapters = [RetainedBuckets()], RetainedBuckets()
        # The last of the buckets that ``finish`` loads.
        self._staged: UpdateInfo | None = None

    def start(self) -> None:
        """Begin a new update. Buckets staged by an unfinished one will not be loaded."""
        self._staged = None

    def init(self, info: InitInfo) -> None:
        """Join a transfer, leaving any earlier one; blocks until its groups have formed."""
        self.close()
        for source in info.sources or [info]:
            self._transports.append(TRANSPORTS[source.backend].receiver(source))

    def update(self, info: UpdateInfo) -> None:
        """Receive, verify and load or stage one bucket of each rank that sends."""
        infos = info.sources or [info]
        if not self._transports:
            raise WeightSyncError("a bucket was announced before the engine joined a transfer")
        if len(infos) != len(self._transports):
            raise WeightSyncError(
                f"buckets of {len(infos)} senders were announced to an engine that has joined {len(self._transports)}"
            )
        if self._loader is not None:
            self._require_own_base(infos[0], self._loader.base())
        elif infos[0].kind == "adapter":
            self._retained[0].require(infos[0].base, f"cannot take adapters for {infos[0].base}")
        while len(self._retained) < len(infos):
            self._retained.append(RetainedBuckets())
        del self._retained[len(infos) :]
        held = run_in_threads([partial(self._take, n, one) for n, one in enumerate(infos)], "weight-transfer")
        if infos[0].hold == "stage":
            self._staged = infos[0]
            return
        self._load(merged(unpack(data, one) for data, one in zip(held, infos, strict=True)))
        # Once this is answered, the senders may overwrite the buckets.
        for data in held:
            settle(data)

    def finish(self) -> None:
        """End the update: load the staged buckets."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if staged.kind != "adapter":
            for pieces in zip(*(held.each(staged.version) for held in self._retained), strict=True):
                self._load(merged(pieces))
            return
        named: dict[str, Tensor] = {}
        self._adapters.load(staged.version, Assembler(named.update))
        if self._loader is not None:
            self._loader.load(paired(named), staged.scale)
            return
        add = AdapterSum(paired(named), staged.scale, self._device)
        self._retained[0].load(staged.base, lambda pieces: self._load(add(pieces)))
        add.require_all_used()

    def close(self) -> None:
        """Leave the transfer; an engine can join another one later."""
        while self._transports:
            self._transports.pop().close()

    @staticmethod
    def _require_own_base(info: UpdateInfo, own: str) -> None:
        """Raise WeightSyncError unless adapters for the engine's own weights arrive."""
        if info.kind != "adapter":
            raise WeightSyncError("this engine loads adapters beside its own weights, and takes no other weights")
        if info.base != own:
            raise WeightSyncError(
                f"cannot take adapters for {info.base}: this engine has loaded {own}; model.path must hold the same "
                "files for trainer and engines"
            )

    def _take(self, number: int, info: UpdateInfo) -> Tensor:
        """Receive and verify the bucket of one sender; return its bytes, uint8[nbytes], valid until the next bucket."""
        data = self._transports[number].receive(info)
        if info.hold == "no":
            verify(data, info)
            return data
        return (self._adapters if info.kind == "adapter" else self._retained[number]).put(data, info)


def merged(buckets: Iterable[Sequence[Piece]]) -> list[Piece]:
    """Return the pieces of several buckets, those of one parameter after one another and in order.

    The parameter that began in earlier buckets comes first, and the one that goes on in later ones last; the others are
    in the order of their names, so that all workers of an engine complete its layers in the same order.
    """
    by_name: dict[str, list[Piece]] = {}
    for pieces in buckets:
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
    of_names = [sorted(pieces, key=lambda piece: piece.start) for pieces in by_name.values()]
    of_names.sort(
        key=lambda pieces: (
            pieces[0].start == 0,
            pieces[-1].start + pieces[-1].data.numel() < pieces[0].total,
            pieces[0].name,
        )
    )
    return [piece for pieces in of_names for piece in pieces]


class Assembler:
    """Hands whole tensors to ``load`` and holds at most one incomplete parameter.

    If only boxes of a tensor travel, it is NaN elsewhere (0 if it is not of floating point): a loader that used more of
    it than its engine had asked for would be noticed at once.

    ``load`` gets views that are valid only during the call. The first piece of a parameter discards an incomplete one.
    """

    def __init__(self, load: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        self._load = load
        self._name, self._filled = "", 0
        self._partial: Tensor | None = None

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Load the parameters that these pieces complete. Raises WeightSyncError for a piece out of order."""
        done = []
        for piece in pieces:
            tensor = piece.data.view(piece.shape) if piece.whole else self._add(piece)
            if tensor is not None:
                done.append((piece.name, tensor))
        if done:
            self._load(done)

    def _add(self, piece: Piece) -> Tensor | None:
        """Put a piece in its place; return the tensor once it has all its pieces."""
        if piece.start == 0:
            self._name, self._filled = piece.name, 0
            self._partial = _empty(piece)
        if self._partial is None or (piece.name, piece.start) != (self._name, self._filled):
            raise WeightSyncError(
                f"piece of {piece.name!r} from element {piece.start} on is out of order: it follows "
                f"{self._filled} elements of {self._name!r}"
            )
        end = piece.start + piece.data.numel()
        if end > piece.total or (self._partial.shape, self._partial.dtype) != (piece.shape, piece.data.dtype):
            raise WeightSyncError(f"the pieces of {piece.name!r} disagree about its shape or type")
        piece.copy_into(self._partial)
        self._filled = end
        if end < piece.total:
            return None
        whole, self._partial, self._name, self._filled = self._partial, None, "", 0
        return whole


def _empty(piece: Piece) -> Tensor:
    """Return a tensor of the whole parameter's shape, to be filled."""
    if piece.total == math.prod(piece.shape):
        return piece.data.new_empty(piece.shape)
    return piece.data.new_full(piece.shape, math.nan if piece.data.is_floating_point() else 0)


@dataclass
class _Held:
    data: Tensor
    info: UpdateInfo


class RetainedBuckets:
    """Buckets by position. ``version`` is theirs when all of one version are complete, and otherwise empty."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        # The version being received, the position of its next bucket, and the complete version before it.
        self._coming = self._base = ""
        self._next = 0
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
