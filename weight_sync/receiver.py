"""The engine's side of a weight update, whatever the transport."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from rl_async.concurrency import run_in_threads
from rl_async.errors import WeightSyncError
from rl_async.torch_shared import settle
from rl_async.weight_sync.buckets.adapters import AdapterSum
from rl_async.weight_sync.buckets.assembly import Assembler
from rl_async.weight_sync.buckets.buckets import Piece, unpack, verify
from rl_async.weight_sync.buckets.retained import RetainedBuckets
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.transports.interface import TRANSPORTS, Receiver


class WeightReceiver:
    """Receives buckets, verifies them and hands their pieces to ``load``.

    Several trainer ranks may send at the same time, each a bucket of its own; the pieces of all of them are loaded
    together, those of one parameter after one another. ``load`` gets views that are valid only during the call, so it
    must copy. A bucket with ``hold: stage`` is not loaded before ``finish``, which also adds adapters to their base, on
    ``device``. All methods block and raise WeightSyncError; call them in a thread, one at a time. An engine whose
    update failed holds mixed weights until the next complete update.
    """

    def __init__(self, load: Callable[[list[Piece]], None], device: str | torch.device = "cpu") -> None:
        self._load, self._device = load, torch.device(device)
        self._transports: list[Receiver] = []  # one for each rank that sends
        self._retained, self._adapters = [RetainedBuckets()], RetainedBuckets()
        self._staged: UpdateInfo | None = None  # the last bucket of what ``finish`` loads

    def start(self) -> None:
        """Begin a new update; what an unfinished one staged will not be loaded."""
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
        if infos[0].kind == "adapter":
            self._retained[0].require(infos[0].base, f"cannot take adapters for {infos[0].base}")
        while len(self._retained) < len(infos):
            self._retained.append(RetainedBuckets())
        del self._retained[len(infos) :]
        held = run_in_threads([partial(self._take, n, one) for n, one in enumerate(infos)], "weight-transfer")
        if infos[0].hold == "stage":
            self._staged = infos[0]
            return
        self._load(merged(unpack(data, one) for data, one in zip(held, infos, strict=True)))
        for data in held:
            settle(data)  # once this is answered, the senders may overwrite it

    def finish(self) -> None:
        """End the update: load what was staged."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        if staged.kind != "adapter":
            for pieces in zip(*(held.each(staged.version) for held in self._retained), strict=True):
                self._load(merged(pieces))
            return
        named: dict[str, Tensor] = {}
        self._adapters.load(staged.version, Assembler(named.update))
        add = AdapterSum(named, staged.scale, self._device)
        self._retained[0].load(staged.base, lambda pieces: self._load(add(pieces)))
        add.require_all_used()

    def close(self) -> None:
        """Leave the transfer; an engine can join another one later."""
        while self._transports:
            self._transports.pop().close()

    def _take(self, number: int, info: UpdateInfo) -> Tensor:
        """Receive and verify the bucket of one sender; return its bytes, uint8[nbytes], valid until the next bucket."""
        data = self._transports[number].receive(info)
        if info.hold == "no":
            verify(data, info)
            return data
        return (self._adapters if info.kind == "adapter" else self._retained[number]).put(data, info)


def merged(buckets: Iterable[Sequence[Piece]]) -> list[Piece]:
    """Return the pieces of several buckets, those of one parameter after one another and in order.

    The parameter that began in earlier buckets comes first, and that which goes on in later ones last; the others are
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
