"""Sends weights to engines from the trainer ranks that hold them, without gathering them anywhere.

    rank 0:  RankShards ──> RankShipment ──> Outlet       its own shards
                                        └──> RemoteOutlet ──TCP──> OutletServer ──> Outlet     of another rank

In: every rank's shards of a version, and the boxes that an engine's workers need. Out: rounds; in each, every rank
sends each worker one bucket with its share of the same few tensors. Every rank works out the same rounds for itself, so
only commands and manifests travel between ranks: a message is its length, 8 bytes, and JSON, and a connection begins
with the token of the run's ranks.

An outlet keeps a copy of the weights it sent, in the type that travels; a publication needs no other memory but two
buckets. Engines that come late are served from it, while training changes the weights. Ranks find each other through
``led`` and ``followed`` and leave together: rank 0 stops sending first, and leaves last, since it may hold the store.
"""

import hmac
import itertools
import logging
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.concurrency import in_daemon_thread, run_in_threads
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import RanksLost, WeightSyncError
from rl_async.files import UNDECODABLE
from rl_async.messages import Version
from rl_async.torch_shared import give_back, to_host
from rl_async.weight_sync.buckets import (
    SUMS,
    Bucket,
    Piece,
    checksum,
    checksum_like,
    divide,
    dtype_of,
    first_element,
    layout_of,
    manifest,
    places_in,
    room,
    wire_bytes,
)
from rl_async.weight_sync.layout import Box, Layout, Shard, TensorSpec, common, lengths, slices, volume, whole
from rl_async.weight_sync.protocol import Hold, Info, InitInfo, UpdateInfo
from rl_async.weight_sync.reshard import LocalShards, ShardedWeights, moves
from rl_async.weight_sync.transports import TRANSPORTS, Sender, SenderSetup

log = logging.getLogger("rl_async.weight_sync")

# The boxes that one worker needs of each tensor, by its name. They may be empty.
Needs = Mapping[str, tuple[Box, ...]]

LENGTH = struct.Struct("!Q")
# A longer message is refused.
MOST_BYTES = 1 << 30
# A connection must send the token within this time.
STRANGER_S = 10.0
# Rank 0 waits for an offer this much longer than the rank itself, so that it hears which rank is behind.
LATER_S = 30.0
THREAD = "weight-transfer"
# Set in the store once rank 0 sends no more.
OVER = "outlets/over"


# --- planning: the sending rank and the round of each part of a tensor


class Part(NamedTuple):
    """A box of a tensor that one rank sends, from its shard ``held``."""

    name: str
    held: Shard
    box: Box


class Cut(NamedTuple):
    """The share of a part that a worker needs: the fields of a ``Piece`` except its data.

    ``boxes`` are of the tensor, within the part. A ``run`` is a single box, whose elements are consecutive in the
    flattened tensor from ``start`` on.
    """

    part: Part
    boxes: tuple[Box, ...]
    start: int
    total: int
    run: bool


@dataclass(frozen=True)
class Rounds:
    """The parts of every round, from all ranks."""

    tensors: Mapping[str, TensorSpec]
    parts: tuple[tuple[Part, ...], ...]

    @property
    def senders(self) -> list[int]:
        """The ranks that send anything, in ascending order."""
        return sorted({part.held.rank for parts in self.parts for part in parts})

    def of_rank(self, rank: int) -> list[list[Part]]:
        """Return the parts that ``rank`` sends in each round to a worker that needs everything."""
        return [[part for part in parts if part.held.rank == rank] for parts in self.parts]

    def cut(self, rank: int, needs: Needs | None) -> list[list[Cut]]:
        """Return the cuts that ``rank`` sends in each round to a worker. Without ``needs`` it gets everything."""
        wanted = {n: (whole(spec.shape),) if needs is None else needs[n] for n, spec in self.tensors.items()}
        by_name: dict[str, list[tuple[int, Part, tuple[Box, ...]]]] = defaultdict(list)
        for number, parts in enumerate(self.parts):
            for part in parts:
                found = (common(box, part.box) for box in wanted[part.name])
                if boxes := tuple(box for box in found if box is not None):
                    by_name[part.name].append((number, part, boxes))
        rounds: list[list[Cut]] = [[] for _ in self.parts]
        for name, pieces in by_name.items():
            shape, sent = self.tensors[name].shape, 0
            total = sum(map(volume, wanted[name]))
            runs = total == volume(whole(shape)) and all(_is_run(shape, boxes) for _, _, boxes in pieces)
            for number, part, boxes in pieces:
                if part.held.rank == rank:
                    start = first_element(shape, boxes[0]) if runs else sent
                    rounds[number].append(Cut(part, boxes, start, total, runs))
                sent += sum(map(volume, boxes))
        return rounds


def plan_rounds(layout: Layout, bucket_bytes: int) -> Rounds:
    """Divide the tensors of ``layout`` among rounds of at most ``bucket_bytes`` and among the ranks that hold them.

    Of several holders of an element, the one with the least to send so far sends it. Raises WeightSyncError if an
    element has no holder, and ValueError if a bucket cannot hold one.
    """
    # The engine counts as a rank that holds nothing yet.
    engine = max(layout.ranks) + 1
    sent: dict[int, int] = defaultdict(int)
    rounds: list[tuple[Part, ...]] = []
    for pieces in divide(layout.tensors, bucket_bytes):
        parts: list[Part] = []
        for piece in pieces:
            for move in moves(piece.name, layout, Shard(engine, piece.box), sent):
                sent[move.source.rank] += move.nbytes
                parts.append(Part(piece.name, move.source, move.box))
        rounds.append(tuple(parts))
    return Rounds(layout.tensors, tuple(rounds))


def _is_run(shape: Sequence[int], boxes: tuple[Box, ...]) -> bool:
    """Whether there is a single box, whose elements are consecutive in the flattened tensor."""
    if len(boxes) != 1:
        return False
    cut = [length > 1 for length in lengths(boxes[0])]
    begin = cut.index(True) if any(cut) else len(cut)
    return all(length == size for length, size in list(zip(lengths(boxes[0]), shape, strict=True))[begin + 1 :])


# --- one rank's end


@dataclass
class _Kept:
    """This rank's parts of one round, in a bucket: ``places`` are views of ``data`` by part, [elements].

    ``checksum`` is empty until it is needed. The bytes are read, given up and made again under ``lock``.
    """

    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    places: list[Tensor] = field(default_factory=list)
    checksum: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def drop(self) -> None:
        """Give up the bytes, which can be copied again. Their checksum stays valid."""
        self.data, self.places = torch.empty(0, dtype=torch.uint8), []

    def move_to_host(self) -> None:
        """Move the bytes. The checksum is taken first: engines compute the device's kind of checksum fastest."""
        self.checksum = self.checksum or checksum(self.data)
        dtypes, numels = [place.dtype for place in self.places], [place.numel() for place in self.places]
        self.data = to_host(self.data)
        self.places = places_in(self.data, dtypes, numels)


@dataclass
class _Group:
    """A group of engines: for each worker a sender, the cuts of every round, and whether it needs everything.

    ``staged`` are the rounds in flight, ``unsent`` the buckets of those that are not sent yet.
    """

    senders: list[Sender]
    cuts: list[list[list[Cut]]]
    everything: list[bool]
    staged: deque[int] = field(default_factory=deque)
    unsent: dict[int, list[Bucket]] = field(default_factory=dict)

    def release(self, before: int) -> None:
        """Release the staged rounds before this one."""
        while self.staged and self.staged[0] < before:
            self.staged.popleft()
            for sender in self.senders:
                sender.unstage()


class Outlet:
    """Copies the weights that this rank offers, and sends them to groups of engines.

    ``sync`` names its transport (not auto). ``host`` is this rank's address as engines reach it; engines on its machine
    meet it in files of the folder ``stores`` instead.

    The trainer's main thread calls ``offer`` and ``keep``; everything else is called for the coordinator on rank 0,
    from any thread. ``timeout_s`` is how long rank 0 may be ahead of this rank. The copy is made on ``device``, round
    after round by a thread of its own, which waits for no engine. Methods raise WeightSyncError.

    Where engines sleep on ``device``, the copy stays there from ``keep`` until they have loaded it: ``leave``. It need
    not move to the host then if the shards themselves are there: ``rest``.
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
        # The shards of the offered version, until all of it is copied.
        self._held: LocalShards | None = None
        self._version = ""
        # Offers are counted, since a version may be offered again.
        self._offers = self._sent = 0
        self._hold: Hold = "no"
        # Whether the copy takes memory that engines will need, until ``leave``.
        self._stays = False
        # The types of device that the offered shards were on, and the shards on the host from which ``leave`` lets late
        # engines be served.
        self._offered_on: set[str] = set()
        self._rest: LocalShards | None = None
        # This rank's parts and their copies, by round.
        self._parts: list[list[Part]] = []
        self._kept: list[_Kept] = []
        self._copies: list[Future[_Kept]] = []
        self._groups: dict[str, _Group] = {}
        # Guards all of the above except the contents of ``_kept``, which the copier fills.
        self._changed = threading.Condition()
        # Held while the copy moves to the host; acquired before ``_changed``.
        self._leaving = threading.Lock()
        self._copier = ThreadPoolExecutor(1, "outlet-copy")

    @property
    def offers(self) -> int:
        """How often weights were offered, which is the same on all ranks once all have offered a version."""
        return self._offers

    @property
    def rounds(self) -> Rounds:
        """The rounds of all ranks. They are known from the first ``offer`` on."""
        assert self._rounds is not None
        return self._rounds

    def offer(self, weights: ShardedWeights) -> None:
        """Offer this rank's shards of a version. They must not change before the publication is over."""
        with self._changed:
            if weights.layout is not self._layout:
                self._layout, self._rounds = weights.layout, plan_rounds(weights.layout, self._sync.bucket)
                self._parts = self._rounds.of_rank(self._rank)
                self._kept = [_Kept() for _ in self._parts]
                # The cuts of open groups were of the previous layout.
                for key in list(self._groups):
                    self.close(key)
            self._held, self._offers = weights.held, self._offers + 1
            self._offered_on = {shard.device.type for shard in weights.held.values()}
            self._changed.notify_all()

    def keep(self, *, stays: bool) -> None:
        """Copy all offered weights now, since engines will get their memory.

        With ``stays`` the copy is on the device until ``leave``. Otherwise each round moves to the host as soon as it
        is copied, so that the device holds one round at a time.
        """
        # A copy inside a larger block of cached memory would keep torch from releasing the block.
        give_back(self._device)
        with self._leaving, self._changed:
            # Before the shards move to the host again, so that these use the same memory.
            self._rest = None
            self._copy(self._offers, leaves=not stays)
            self._stays = stays and self._device.type != "cpu"
        self._wait_for_copies()

    def rest(self, held: LocalShards) -> None:
        """Take note that the offered shards are on the host, if all of them have moved there from the device.

        Moving them back leaves these copies as they are, whereas shards that were on the host before, or stay on the
        device, change with the next step.
        """
        if "cpu" not in self._offered_on and all(shard.device.type == "cpu" for shard in held.values()):
            with self._changed:
                self._rest = held

    def leave(self) -> None:
        """Give up the copy that ``keep`` left on the device, or move it to the host without ``rest``; may be called
        twice.

        A group that is still being sent gets the other rounds from the host.
        """
        with self._leaving:
            with self._changed:
                if not self._stays:
                    return
                copies, rest = self._copies, self._rest
            # This takes long, so ``_changed`` is not held.
            for copy in copies:
                kept = copy.result()
                with kept.lock:
                    if rest is None:
                        kept.move_to_host()
                    else:
                        kept.drop()
            give_back(self._device)
            with self._changed:
                self._stays = False

    def begin(self, version: str, offer: int, hold: Hold) -> None:
        """Send ``version`` from now on, once the main thread has made this offer. Raises RanksLost if it does not."""
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
        self._wait_for_copies()
        self.leave()

    def _wait_for_copies(self) -> None:
        """Wait until all offered weights are copied, then drop the reference to them."""
        for copy in self._copies:
            copy.result()
        with self._changed:
            self._held = None
            for group in self._groups.values():
                group.release(len(self._kept))

    def open(self, key: str, members: int, needs: Sequence[Needs | None]) -> list[list[InitInfo]]:
        """Prepare to send to ``members`` engines with these needs, one entry per worker; None stands for everything.

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
        """Transfer each worker's bucket of a staged round while they receive it.

        Workers receive from all ranks at once. Each rank begins with another worker, so that ranks share the links of
        all workers instead of filling those of the first one.
        """
        group = self._group(key)
        pairs = deque(zip(group.senders, group.unsent.pop(number), strict=True))
        pairs.rotate(-self._rank)
        for sender, bucket in pairs:
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
        # The copy may have left already, except the rounds that this group was being sent.
        give_back(self._device)

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
        """Start copying this offer unless that was done. With ``leaves``, each copied round moves to the host."""
        if offer == self._sent:
            return
        assert self._held is not None, "an offer comes with its shards"
        work = zip(self._kept, self._parts, strict=True)
        self._copies = [self._copier.submit(self._copied, kept, parts, self._held, leaves) for kept, parts in work]
        self._sent = offer

    def _copied(self, kept: _Kept, parts: Sequence[Part], held: LocalShards, leaves: bool) -> _Kept:
        with kept.lock:
            self._fill(kept, parts, held, self._device)
            kept.checksum = ""
        if leaves:
            kept.move_to_host()
        return kept

    def _fill(self, kept: _Kept, parts: Sequence[Part], held: LocalShards, device: torch.device) -> None:
        """Copy this rank's parts of a round from its shards to a device."""
        dtypes, numels = [self._dtype(part.name) for part in parts], [volume(part.box) for part in parts]
        if not kept.places or kept.data.device != device:
            kept.data, kept.places = room(dtypes, numels, device)
        with torch.no_grad():
            for part, place in zip(parts, kept.places, strict=True):
                source = held[part.name, part.held.box][slices(part.box, part.held.box)]
                if source.device != place.device:
                    # Otherwise torch moves the shard in its own type, mostly twice the bytes, and the host converts it.
                    source = to_host(source.to(place.dtype))
                place.view(lengths(part.box)).copy_(source)

    def _bucket(self, group: _Group, worker: int, number: int) -> Bucket:
        kept, cuts = self._copies[number].result(), group.cuts[worker]
        with kept.lock:
            if not kept.places and self._parts[number]:
                if self._rest is None:
                    raise WeightSyncError("the copy of these weights was given up, and they are not at rest")
                self._fill(kept, self._parts[number], self._rest, torch.device("cpu"))
            return self._filled(kept, group, worker, number, cuts)

    def _filled(self, kept: _Kept, group: _Group, worker: int, number: int, cuts: list[list[Cut]]) -> Bucket:
        if group.everything[worker]:
            pieces = [self._piece(cut, place) for cut, place in zip(cuts[number], kept.places, strict=True)]
            kept.checksum = kept.checksum or self._checksum(kept.data)
            data, total = kept.data, kept.checksum
        else:
            data, pieces = self._sliced(kept, number, cuts[number])
            total = self._checksum(data)
        later = self._nbytes(cuts[number + 1]) if number + 1 < len(cuts) else 0
        info = msgspec.structs.replace(manifest(pieces), checksum=total, next_bytes=later)
        if self._hold != "no":
            info = msgspec.structs.replace(info, hold=self._hold, version=self._version, index=number, count=len(cuts))
        return Bucket(data, info, self._device)

    def _checksum(self, data: Tensor) -> str:
        """Return a checksum of the kind that engines on this outlet's device compute fastest."""
        return checksum(data) if self._device.type == "cpu" else checksum_like(SUMS, data)

    def _sliced(self, kept: _Kept, number: int, cuts: Sequence[Cut]) -> tuple[Tensor, list[Piece]]:
        """Copy a worker's share of a round into a bucket."""
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
        return [self._dtype(cut.part.name) for cut in cuts], [sum(map(volume, cut.boxes)) for cut in cuts]

    def _dtype(self, name: str) -> torch.dtype:
        return dtype_of(self.rounds.tensors[name].dtype)


# --- an outlet of another rank, over TCP


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A method of an outlet, and its arguments."""

    method: str
    key: str = ""
    number: int = 0
    members: int = 0
    needs: list[Mapping[str, tuple[Box, ...]] | None] = []
    version: str = ""
    offer: int = 0
    hold: Hold = "no"


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of the method, or the text of the error it raised: a failed transfer, or a fault of the rank."""

    error: str = ""
    fault: str = ""
    joins: list[list[InitInfo]] = []
    infos: list[UpdateInfo] = []


class OutletServer:
    """Serves this rank's outlet to rank 0 on a free port of ``host``, in daemon threads, until it is closed."""

    def __init__(self, outlet: Outlet, host: str, token: str) -> None:
        self._outlet, self._token = outlet, token.encode()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="outlet", daemon=True).start()

    def close(self) -> None:
        """Take no further connections, and leave all groups of engines."""
        with suppress(OSError):
            # This wakes the thread that waits for connections.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._outlet.disconnect()

    def _accept(self) -> None:
        """Start a thread for each connection, until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            in_daemon_thread(lambda peer=connection: self._serve(peer), "outlet")  # type: ignore[misc]

    def _serve(self, peer: socket.socket) -> None:
        """Carry out the commands of one connection, until rank 0 ends it."""
        with peer, suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.settimeout(STRANGER_S)
            if not hmac.compare_digest(_read(peer, most=len(self._token)), self._token):
                log.warning("a connection to %s without the ranks' token was refused", self.address)
                return
            peer.settimeout(None)
            while True:
                try:
                    command = msgspec.json.decode(_read(peer), type=Command)
                except UNDECODABLE as error:
                    log.warning("a command to %s cannot be read, and its connection ends: %s", self.address, error)
                    return
                _write(peer, msgspec.json.encode(self._carry_out(command)))

    def _carry_out(self, command: Command) -> Answer:
        outlet, key = self._outlet, command.key
        try:
            match command.method:
                case "begin":
                    outlet.begin(command.version, command.offer, command.hold)
                case "open":
                    return Answer(joins=outlet.open(key, command.members, command.needs))
                case "stage":
                    return Answer(infos=outlet.stage(key, command.number))
                case "send":
                    outlet.send(key, command.number)
                case "seal":
                    outlet.seal()
                case "leave":
                    outlet.leave()
                case "connect":
                    outlet.connect(key)
                case "close":
                    outlet.close(key)
                case _:
                    return Answer(error=f"an outlet has no method {command.method!r}")
        except RanksLost as error:
            return Answer(fault=str(error))
        except WeightSyncError as error:
            return Answer(error=str(error))
        except Exception as error:
            # A fault of this process: engines are not to blame, and rank 0 waits for an answer.
            log.exception("%s of a publication failed", command.method)
            return Answer(fault=f"{type(error).__name__}: {error}")
        return Answer()


class RemoteOutlet:
    """The outlet of rank ``rank`` at ``address``, as the coordinator uses it.

    Methods raise WeightSyncError if a transfer failed, and RanksLost if the rank did, is gone, or does not answer
    within ``timeout_s``. Engines have longer for an update, so that none is taken for hung because a rank is.
    ``offer_s`` is the deadline of calls that wait for the rank's main thread or for a copy of all its weights.
    """

    def __init__(self, rank: int, address: str, token: str, timeout_s: float, offer_s: float) -> None:
        self._rank, self._token, self._timeout_s = rank, token.encode(), timeout_s
        self._offer_s = offer_s + LATER_S
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        # Connections that wait for a call. If None, connections are closed after their call.
        self._idle: list[socket.socket] | None = []
        self._lock = threading.Lock()

    def begin(self, version: str, offer: int, hold: Hold) -> None:
        self._call(Command("begin", version=version, offer=offer, hold=hold), self._offer_s)

    def seal(self) -> None:
        self._call(Command("seal"), self._offer_s)

    def leave(self) -> None:
        self._call(Command("leave"), self._offer_s)

    def open(self, key: str, members: int, needs: Sequence[Needs | None]) -> list[list[InitInfo]]:
        return self._call(Command("open", key, members=members, needs=list(needs))).joins

    def connect(self, key: str) -> None:
        self._call(Command("connect", key))

    def stage(self, key: str, number: int) -> list[UpdateInfo]:
        return self._call(Command("stage", key, number)).infos

    def send(self, key: str, number: int) -> None:
        self._call(Command("send", key, number))

    def close(self, key: str) -> None:
        """Start leaving the group, without waiting for the end. A lost rank has left it."""

        def call() -> None:
            with suppress(RanksLost):
                self._call(Command("close", key))

        in_daemon_thread(call, "outlet")

    def disconnect(self) -> None:
        """Close the connections; those in use are closed after their call."""
        with self._lock:
            idle, self._idle = self._idle or [], None
        for peer in idle:
            peer.close()

    def _call(self, command: Command, timeout_s: float | None = None) -> Answer:
        """Send a command and return the answer. Concurrent calls use separate connections."""
        deadline_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            with self._lock:
                peer = self._idle.pop() if self._idle else None
            if peer is None:
                peer = socket.create_connection(self._address, self._timeout_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _write(peer, self._token)
            peer.settimeout(deadline_s)
            try:
                _write(peer, msgspec.json.encode(command))
                answer = msgspec.json.decode(_read(peer), type=Answer)
            except (OSError, *UNDECODABLE):
                peer.close()
                raise
        except (OSError, *UNDECODABLE) as error:
            hint = f"{type(error).__name__}: {error}; deadline {deadline_s:g} s"
            raise RanksLost(f"rank 0 lost rank {self._rank} in {command.method} of a publication: {hint}") from error
        with self._lock:
            if self._idle is not None:
                self._idle.append(peer)
            else:
                peer.close()
        if answer.fault:
            raise RanksLost(f"rank {self._rank} failed in {command.method} of a publication: {answer.fault}")
        if answer.error:
            raise WeightSyncError(f"rank {self._rank}: {answer.error}")
        return answer


def _write(peer: socket.socket, data: bytes) -> None:
    peer.sendall(LENGTH.pack(len(data)) + data)


def _read(peer: socket.socket, most: int = MOST_BYTES) -> bytes:
    (size,) = LENGTH.unpack(_exactly(peer, LENGTH.size))
    if size > most:
        raise ConnectionError(f"a message of {size} bytes")
    return _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = peer.recv_into(view)
        if count == 0:
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return bytes(data)


# --- all ranks, as rank 0 drives them


class RankShards:
    """The weights of a version on the trainer's ranks. ``outlet`` is rank 0's, ``others`` those of other ranks.

    Methods block; they raise WeightSyncError, and RanksLost if a rank is gone.
    """

    def __init__(self, outlet: Outlet, others: Mapping[int, RemoteOutlet]) -> None:
        self._outlet = outlet
        self._ends: dict[int, Outlet | RemoteOutlet] = {0: outlet, **others}
        self._keys = itertools.count()

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of every tensor, by name."""
        return {name: list(spec.shape) for name, spec in self._outlet.rounds.tensors.items()}

    def begin(self, version: Version, hold: Hold) -> None:
        """Make all ranks send ``version``. This rank's main thread has offered it, and theirs will."""
        offer = self._outlet.offers
        run_in_threads([partial(end.begin, str(version), offer, hold) for end in self._ends.values()], THREAD)

    def seal(self) -> None:
        """Have all ranks copy the rest of the weights, so that training may change them."""
        run_in_threads([end.seal for end in self._ends.values()], THREAD)

    def leave(self) -> None:
        """Have all ranks move their copies off the devices shared with engines; may be called twice."""
        run_in_threads([end.leave for end in self._ends.values()], THREAD)

    def close(self) -> None:
        """Disconnect from the other ranks, and leave the groups of engines that are still open."""
        for end in self._ends.values():
            end.disconnect()

    def shipment(self, members: int, needs: Sequence[Needs | None]) -> "RankShipment":
        """Prepare to send to ``members`` engines with these needs, one entry per worker; None stands for everything."""
        rounds = self._outlet.rounds
        ends = [self._ends[rank] for rank in rounds.senders]
        return RankShipment(f"weights-{next(self._keys)}", ends, members, needs, len(rounds.parts))


class RankShipment:
    """Sends the rounds of a publication to one group of engines, from every rank that holds something.

    A round is one bucket from each rank to each worker. Used as ``wave.Group`` and ``wave.Shipment``.
    """

    def __init__(
        self, key: str, ends: Sequence[Outlet | RemoteOutlet], members: int, needs: Sequence[Needs | None], count: int
    ) -> None:
        self._key, self._ends = key, ends
        self.needs, self.count = tuple(needs), count
        # Bytes staged for one engine since the first round.
        self.nbytes = 0
        try:
            self._joins = run_in_threads([partial(end.open, key, members, needs) for end in ends], THREAD)
        except BaseException:
            self.close()
            raise

    def init_info(self, member: int) -> InitInfo:
        """Describe how each worker of an engine joins every rank that sends."""
        backend = self._joins[0][member][0].backend
        of_workers = [
            _one([joins[member][worker] for joins in self._joins], lambda many: InitInfo(backend=backend, sources=many))
            for worker in range(len(self.needs))
        ]
        return _one(of_workers, lambda many: InitInfo(backend=backend, workers=many))

    def connect(self) -> None:
        """Form the groups of all ranks with the workers."""
        run_in_threads([partial(end.connect, self._key) for end in self._ends], THREAD)

    def stage(self, number: int) -> UpdateInfo:
        """Have every rank prepare a round, or start sending it; return the manifest to give to the engines."""
        if number == 0:
            self.nbytes = 0
        infos = run_in_threads([partial(end.stage, self._key, number) for end in self._ends], THREAD)
        self.nbytes += sum(wire_bytes(info) for of_rank in infos for info in of_rank)
        empty = UpdateInfo(names=[], dtype_names=[], shapes=[], checksum="", hold=infos[0][0].hold)
        of_workers = [
            _one(list(of_worker), lambda many: msgspec.structs.replace(empty, sources=many))
            for of_worker in zip(*infos, strict=True)
        ]
        return _one(of_workers, lambda many: msgspec.structs.replace(empty, workers=many))

    def send(self, number: int) -> None:
        """Transfer a staged round while the engines receive it."""
        run_in_threads([partial(end.send, self._key, number) for end in self._ends], THREAD)

    def unstage(self) -> None:
        """Do nothing: ranks release a round when the one after the next is staged, and at the end."""

    def leave(self) -> None:
        """Have the ranks that send move their copies off shared devices; may be called twice."""
        run_in_threads([end.leave for end in self._ends], THREAD)

    def close(self) -> None:
        for end in self._ends:
            end.close(self._key)


def _one(infos: list[Info], combine: Callable[[list[Info]], Info]) -> Info:
    """Return a single info as it is, and combine several."""
    return infos[0] if len(infos) == 1 else combine(infos)


# --- how the ranks find each other


@contextmanager
def led(
    outlet: Outlet, token: str, store: dist.Store, ranks: int, answer_s: float, offer_s: float
) -> Iterator[RankShards]:
    """Yield the outlets of all ranks, on rank 0. At the end of the context, wait for the other ranks to leave theirs.

    ``store`` is shared by all ``ranks``; for ``answer_s`` and ``offer_s`` see ``RemoteOutlet``. Raises torch's
    DistStoreError if a rank has not left within ``offer_s`` of the end of this one's context.
    """
    addresses = {rank: store.get(_key(rank)).decode() for rank in range(1, ranks)}
    others = {rank: RemoteOutlet(rank, at, token, answer_s, offer_s) for rank, at in addresses.items()}
    with closing(RankShards(outlet, others)) as shards:
        yield shards
    store.set(OVER, "")
    store.wait([_left(rank) for rank in others], timedelta(seconds=offer_s))


@contextmanager
def followed(outlet: Outlet, rank: int, host: str, token: str, store: dist.Store, leave_s: float) -> Iterator[None]:
    """Serve the outlet of another rank to rank 0, until rank 0 sends no more.

    Raises torch's DistStoreError if that takes longer than ``leave_s`` after the end of the context.
    """
    with closing(OutletServer(outlet, host, token)) as server:
        store.set(_key(rank), server.address)
        yield
        store.wait([OVER], timedelta(seconds=leave_s))
        store.set(_left(rank), "")


def _key(rank: int) -> str:
    return f"outlets/{rank}"


def _left(rank: int) -> str:
    return f"outlets/left/{rank}"
