"""Which slices go from where to where, when weights in one layout are wanted in another. Pure; no torch.

Every byte that a target rank wants comes from exactly one source: its own rank where that has it, which moves nothing,
else the holder that has least to send so far. The slices that move are dealt to buckets in which no rank has more than
``bucket_bytes`` to send and receive together, so that bounds what a rank needs beside the two layouts themselves. The
plan is a function of its arguments alone, so that every rank works it out for itself.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import Box, Layout, Shard, common, lengths, volume, without

ALIGNMENT = 16  # bytes: a message begins on such a boundary of its rank's buffer
MOVES_PER_BUCKET = 4  # at least so many fit, so that what is left of a full bucket is less than a quarter


class Move(NamedTuple):
    """``box`` of a tensor goes from the shard ``source`` into the shard ``target``; both contain it."""

    tensor: str
    source: Shard
    target: Shard
    box: Box
    nbytes: int


Message = tuple[Move, ...]  # from one rank to another, packed in this order without gaps


class Exchange(NamedTuple):
    """What travels at the same time. Messages by (source rank, target rank)."""

    messages: Mapping[tuple[int, int], Message]

    def nbytes(self, source: int, target: int) -> int:
        """Bytes of one message."""
        return sum(move.nbytes for move in self.messages[source, target])


@dataclass(frozen=True)
class ReshardPlan:
    """``local`` moves stay on their rank and need no bucket."""

    source: Layout
    target: Layout
    exchanges: tuple[Exchange, ...]
    local: tuple[Move, ...]

    @cached_property
    def figures(self) -> "Figures":
        """What the plan costs, beside the best and the worst that could be."""
        return _figures(self)


class Figures(NamedTuple):
    """In bytes, of all ranks unless it says otherwise."""

    moved: int
    local: int  # copied without leaving their rank
    minimal: int  # wanted by a rank that does not hold them: what any transfer has to move
    full_gather: int  # if every target rank got every tensor whole, less what it holds
    sent_by_busiest: int  # by the rank that sends most
    peak_extra: int  # on the rank and in the bucket where it is largest


class MessageSpan(NamedTuple):
    """One message of a bucket; ``start`` is where it begins among all that its sender sends, in bytes."""

    peer: int
    start: int
    nbytes: int

    @property
    def room(self) -> int:
        """Bytes that it takes in a buffer."""
        return _aligned(self.nbytes)


class RankMessages(NamedTuple):
    """All messages of one rank in a bucket."""

    outgoing: tuple[MessageSpan, ...]
    incoming: tuple[MessageSpan, ...]

    @property
    def outgoing_bytes(self) -> int:
        """Of a buffer for all outgoing messages."""
        return sum(span.room for span in self.outgoing)

    @property
    def incoming_bytes(self) -> int:
        """Of a buffer for all incoming messages."""
        return sum(span.room for span in self.incoming)


def messages_of(exchange: Exchange, rank: int) -> RankMessages:
    """A rank's messages of a bucket, and where each lies among those of its sender."""
    outgoing, incoming = [], []
    ends: dict[int, int] = defaultdict(int)
    for sender, receiver in sorted(exchange.messages):
        span = MessageSpan(receiver if sender == rank else sender, ends[sender], exchange.nbytes(sender, receiver))
        ends[sender] += span.room
        if sender == rank:
            outgoing.append(span)
        elif receiver == rank:
            incoming.append(span)
    return RankMessages(tuple(outgoing), tuple(incoming))


def plan(source: Layout, target: Layout, bucket_bytes: int) -> ReshardPlan:
    """The slices that make ``target`` out of ``source``.

    Raises WeightSyncError if the two are not of the same tensors or nobody holds something that is wanted, ValueError
    for a bucket that is too small.
    """
    if bucket_bytes < ALIGNMENT * MOVES_PER_BUCKET:
        raise ValueError(f"a bucket of {bucket_bytes} bytes; the least is {ALIGNMENT * MOVES_PER_BUCKET}")
    local: list[Move] = []
    schedule = _Schedule(bucket_bytes)
    sent: dict[int, int] = defaultdict(int)
    for name in target.tensors:
        if source.tensors.get(name) != target.tensors[name]:
            raise WeightSyncError(f"{name}: {target.tensors[name]} is wanted, {source.tensors.get(name)} is there")
        for move in _moves(name, source, target, sent):
            if move.source.rank == move.target.rank:
                local.append(move)
                continue
            sent[move.source.rank] += move.nbytes
            for part in _pieces(move, bucket_bytes // MOVES_PER_BUCKET // ALIGNMENT * ALIGNMENT):
                schedule.add(part)
    return ReshardPlan(source, target, schedule.exchanges(), tuple(local))


def _moves(name: str, source: Layout, target: Layout, sent: Mapping[int, int]) -> Iterator[Move]:
    """Each wanted box, carved out of the boxes that there are; the target rank's own come first."""
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in source.shards[name]:
        holders[box].append(rank)
    for wanted in target.shards[name]:
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
                yield Move(name, Shard(rank, box), wanted, found, target.nbytes(name, found))
            rest = left
        if rest:
            raise WeightSyncError(f"{name}: rank {wanted.rank} wants {rest[0]}, which no source holds")


def _pieces(move: Move, most: int) -> Iterator[Move]:
    """A move in parts of at most ``most`` bytes: rows as long as a row fits, else parts of rows."""
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
    """Puts each move into the first bucket that has room for it at both ends."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._used: dict[tuple[int, int], int] = defaultdict(int)  # by bucket and rank
        self._first: dict[int, int] = defaultdict(int)  # by rank: buckets before this one are full
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
        """Wide elements first in a message, so that none needs padding before it."""
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
    """Bytes that are wanted where they are. A rank holds nothing twice, so that pairs of boxes count each once."""
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
