"""One trainer rank's end of a publication: it sends its own shards to engines, and keeps a copy of what it sent.

The copy, in the type that travels, is all the memory that a publication needs beside two buckets; together the ranks
hold it once. Engines that come late are served from it, while training changes the weights.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import RanksLost, WeightSyncError
from rl_async.torch_shared import give_back, to_host
from rl_async.weight_sync.buckets.buckets import Bucket, Piece, checksum, dtype_of, layout_of, manifest, places_in, room
from rl_async.weight_sync.buckets.checksum import SUMS, checksum_like
from rl_async.weight_sync.layout import Layout, lengths, slices, volume
from rl_async.weight_sync.protocol import Hold, InitInfo, UpdateInfo
from rl_async.weight_sync.ranks.rounds import Cut, Needs, Part, Rounds, plan_rounds
from rl_async.weight_sync.reshard.execute import LocalShards
from rl_async.weight_sync.reshard.gather import ShardedWeights
from rl_async.weight_sync.transports.interface import TRANSPORTS, Sender, SenderSetup


@dataclass
class _Kept:
    """This rank's parts of one round, in a bucket."""

    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    places: list[Tensor] = field(default_factory=list)  # views of ``data`` by part, [elements]
    checksum: str = ""  # of ``data``; empty until it is needed

    def move_to_host(self) -> None:
        """Move the bytes. The checksum stays of the device's kind, which engines there compute quickest."""
        self.checksum = self.checksum or checksum(self.data)
        dtypes, numels = [place.dtype for place in self.places], [place.numel() for place in self.places]
        self.data = to_host(self.data)
        self.places = places_in(self.data, dtypes, numels)


@dataclass
class _Group:
    """What goes to the workers in each place of a group of engines: a sender, and its share of every round."""

    senders: list[Sender]
    cuts: list[list[list[Cut]]]  # by worker and round
    everything: list[bool]  # by worker
    staged: deque[int] = field(default_factory=deque)  # rounds that are under way
    unsent: dict[int, list[Bucket]] = field(default_factory=dict)  # those of them that are only staged

    def release(self, before: int) -> None:
        """Release the staged rounds before this one."""
        while self.staged and self.staged[0] < before:
            self.staged.popleft()
            for sender in self.senders:
                sender.unstage()


class Outlet:
    """``sync`` names its transport (not auto); ``host`` is this rank's address as engines reach it, ``stores`` the
    folder in whose files they meet it instead if they are on its machine.

    The trainer's main thread calls ``offer`` and ``keep``; everything else is called for the coordinator on rank 0,
    from any thread. ``timeout_s`` is how long rank 0 may be ahead of this rank. The copy is made on ``device``, round
    after round by a thread of its own, which waits for no engine. Methods raise WeightSyncError.

    Where engines sleep on ``device``, the copy waits there until they have loaded it: ``keep``, then ``leave``.
    """

    def __init__(
        self,
        rank: int,
        sync: WeightSyncConfig,
        host: str,
        timeout_s: float,
        device: str | torch.device = "cpu",
        stores: Path | None = None,
    ) -> None:
        assert sync.transport != "auto", "the caller resolves the transport"
        self._rank, self._sync, self._host, self._timeout_s = rank, sync, host, timeout_s
        self._device, self._stores = torch.device(device), stores
        self._layout: Layout | None = None
        self._rounds: Rounds | None = None
        self._held: LocalShards | None = None  # of the offered version, until all of it is kept
        self._version = ""
        self._offers = self._sent = 0  # offers so far, and the one that is sent; a version may be offered again
        self._hold: Hold = "no"
        self._stays = False  # whether the copy takes memory that engines will need, until ``leave``
        self._kept: list[_Kept] = []
        self._copies: list[Future[_Kept]] = []  # by round, of the offer that is sent
        self._parts: list[list[Part]] = []  # of this rank, by round
        self._groups: dict[str, _Group] = {}
        self._changed = threading.Condition()  # guards all of the above but the contents of ``_kept``
        self._leaving = threading.Lock()  # held while the copy moves to the host, before ``_changed``
        self._copier = ThreadPoolExecutor(1, "outlet-copy")  # who fills those

    @property
    def offers(self) -> int:
        """How often weights were offered, which is the same on all ranks once all have offered a version."""
        return self._offers

    @property
    def rounds(self) -> Rounds:
        """What all ranks send; known from the first ``offer`` on."""
        assert self._rounds is not None
        return self._rounds

    def offer(self, weights: ShardedWeights) -> None:
        """Give this rank's shards of a version, which must not change before the publication is over."""
        with self._changed:
            if weights.layout is not self._layout:
                self._layout, self._rounds = weights.layout, plan_rounds(weights.layout, self._sync.bucket_bytes)
                self._parts = self._rounds.of_rank(self._rank)
                self._kept = [_Kept() for _ in self._parts]
                for key in list(self._groups):
                    self.close(key)  # whose workers' shares were of the layout before
            self._held, self._offers = weights.held, self._offers + 1
            self._changed.notify_all()

    def keep(self, *, stays: bool) -> None:
        """Copy all of the offered weights now, since the memory that they are in will be given to engines.

        With ``stays`` the copy is on the device until ``leave``. Otherwise each round goes to the host as soon as it is
        copied: then one round at a time is all that the device holds.
        """
        give_back(self._device)  # a copy within larger pieces of memory would keep torch from giving these back
        with self._leaving, self._changed:
            self._copy(self._offers, leaves=not stays)
            self._stays = stays and self._device.type != "cpu"
        self._settle()

    def leave(self) -> None:
        """Move the copy to the host if ``keep`` left it on the device; may be called twice.

        A group that is still being sent gets the rest from there.
        """
        with self._leaving:
            with self._changed:
                if not self._stays:
                    return
                copies = self._copies
            for copy in copies:  # it takes long: others need not wait for it
                copy.result().move_to_host()
            give_back(self._device)
            with self._changed:
                self._stays = False

    def begin(self, version: str, offer: int, hold: Hold) -> None:
        """From now on send ``version``, once the main thread has made this offer. Raises RanksLost if it does not."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._offers >= offer, self._timeout_s):
                raise RanksLost(
                    f"rank {self._rank} did not offer version {version} within {self._timeout_s:g} s "
                    "(trainer.collective_timeout_s)"
                )
            self._version, self._hold = version, hold
            self._copy(offer, leaves=False)

    def seal(self) -> None:
        """End a publication once all of the offered weights are copied, so that training may change them."""
        self._settle()
        self.leave()

    def _settle(self) -> None:
        """Wait until all of the offered weights are copied, and let go of them."""
        for copy in self._copies:
            copy.result()
        with self._changed:
            self._held = None
            for group in self._groups.values():
                group.release(len(self._kept))

    def open(self, key: str, members: int, needs: Sequence[Needs | None]) -> list[list[InitInfo]]:
        """Prepare to send to ``members`` engines whose workers have these needs (None: everything).

        Returns how each worker of each engine joins.
        """
        make = TRANSPORTS[self._sync.transport].sender  # type: ignore[index]
        cuts = [self.rounds.cut(self._rank, of_worker) for of_worker in needs]
        timeout_s, folder = self._sync.timeout_s / 2, Path(self._sync.folder)
        senders: list[Sender] = []
        with ExitStack() as opened:
            for worker, rounds in enumerate(cuts):
                name, largest = f"{key}-{self._rank}-{worker}", max(map(self._nbytes, rounds))
                workers = (1,) * members
                setup = SenderSetup(workers, name, timeout_s, self._host, folder, largest, self._stores)
                senders.append(make(setup))
                opened.callback(senders[-1].close)
            opened.pop_all()
        with self._changed:
            self._groups[key] = _Group(senders, cuts, [of_worker is None for of_worker in needs])
        return [[sender.init_info(member) for sender in senders] for member in range(members)]

    def connect(self, key: str) -> None:
        """Form the groups, one after another, as every worker joins its own."""
        for sender in self._group(key).senders:
            sender.connect()

    def stage(self, key: str, number: int) -> list[UpdateInfo]:
        """Prepare each worker's bucket of a round, or start sending it; return the manifests.

        The engines have received the round before the last.
        """
        group = self._group(key)
        group.release(number - 1)
        buckets = [self._bucket(group, worker, number) for worker in range(len(group.senders))]
        infos = [sender.stage(bucket) for sender, bucket in zip(group.senders, buckets, strict=True)]
        group.staged.append(number)
        group.unsent[number] = buckets
        return infos

    def send(self, key: str, number: int) -> None:
        """Transfer each worker's bucket of a staged round while they receive it."""
        group = self._group(key)
        for sender, bucket in zip(group.senders, group.unsent.pop(number), strict=True):
            sender.send(bucket)

    def close(self, key: str) -> None:
        """Leave a group of engines; may be called twice."""
        with self._changed:
            group = self._groups.pop(key, None)
        if group is None:
            return
        group.unsent.clear()
        for sender in group.senders:
            sender.close()
        give_back(self._device)  # the copy may have left already, but for what this group was being sent

    def disconnect(self) -> None:
        """Leave all groups, when the run is over."""
        for key in list(self._groups):
            self.close(key)
        self._copier.shutdown(wait=False)

    def _group(self, key: str) -> _Group:
        with self._changed:
            if key not in self._groups:
                raise WeightSyncError(f"rank {self._rank} has left the group {key}")
            return self._groups[key]

    def _copy(self, offer: int, leaves: bool) -> None:
        """Have this offer copied, unless it was; ``leaves``: to the host, as soon as a round is copied."""
        if offer == self._sent:
            return
        assert self._held is not None, "an offer comes with its shards"
        work = zip(self._kept, self._parts, strict=True)
        self._copies = [self._copier.submit(self._filled, kept, parts, self._held, leaves) for kept, parts in work]
        self._sent = offer

    def _filled(self, kept: _Kept, parts: Sequence[Part], held: LocalShards, leaves: bool) -> _Kept:
        """Copy this rank's parts of a round from its shards."""
        dtypes, numels = [self._dtype(part.name) for part in parts], [volume(part.box) for part in parts]
        if not kept.places or kept.data.device != self._device:
            kept.data, kept.places = room(dtypes, numels, self._device)
        with torch.no_grad():
            for part, place in zip(parts, kept.places, strict=True):
                place.view(lengths(part.box)).copy_(held[part.name, part.held.box][slices(part.box, part.held.box)])
        kept.checksum = ""
        if leaves:
            kept.move_to_host()
        return kept

    def _bucket(self, group: _Group, worker: int, number: int) -> Bucket:
        kept, cuts = self._copies[number].result(), group.cuts[worker]
        if group.everything[worker]:
            pieces = [self._piece(cut, place) for cut, place in zip(cuts[number], kept.places, strict=True)]
            if not kept.checksum:
                kept.checksum = checksum(kept.data)
            data, total = kept.data, kept.checksum
        else:
            data, pieces = self._sliced(kept, number, cuts[number])
            total = checksum(data) if self._device.type == "cpu" else checksum_like(SUMS, data)  # as engines compute it
        later = self._nbytes(cuts[number + 1]) if number + 1 < len(cuts) else 0
        info = msgspec.structs.replace(manifest(pieces), checksum=total, next_bytes=later)
        if self._hold != "no":
            info = msgspec.structs.replace(info, hold=self._hold, version=self._version, index=number, count=len(cuts))
        return Bucket(data, info, self._device)

    def _sliced(self, kept: _Kept, number: int, cuts: Sequence[Cut]) -> tuple[Tensor, list[Piece]]:
        """Copy what a worker needs of a round into a bucket."""
        source = dict(zip(self._parts[number], kept.places, strict=True))
        data, places = room(*self._sizes(cuts), kept.data.device)
        for cut, place in zip(cuts, places, strict=True):
            at = 0
            for box in cut.boxes:
                part = place[at : at + volume(box)].view(lengths(box))
                part.copy_(source[cut.part].view(lengths(cut.part.box))[slices(box, cut.part.box)])
                at += volume(box)
        return data, [self._piece(cut, place) for cut, place in zip(cuts, places, strict=True)]

    def _piece(self, cut: Cut, data: Tensor) -> Piece:
        shape = self.rounds.tensors[cut.part.name].shape
        return Piece(cut.part.name, shape, cut.start, data, () if cut.run else cut.boxes, cut.total)

    def _nbytes(self, cuts: Sequence[Cut]) -> int:
        return layout_of(*self._sizes(cuts))[1]

    def _sizes(self, cuts: Sequence[Cut]) -> tuple[list[torch.dtype], list[int]]:
        return (
            [self._dtype(cut.part.name) for cut in cuts],
            [sum(map(volume, cut.boxes)) for cut in cuts],
        )

    def _dtype(self, name: str) -> torch.dtype:
        return dtype_of(self.rounds.tensors[name].dtype)
