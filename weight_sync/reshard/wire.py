"""How a bucket of slices gets from rank to rank: point to point over gloo or NCCL, or through shared memory.

Whoever misses a peer says so in the group's store before it gives up, so that of a chain of ranks that wait for one
another each can name the one at its end.
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

GRACE_S = 1.0  # others notice a failure at their own deadline, which may be a little later than ours


class Wire(Protocol):
    """One rank's end. For each bucket in turn ``send_buffers``, ``exchange``, ``release``.

    Methods raise WeightSyncError; if a peer is gone, RanksLost.

    ``deadline`` is on the clock of ``time.monotonic``.
    """

    @property
    def held_bytes(self) -> int:
        """Of buffers on this rank."""
        ...

    def open(self, outgoing: int, both: int) -> None:
        """Make room for so many bytes to send, and to send and receive, of the largest bucket."""
        ...

    def send_buffers(self, messages: RankMessages) -> list[Tensor]:
        """Where to pack each outgoing message, uint8[nbytes]."""
        ...

    def exchange(self, messages: RankMessages, what: str, deadline: float) -> list[Tensor]:
        """Send what was packed, and return what came, uint8[nbytes] each, valid until ``release``."""
        ...

    def release(self, messages: RankMessages, deadline: float) -> None:
        """What came was copied; returns when what went may be overwritten."""
        ...

    def close(self) -> None:
        """Give up what this end holds; may be called twice."""
        ...


class PointToPoint:
    """Messages of ``torch.distributed`` in ``group``, whose ranks are those of the plan: gloo, or NCCL with ``device``.

    The sum of what a rank sends and receives in a bucket is in one buffer. ``store`` is one that all ranks share, with
    keys that belong to this group alone. NCCL wants all ranks in the first exchange of a group, so let them meet in a
    barrier before.
    """

    def __init__(self, store: dist.Store, group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
        self._group, self._device = group, device
        self._blame = _Blame(store, dist.get_rank(group))
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
        at, inboxes = messages.outgoing_bytes, []
        for span in messages.incoming:
            inboxes.append(self._arena[at : at + span.nbytes])
            at += span.room
        receives = [
            dist.P2POp(dist.irecv, room, group=self._group, group_peer=span.peer)
            for span, room in zip(messages.incoming, inboxes, strict=True)
        ]
        sends = [
            dist.P2POp(dist.isend, room, group=self._group, group_peer=span.peer)
            for span, room in zip(messages.outgoing, self.send_buffers(messages), strict=True)
        ]
        peers = [span.peer for span in (*messages.incoming, *messages.outgoing)]
        self._wait([*receives, *sends], peers, what, deadline)
        return inboxes

    def release(self, messages: RankMessages, deadline: float) -> None:
        """The buffer is this rank's own, and both ends are through with it."""

    def close(self) -> None:
        """The group is its owner's to end."""

    def _wait(self, operations: list[dist.P2POp], peers: list[int], what: str, deadline: float) -> None:
        peer = peers[0]
        try:
            works = dist.batch_isend_irecv(operations)
            for number, work in enumerate(works):  # of gloo one each, of NCCL one for all
                peer = peers[number]
                work.wait(_left(deadline))
        except RuntimeError as error:
            raise self._blame.error(peer, what, str(error)) from error


class SharedMemoryWire:
    """For ranks on one host: each packs into a segment of its own, out of which the others copy. Nothing is sent.

    ``store`` is as that of ``PointToPoint``, and carries a few bytes per message. A peer that dies is missed at the
    deadline, not before.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._blame = _Blame(store, rank)
        self._segment: SharedMemory | None = None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._peers: dict[int, Tensor] = {}
        self._round = 0
        self._what = ""  # of the exchange under way

    @property
    def held_bytes(self) -> int:
        return self._room.numel()

    def open(self, outgoing: int, both: int) -> None:
        self.close()
        self._round += 1
        if outgoing == 0:
            return
        self._segment = new_segment(outgoing)
        self._room = mapped(self._segment.name, outgoing, shared=True)
        self._store.set(self._key("segment", self._rank), f"{self._segment.name} {outgoing}")

    def send_buffers(self, messages: RankMessages) -> list[Tensor]:
        return [self._room[span.start : span.start + span.nbytes] for span in messages.outgoing]

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
        """Unlink this rank's segment; may be called twice."""
        self._peers.clear()
        self._room = torch.empty(0, dtype=torch.uint8)
        if self._segment is not None:
            self._segment.close()
            self._segment.unlink()
            self._segment = None

    def _peer(self, peer: int, deadline: float) -> Tensor:
        if peer not in self._peers:
            name, size = self._get(self._key("segment", peer), peer, deadline).decode().split()
            self._peers[peer] = mapped(name, int(size), shared=True)
        return self._peers[peer]

    def _take(self, key: str, peer: int, deadline: float) -> None:
        """Wait for a key that is for us alone, and delete it."""
        self._get(key, peer, deadline)
        self._store.delete_key(key)

    def _get(self, key: str, peer: int, deadline: float) -> bytes:
        try:
            self._store.wait([key], _left(deadline))
            return bytes(self._store.get(key))
        except RuntimeError as error:
            raise self._blame.error(peer, self._what, "nothing in time") from error

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._round, *parts)))


class _Blame:
    """Finds the rank that failed: who is missed, and misses nobody itself."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank

    def error(self, peer: int, what: str, reason: str) -> RanksLost:
        """This rank missed ``peer``."""
        missed, chain = peer, [self._rank]
        with suppress(RuntimeError):  # nobody answers for this one, or the store went with its rank
            self._store.set(f"missed/{self._rank}", str(peer))
            while missed not in chain:
                chain.append(missed)
                self._store.wait([f"missed/{missed}"], timedelta(seconds=GRACE_S))
                missed = int(self._store.get(f"missed/{missed}"))
        through = "" if missed == peer else f", for which rank {peer} waits,"
        return RanksLost(f"reshard, {what}: rank {self._rank} lost rank {missed}{through}: {reason}")


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
