"""Exchanges messages between ranks: point to point over gloo or NCCL, or through shared memory.

A rank that misses a peer records it in the group's store before it gives up. When ranks wait for one another in a
chain, each of them can therefore name the rank at its end.
"""

import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.errors import RanksLost
from rl_async.weight_sync.reshard.plan import RankMessages
from rl_async.weight_sync.transports.ipc import mapped, new_segment

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
