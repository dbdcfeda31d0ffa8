"""Plans a reshard: which slices go from which rank to which, to bring weights from one layout into another. Pure.

Every byte that a target rank needs comes from exactly one source: its own rank if that holds it, and otherwise the
holder that has least to send so far. The slices that move are dealt to exchanges in each of which a rank sends and
receives at most ``bucket_bytes`` together; this bounds the memory a rank needs beside the two layouts. The plan is a
function of its arguments alone, so every rank computes the same one for itself.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import Box, Layout, Shard, common, lengths, volume, without

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
