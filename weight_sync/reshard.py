"""Brings weights that lie in one layout over ranks into another, moving only what a rank does not hold yet.

In: two layouts (``layout.py``) and this rank's shards of the first. Out: this rank's shards of the second.

    plan ──> reshard: in each exchange pack, send over a ``Wire``, copy what arrives into place

Every byte that a target rank needs comes from exactly one source: its own rank if that holds it, and otherwise the
holder that has least to send so far. In an exchange a rank sends and receives at most ``bucket_bytes`` together, which
bounds the memory it needs beside the two layouts. The plan is a function of its arguments alone, so every rank computes
the same one. Messages go point to point over gloo or NCCL; a rank that misses a peer records it in the
group's store before it gives up, so that all can name the rank at the end of a chain. ``Gathering`` fills buckets of
whole tensors on rank 0; no other rank ever holds a whole tensor.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
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

# Messages begin at multiples of so many bytes in their rank's buffer.
ALIGNMENT = 16
# At least so many moves fit into a bucket, so less than a quarter of a full exchange is unused.
MOVES_PER_BUCKET = 4
# Other ranks notice a failure at their own deadline, which may be a little later than ours.
GRACE_S = 1.0
# The rank that talks to the engines.
GATHERER = 0

# A rank's part of a layout. Each tensor has the shape of its box.
LocalShards = Mapping[tuple[str, Box], Tensor]


# --- the plan


class Move(NamedTuple):
    """A slice to move: ``box`` of a tensor, from shard ``source`` to shard ``target``, which both contain it."""

    tensor: str
    source: Shard
    target: Shard
    box: Box
    nbytes: int


# All moves from one rank to another in an exchange, packed in this order without gaps.
Message = tuple[Move, ...]


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

    The caller keeps ``sent``, the bytes that each rank sends so far, up to date while it takes the moves. Raises
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
        # Bytes by exchange and rank.
        self._used: dict[tuple[int, int], int] = defaultdict(int)
        # The first exchange of each rank that is not full.
        self._first: dict[int, int] = defaultdict(int)
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
        """Return the exchanges. Each message has its widest elements first, so that none needs padding before it."""

        def narrowness(move: Move) -> int:
            return -(move.nbytes // volume(move.box))

        return tuple(
            Exchange({ends: tuple(sorted(moves, key=narrowness)) for ends, moves in sorted(messages.items())})
            for _, messages in sorted(self._moves.items())
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# --- how messages travel


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
    """Sends messages between the ranks of ``torch.distributed``, which are the plan's: gloo, or NCCL on ``device``.

    One buffer holds what a rank sends and receives in an exchange. ``store`` is shared by all ranks and has keys of
    this group only. NCCL needs all ranks in the first exchange of a group, so run a barrier before.
    """

    def __init__(self, store: dist.Store, device: str = "cpu") -> None:
        self._device = device
        self._lost = LostRankFinder(store, dist.get_rank())
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
            dist.P2POp(dist.irecv, buffer, span.peer)
            for span, buffer in zip(messages.incoming, receive_buffers, strict=True)
        ] + [
            dist.P2POp(dist.isend, buffer, span.peer)
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
        """Do nothing: the maker of the process group ends it."""

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
                work.wait(seconds_left(deadline))
        except RuntimeError as error:
            raise self._lost.error(peer, what, str(error)) from error


class LostRankFinder:
    """Finds the rank that failed: one that others miss and that misses no other rank."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def error(self, peer: int, what: str, reason: str) -> RanksLost:
        """Return the error for this rank having missed ``peer``."""
        missed, chain = peer, [self._rank]
        # The last rank has no record, or the store was on the lost rank.
        with suppress(RuntimeError):
            self._store.set(f"missed/{self._rank}", str(peer))
            while missed not in chain:
                chain.append(missed)
                self._store.wait([f"missed/{missed}"], timedelta(seconds=GRACE_S))
                missed = int(self._store.get(f"missed/{missed}"))
        through = "" if missed == peer else f", for which rank {peer} waits"
        return RanksLost(f"reshard, {what}: rank {self._rank} lost rank {missed}{through}: {reason}")


def seconds_left(deadline: float) -> timedelta:
    """Return the time until ``deadline``, at least 1 ms."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


# --- carrying out a plan


class Traffic(NamedTuple):
    """Bytes of one rank in a reshard: over the wire, between its own shards, and of buffers."""

    sent: int
    received: int
    copied: int
    buffers: int


def reshard(
    made: ReshardPlan, rank: int, source: LocalShards, target: LocalShards, wire: Wire, timeout_s: float
) -> Traffic:
    """Fill ``target`` in place from ``source`` as ``made`` says. Every rank of the plan makes the same call.

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
            for move, place in _places(exchange.messages[rank, span.peer], buffer, made.source):
                place.copy_(_slice(move, source, move.source.box))
        arrived = wire.exchange(messages, f"exchange {number + 1} of {len(made.exchanges)}", deadline)
        for span, buffer in zip(messages.incoming, arrived, strict=True):
            for move, place in _places(exchange.messages[span.peer, rank], buffer, made.target):
                _slice(move, target, move.target.box).copy_(place)
        wire.release(messages, deadline)
    sent = sum(span.nbytes for messages in traffic for span in messages.outgoing)
    received = sum(span.nbytes for messages in traffic for span in messages.incoming)
    return Traffic(sent, received, copied, wire.held_bytes)


def one_box_each(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> dict[tuple[str, Box], Tensor]:
    """Return the shards of a rank that holds one box of each tensor, such as FSDP2's ``to_local()``."""
    return {(name, box): tensors[name] for name, box in layout.held(rank)}


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


def _places(message: Message, buffer: Tensor, layout: Layout) -> Iterator[tuple[Move, Tensor]]:
    """Yield each move with its part of a message, uint8[nbytes], as a tensor of the box's shape."""
    at = 0
    for move in message:
        dtype = getattr(torch, layout.tensors[move.tensor].dtype)
        yield move, buffer[at : at + move.nbytes].view(dtype).view(lengths(move.box))
        at += move.nbytes


# --- gathering for an engine that takes whole tensors


class ShardedWeights(NamedTuple):
    """This rank's shards of the weights, and the layout over all ranks, which is the same object every time."""

    layout: Layout
    held: LocalShards


class Gathering:
    """Gathers weights into buckets on ``device``, and keeps the plan while the layout stays the same.

    All ranks make the same calls.
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
            boxes: dict[str, list[Box]] = {name: [] for name in weights.layout.tensors}
            for bucket in divide(weights.layout.tensors, self._bucket_bytes):
                for part in bucket:
                    boxes[part.name].append(part.box)
            shards = {name: shards_of((GATHERER, box) for box in found) for name, found in boxes.items()}
            self._plan = plan(weights.layout, Layout(weights.layout.tensors, shards), self._bucket_bytes)
        mine = weights.layout.tensors if self._rank == GATHERER else {}
        empty = allocate_buckets(mine, self._bucket_bytes, self._device)
        places = {(name, box): place for bucket in empty for name, box, place in bucket.boxes}
        reshard(self._plan, self._rank, weights.held, places, self._wire, self._timeout_s)
        return [bucket.seal() for bucket in empty]
