"""Resharding through shared memory, and the cost of a plan, for tests and benchmarks."""

from collections import defaultdict
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.weight_sync.layout import Box, Layout, common, volume
from rl_async.weight_sync.reshard import LostRankFinder, RankMessages, ReshardPlan, messages_of, seconds_left
from rl_async.weight_sync.transports import mapped, new_segment


class Figures(NamedTuple):
    """Cost of a plan in bytes, summed over all ranks unless noted.

    ``local`` bytes are copied without leaving their rank. ``minimal`` are needed by a rank that does not hold them, so
    any transfer moves them. ``full_gather`` is the traffic if every target rank received every tensor whole, minus its
    own part. ``sent_by_busiest`` is of the rank that sends most, ``peak_extra`` the largest buffers of a rank in an
    exchange.
    """

    moved: int
    local: int
    minimal: int
    full_gather: int
    sent_by_busiest: int
    peak_extra: int


def figures(made: ReshardPlan) -> Figures:
    """Return the cost of a plan, with the lowest and the highest possible."""
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
        minimal=wanted - on_own_rank(made.source, target),
        full_gather=full_gather_bytes(made.source, target),
        sent_by_busiest=max(sent.values(), default=0),
        peak_extra=peak,
    )


def on_own_rank(source: Layout, target: Layout) -> int:
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


def full_gather_bytes(source: Layout, target: Layout) -> int:
    """Count the bytes that arrive if every target rank receives every tensor whole, minus those that it holds."""
    held = sum(
        source.nbytes(name, shard.box)
        for name, shards in source.shards.items()
        for shard in shards
        if shard.rank in target.ranks
    )
    total = sum(volume(tuple((0, n) for n in spec.shape)) * spec.itemsize for spec in target.tensors.values())
    return total * len(target.ranks) - held


class SharedMemoryWire:
    """Exchanges messages on one host: each rank packs into its own segment, and the others copy from it.

    ``store`` is as for ``PointToPoint`` and carries a few bytes per message. A dead peer is noticed at the deadline
    only.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._lost = LostRankFinder(store, rank)
        self._segment: SharedMemory | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._peers: dict[int, Tensor] = {}
        self._round = 0
        # The name of the exchange in progress.
        self._what = ""

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
            self._store.wait([key], seconds_left(deadline))
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise self._lost.error(peer, self._what, "no answer within the deadline") from error

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._round, *parts)))
