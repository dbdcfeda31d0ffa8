"""Brings weights that lie in one layout over ranks into another, moving only what a rank does not hold yet.

In: two layouts (``layout.py``) and this rank's shards of the first. Out: this rank's shards of the second.

    plan ──> reshard: in each exchange pack, send over a ``Wire``, copy what arrives into place

Every byte that a target rank needs comes from exactly one source: its own rank if that holds it, and otherwise the
holder that has least to send so far. In an exchange a rank sends and receives at most ``bucket_bytes`` together, which
bounds the memory it needs beside the two layouts. The plan is a function of its arguments alone, so every rank computes
the same one. A wire is point to point over gloo or NCCL, or shared memory; a rank that misses a peer records it in the
group's store before it gives up, so that all can name the rank at the end of a chain. ``Gathering`` fills buckets of
whole tensors on rank 0; no other rank ever holds a whole tensor.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.errors import RanksLost, WeightSyncError
from rl_async.weight_sync.buckets import Bucket, allocate_buckets, divide
from rl_async.weight_sync.layout import (
    Box,
    Layout,
    Shard,
    common,
    fused_parts,
    lengths,
    shards_of,
    slices,
    volume,
    without,
)
from rl_async.weight_sync.transports.ipc import mapped, new_segment

ALIGNMENT = 16  # bytes: messages begin at multiples of it in their rank's buffer
MOVES_PER_BUCKET = 4  # at least so many moves fit, so less than a quarter of a full exchange is unused


class Move(NamedTuple):
    """A slice to move: ``box`` of a tensor, from shard ``source`` to shard ``target``, which both contain it."""

    tensor: str
    source: Shard
    target: Shard
    box: Box
    nbytes: int


Message = tuple[Move, ...]  # all moves from one rank to another in an exchange, packed in this order without gaps


class Exchange(NamedTuple):
    """Messages that are sent at the same time, by (source rank, target rank)."""

    messages: Mapping[tuple[int, int], Message]

    def nbytes(self, source: int, target: int) -> int:
        """Return the size of the message from ``source`` to ``target`` in bytes."""
        return sum(move.nbytes for move in self.messages[source, target])


@dataclass(frozen=True)
class ReshardPlan:
    """The exchanges, in order, and the ``local`` moves, which stay on their rank."""

    source: Layout
    target: Layout
    exchanges: tuple[Exchange, ...]
    local: tuple[Move, ...]

    @cached_property
    def figures(self) -> "Figures":
        """Cost of the plan, beside the lowest and the highest possible."""
        return _figures(self)


class Figures(NamedTuple):
    """Cost of a plan in bytes, summed over all ranks unless noted."""

    moved: int
    local: int  # copied without leaving their rank
    minimal: int  # needed by a rank that does not hold them: any transfer has to move these
    full_gather: int  # if every target rank received every tensor whole, minus what it holds
    sent_by_busiest: int  # by the rank that sends most
    peak_extra: int  # buffers on the rank and in the exchange where they are largest


class MessageSpan(NamedTuple):
    """One message of an exchange; ``start`` is its offset in bytes in its sender's buffer."""

    peer: int
    start: int
    nbytes: int

    @property
    def padded_bytes(self) -> int:
        """Bytes that the message takes up in a buffer, with alignment."""
        return _aligned(self.nbytes)


class RankMessages(NamedTuple):
    """All messages of one rank in an exchange."""

    outgoing: tuple[MessageSpan, ...]
    incoming: tuple[MessageSpan, ...]

    @property
    def outgoing_bytes(self) -> int:
        """Size of a buffer for all outgoing messages."""
        return sum(span.padded_bytes for span in self.outgoing)

    @property
    def incoming_bytes(self) -> int:
        """Size of a buffer for all incoming messages."""
        return sum(span.padded_bytes for span in self.incoming)


def messages_of(exchange: Exchange, rank: int) -> RankMessages:
    """Return a rank's messages in an exchange, each with its offset in its sender's buffer."""
    outgoing, incoming = [], []
    ends: dict[int, int] = defaultdict(int)
    for sender, receiver in sorted(exchange.messages):
        span = MessageSpan(receiver if sender == rank else sender, ends[sender], exchange.nbytes(sender, receiver))
        ends[sender] += span.padded_bytes
        if sender == rank:
            outgoing.append(span)
        elif receiver == rank:
            incoming.append(span)
    return RankMessages(tuple(outgoing), tuple(incoming))


def plan(source: Layout, target: Layout, bucket_bytes: int) -> ReshardPlan:
    """Plan the moves that bring ``source`` into the layout ``target``.

    Raises WeightSyncError if the two have different tensors or no rank holds an element that is needed, and ValueError
    if ``bucket_bytes`` is too small.
    """
    if bucket_bytes < ALIGNMENT * MOVES_PER_BUCKET:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, and must be at least {ALIGNMENT * MOVES_PER_BUCKET}")
    local: list[Move] = []
    schedule = _Schedule(bucket_bytes)
    sent: dict[int, int] = defaultdict(int)
    for name in target.tensors:
        if source.tensors.get(name) != target.tensors[name]:
            raise WeightSyncError(
                f"{name}: the target has {target.tensors[name]}, the source {source.tensors.get(name)}"
            )
        for move in (move for wanted in target.shards[name] for move in moves(name, source, wanted, sent)):
            if move.source.rank == move.target.rank:
                local.append(move)
                continue
            sent[move.source.rank] += move.nbytes
            for part in _pieces(move, bucket_bytes // MOVES_PER_BUCKET // ALIGNMENT * ALIGNMENT):
                schedule.add(part)
    return ReshardPlan(source, target, schedule.exchanges(), tuple(local))


def moves(name: str, source: Layout, wanted: Shard, sent: Mapping[int, int]) -> Iterator[Move]:
    """Yield the moves that fill ``wanted``, a box of the tensor ``name``; its own rank's shards are used first.

    ``sent``: bytes that each rank sends so far, which the caller keeps up to date while it takes the moves. Raises
    WeightSyncError if no rank holds an element.
    """
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in source.shards[name]:
        holders[box].append(rank)
    rest = [wanted.box]
    for box, ranks in sorted(holders.items(), key=lambda item: wanted.rank not in item[1]):
        if not rest:
            break
        left: list[Box] = []
        for piece in rest:
            found = common(piece, box)
            if found is None:
                left.append(piece)
                continue
            left += without(piece, found)
            rank = wanted.rank if wanted.rank in ranks else min(ranks, key=lambda r: (sent[r], r))
            yield Move(name, Shard(rank, box), wanted, found, source.nbytes(name, found))
        rest = left
    if rest:
        raise WeightSyncError(f"{name}: no source holds {rest[0]}, which rank {wanted.rank} needs")


def _pieces(move: Move, most: int) -> Iterator[Move]:
    """Cut a move into parts of at most ``most`` bytes: whole rows if a row fits, else parts of rows."""
    if move.nbytes <= most:
        yield move
        return
    shape = lengths(move.box)
    dimension = next(d for d, length in enumerate(shape) if length > 1)
    start, stop = move.box[dimension]
    row = move.nbytes // shape[dimension]
    step = max(1, most // row)
    for first in range(start, stop, step):
        end = min(first + step, stop)
        box = (*move.box[:dimension], (first, end), *move.box[dimension + 1 :])
        yield from _pieces(move._replace(box=box, nbytes=row * (end - first)), most)


class _Schedule:
    """Puts each move into the first exchange that has room for it on both ranks."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._used: dict[tuple[int, int], int] = defaultdict(int)  # bytes by (exchange, rank)
        self._first: dict[int, int] = defaultdict(int)  # by rank: exchanges before this one are full
        self._moves: dict[int, dict[tuple[int, int], list[Move]]] = {}

    def add(self, move: Move) -> None:
        ends = (move.source.rank, move.target.rank)
        size = _aligned(move.nbytes)
        number = max(self._first[rank] for rank in ends)
        while any(self._used[number, rank] + size > self._bucket_bytes for rank in ends):
            number += 1
        self._moves.setdefault(number, {}).setdefault(ends, []).append(move)
        for rank in ends:
            self._used[number, rank] += size
            while self._used[self._first[rank], rank] > self._bucket_bytes * (1 - 1 / MOVES_PER_BUCKET):
                self._first[rank] += 1

    def exchanges(self) -> tuple[Exchange, ...]:
        """Return the exchanges; each message has its widest elements first, so that none needs padding before it."""
        return tuple(
            Exchange({ends: tuple(sorted(moves, key=_width)) for ends, moves in sorted(messages.items())})
            for _, messages in sorted(self._moves.items())
        )


def _width(move: Move) -> int:
    return -(move.nbytes // volume(move.box))


def _figures(made: ReshardPlan) -> Figures:
    target = made.target
    wanted = sum(target.nbytes(name, shard.box) for name, shards in target.shards.items() for shard in shards)
    sent: dict[int, int] = defaultdict(int)
    peak = 0
    for exchange in made.exchanges:
        for ends in exchange.messages:
            sent[ends[0]] += exchange.nbytes(*ends)
        traffic = [messages_of(exchange, rank) for rank in {rank for ends in exchange.messages for rank in ends}]
        peak = max(peak, *(messages.outgoing_bytes + messages.incoming_bytes for messages in traffic))
    return Figures(
        moved=sum(sent.values()),
        local=sum(move.nbytes for move in made.local),
        minimal=wanted - _on_own_rank(made.source, target),
        full_gather=_full_gather(made.source, target),
        sent_by_busiest=max(sent.values(), default=0),
        peak_extra=peak,
    )


def _on_own_rank(source: Layout, target: Layout) -> int:
    """Count the bytes needed on a rank that holds them. No rank holds an element twice, so each counts once."""
    total = 0
    for name, shards in target.shards.items():
        held: dict[int, list[Box]] = defaultdict(list)
        for rank, box in source.shards[name]:
            held[rank].append(box)
        for rank, wanted in shards:
            both = (common(wanted, box) for box in held[rank])
            total += sum(target.nbytes(name, box) for box in both if box is not None)
    return total


def _full_gather(source: Layout, target: Layout) -> int:
    held = sum(
        source.nbytes(name, shard.box)
        for name, shards in source.shards.items()
        for shard in shards
        if shard.rank in target.ranks
    )
    total = sum(volume(tuple((0, n) for n in spec.shape)) * spec.itemsize for spec in target.tensors.values())
    return total * len(target.ranks) - held


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


GRACE_S = 1.0  # other ranks notice a failure at their own deadline, which may be a little later than ours


class Wire(Protocol):
    """One rank's end. The caller goes through ``send_buffers``, ``exchange``, ``release`` for each exchange in turn.

    Methods raise WeightSyncError, and RanksLost if a peer is gone. ``deadline`` is on the clock of ``time.monotonic``.
    """

    @property
    def held_bytes(self) -> int:
        """Size of the buffers that this rank has allocated."""
        ...

    def open(self, outgoing: int, both: int) -> None:
        """Allocate buffers for the largest exchange: ``outgoing`` bytes to send, ``both`` to send and receive."""
        ...

    def send_buffers(self, messages: RankMessages) -> list[Tensor]:
        """Return a buffer to pack each outgoing message into, uint8[nbytes]."""
        ...

    def exchange(self, messages: RankMessages, what: str, deadline: float) -> list[Tensor]:
        """Send the packed messages; return those received, uint8[nbytes] each, valid until ``release``.

        ``what`` names the exchange in errors.
        """
        ...

    def release(self, messages: RankMessages, deadline: float) -> None:
        """Tell senders that their messages were copied; return when this rank's send buffers may be overwritten."""
        ...

    def close(self) -> None:
        """Release this end's buffers; may be called twice."""
        ...


class PointToPoint:
    """Sends messages with ``torch.distributed`` in ``group``, whose ranks are the plan's: gloo, or NCCL on ``device``.

    One buffer holds what a rank sends and receives in an exchange. ``store`` is shared by all ranks and has keys of
    this group only. NCCL needs all ranks in the first exchange of a group, so run a barrier before.
    """

    def __init__(self, store: dist.Store, group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
        self._group, self._device = group, device
        self._lost = _LostRankFinder(store, dist.get_rank(group))
        self._arena = torch.empty(0, dtype=torch.uint8)

    @property
    def held_bytes(self) -> int:
        return self._arena.numel()

    def open(self, outgoing: int, both: int) -> None:
        if self._arena.numel() < both:
            self._arena = torch.empty(both, dtype=torch.uint8, device=self._device)

    def send_buffers(self, messages: RankMessages) -> list[Tensor]:
        return [self._arena[span.start : span.start + span.nbytes] for span in messages.outgoing]

    def exchange(self, messages: RankMessages, what: str, deadline: float) -> list[Tensor]:
        at, receive_buffers = messages.outgoing_bytes, []
        for span in messages.incoming:
            receive_buffers.append(self._arena[at : at + span.nbytes])
            at += span.padded_bytes
        operations = [
            dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=span.peer)
            for span, buffer in zip(messages.incoming, receive_buffers, strict=True)
        ] + [
            dist.P2POp(dist.isend, buffer, group=self._group, group_peer=span.peer)
            for span, buffer in zip(messages.outgoing, self.send_buffers(messages), strict=True)
        ]
        # NCCL needs a batch, or two ranks that send to each other wait for ever. gloo starts one at a time, so that
        # the peer of the operation that fails is known, also when it fails at its start.
        together = [[operation] for operation in operations] if self._device == "cpu" else [operations]
        self._carry_out(together, what, deadline)
        return receive_buffers

    def release(self, messages: RankMessages, deadline: float) -> None:
        """Do nothing: the buffer is this rank's own, and the messages have been sent."""

    def close(self) -> None:
        """Do nothing: whoever made the process group ends it."""

    def _carry_out(self, batches: list[list[dist.P2POp]], what: str, deadline: float) -> None:
        """Start all operations and wait for them."""
        started: list[tuple[int, dist.Work]] = []
        peer = -1
        try:
            for batch in batches:
                peer = batch[0].group_peer
                started += [(peer, work) for work in dist.batch_isend_irecv(batch)]
            for of_work, work in started:
                peer = of_work
                work.wait(_left(deadline))
        except RuntimeError as error:
            raise self._lost.error(peer, what, str(error)) from error


class SharedMemoryWire:
    """Exchanges messages on one host: each rank packs into its own segment, from which the others copy.

    Kept for resharding on shared devices, of which this is the CPU form (on a GPU, handles of its memory take its
    place).
    ``store`` is as for ``PointToPoint`` and carries a few bytes per message. A dead peer is noticed at the deadline
    only.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._lost = _LostRankFinder(store, rank)
        self._segment: SharedMemory | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._peers: dict[int, Tensor] = {}
        self._round = 0
        self._what = ""  # name of the exchange in progress

    @property
    def held_bytes(self) -> int:
        return self._buffer.numel()

    def open(self, outgoing: int, both: int) -> None:
        self.close()
        self._round += 1
        if outgoing == 0:
            return
        self._segment = new_segment(outgoing)
        self._buffer = mapped(self._segment.name, shared=True)
        self._store.set(self._key("segment", self._rank), self._segment.name)

    def send_buffers(self, messages: RankMessages) -> list[Tensor]:
        return [self._buffer[span.start : span.start + span.nbytes] for span in messages.outgoing]

    def exchange(self, messages: RankMessages, what: str, deadline: float) -> list[Tensor]:
        self._what = what
        for span in messages.outgoing:
            self._store.set(self._key(what, self._rank, span.peer), "packed")
        arrived = []
        for span in messages.incoming:
            self._take(self._key(what, span.peer, self._rank), span.peer, deadline)
            arrived.append(self._peer(span.peer, deadline)[span.start : span.start + span.nbytes])
        return arrived

    def release(self, messages: RankMessages, deadline: float) -> None:
        for span in messages.incoming:
            self._store.set(self._key(self._what, "copied", span.peer, self._rank), "")
        for span in messages.outgoing:
            self._take(self._key(self._what, "copied", self._rank, span.peer), span.peer, deadline)

    def close(self) -> None:
        """Unlink this rank's segment and drop the mappings of others; may be called twice."""
        self._peers.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._segment is not None:
            self._segment.close()
            self._segment.unlink()
            self._segment = None

    def _peer(self, peer: int, deadline: float) -> Tensor:
        if peer not in self._peers:
            name = self._get(self._key("segment", peer), peer, deadline).decode()
            self._peers[peer] = mapped(name, shared=True)
        return self._peers[peer]

    def _take(self, key: str, peer: int, deadline: float) -> None:
        """Wait for a key that only this rank reads, and delete it."""
        self._get(key, peer, deadline)
        self._store.delete_key(key)

    def _get(self, key: str, peer: int, deadline: float) -> bytes:
        try:
            self._store.wait([key], _left(deadline))
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise self._lost.error(peer, self._what, "no answer within the deadline") from error

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._round, *parts)))


class _LostRankFinder:
    """Finds the rank that failed: one that others miss and that misses no other rank."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def error(self, peer: int, what: str, reason: str) -> RanksLost:
        """Return the error for this rank having missed ``peer``."""
        missed, chain = peer, [self._rank]
        with suppress(RuntimeError):  # no record of this one, or the store was on the lost rank
            self._store.set(f"missed/{self._rank}", str(peer))
            while missed not in chain:
                chain.append(missed)
                self._store.wait([f"missed/{missed}"], timedelta(seconds=GRACE_S))
                missed = int(self._store.get(f"missed/{missed}"))
        through = "" if missed == peer else f", for which rank {peer} waits"
        return RanksLost(f"reshard, {what}: rank {self._rank} lost rank {missed}{through}: {reason}")


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


LocalShards = Mapping[tuple[str, Box], Tensor]  # a rank's part of a layout; each tensor has its box's shape


class Traffic(NamedTuple):
    """Bytes that one rank moved in a reshard."""

    sent: int
    received: int
    copied: int  # from its own shards into its own shards
    buffers: int  # allocated beside source and target


def reshard(
    made: ReshardPlan, rank: int, source: LocalShards, target: LocalShards, wire: Wire, timeout_s: float
) -> Traffic:
    """Fill ``target`` in place from ``source`` as ``made`` says; every rank of the plan calls it alike.

    Elements are converted to their spec's type before they are sent and to the target's on arrival. After ``timeout_s``
    it raises WeightSyncError naming the rank that failed; the wire is unusable then and ``target`` holds mixed weights.
    Raises WeightSyncError before anything moves if ``source`` or ``target`` lacks a shard.
    """
    deadline = time.monotonic() + timeout_s
    _check(made.source, rank, source, "source")
    _check(made.target, rank, target, "target")
    traffic = [messages_of(exchange, rank) for exchange in made.exchanges]
    outgoing = max((messages.outgoing_bytes for messages in traffic), default=0)
    wire.open(outgoing, max((messages.outgoing_bytes + messages.incoming_bytes for messages in traffic), default=0))
    copied = 0
    for move in made.local:
        if move.source.rank == rank:
            _slice(move, target, move.target.box).copy_(_slice(move, source, move.source.box))
            copied += move.nbytes
    for number, (exchange, messages) in enumerate(zip(made.exchanges, traffic, strict=True)):
        if not messages.outgoing and not messages.incoming:
            continue
        for span, buffer in zip(messages.outgoing, wire.send_buffers(messages), strict=True):
            _pack(exchange.messages[rank, span.peer], source, buffer, made.source)
        arrived = wire.exchange(messages, f"exchange {number + 1} of {len(made.exchanges)}", deadline)
        for span, buffer in zip(messages.incoming, arrived, strict=True):
            _unpack(exchange.messages[span.peer, rank], target, buffer, made.target)
        wire.release(messages, deadline)
    sent = sum(span.nbytes for messages in traffic for span in messages.outgoing)
    received = sum(span.nbytes for messages in traffic for span in messages.incoming)
    return Traffic(sent, received, copied, wire.held_bytes)


def one_box_each(
    layout: Layout, rank: int, tensors: Mapping[str, Tensor], names: Collection[str] | None = None
) -> dict[tuple[str, Box], Tensor]:
    """Return the shards of a rank that holds one box of each tensor, such as FSDP2's ``to_local()``."""
    return {(name, box): tensors[name] for name, box in layout.held(rank) if names is None or name in names}


def split_fused(fused: Tensor, layout: Layout, rank: int, names: Sequence[str]) -> dict[tuple[str, Box], Tensor]:
    """Return the boxes of ``names`` as views of the parameter [rows, ...] into which ``rank`` fuses them.

    Raises WeightSyncError if the boxes have another number of rows in total.
    """
    parts = fused_parts(layout, rank, names)
    rows = [lengths(box)[0] for _, box in parts]
    if sum(rows) != fused.shape[0]:
        raise WeightSyncError(
            f"a parameter of {fused.shape[0]} rows is fused from {names}, which have {sum(rows)} rows"
        )
    return dict(zip(parts, fused.split(rows), strict=True))


def _check(layout: Layout, rank: int, holding: LocalShards, what: str) -> None:
    for name, box in layout.held(rank):
        tensor = holding.get((name, box))
        if tensor is None or tuple(tensor.shape) != lengths(box):
            found = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise WeightSyncError(f"{what} of rank {rank} must have {box} of {name}, but has {found}")


def _slice(move: Move, holding: LocalShards, shard: Box) -> Tensor:
    return holding[move.tensor, shard][slices(move.box, shard)]


def _pack(message: Message, source: LocalShards, buffer: Tensor, layout: Layout) -> None:
    for move, place in _places(message, buffer, layout):
        place.copy_(_slice(move, source, move.source.box))


def _unpack(message: Message, target: LocalShards, buffer: Tensor, layout: Layout) -> None:
    for move, place in _places(message, buffer, layout):
        _slice(move, target, move.target.box).copy_(place)


def _places(message: Message, buffer: Tensor, layout: Layout) -> Iterator[tuple[Move, Tensor]]:
    """Yield each move with its part of a message, uint8[nbytes], as a tensor of the box's shape."""
    at = 0
    for move in message:
        dtype = getattr(torch, layout.tensors[move.tensor].dtype)
        yield move, buffer[at : at + move.nbytes].view(dtype).view(lengths(move.box))
        at += move.nbytes


GATHERER = 0  # the rank that talks to the engines


class ShardedWeights(NamedTuple):
    """This rank's shards of the weights, and the layout over all ranks, which is the same object every time."""

    layout: Layout
    held: LocalShards


class Gathering:
    """Gathers weights into buckets on ``device`` and keeps the plan while the layout stays the same. All ranks call it
    alike.
    """

    def __init__(self, wire: Wire, rank: int, bucket_bytes: int, timeout_s: float, device: str = "cpu") -> None:
        self._wire, self._rank, self._bucket_bytes, self._timeout_s = wire, rank, bucket_bytes, timeout_s
        self._device = device
        self._plan: ReshardPlan | None = None

    def buckets(self, weights: ShardedWeights) -> list[Bucket]:
        """Return all weights in buckets of at most ``bucket_bytes`` on the gathering rank, an empty list on others.

        Raises RanksLost if a rank is gone or does not take part within ``timeout_s``.
        """
        if self._plan is None or self._plan.source is not weights.layout:
            self._plan = plan(weights.layout, _target(weights.layout, self._bucket_bytes), self._bucket_bytes)
        mine = weights.layout.tensors if self._rank == GATHERER else {}
        empty = allocate_buckets(mine, self._bucket_bytes, self._device)
        places = {(name, box): place for bucket in empty for name, box, place in bucket.boxes}
        reshard(self._plan, self._rank, weights.held, places, self._wire, self._timeout_s)
        return [bucket.seal() for bucket in empty]


def _target(source: Layout, bucket_bytes: int) -> Layout:
    boxes: dict[str, list[Box]] = {name: [] for name in source.tensors}
    for bucket in divide(source.tensors, bucket_bytes):
        for part in bucket:
            boxes[part.name].append(part.box)
    return Layout(source.tensors, {name: shards_of((GATHERER, box) for box in found) for name, found in boxes.items()})
