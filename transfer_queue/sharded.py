"""How a client puts and fetches payloads that shards keep: conversations as generators, without a socket.

    put:    shards? -> Store at each chosen shard -> Put of the headers, which name them -> answers
    fetch:  Fetch -> the rows themselves, or where they are -> Load at those shards -> rows

A conversation yields calls that may be made at once and is sent their outcomes, in the same order; what it returns is
the result. Both clients of the queue drive the same ones. No payload passes the queue's own process.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from rl_async import messages as m
from rl_async.codec import Frame
from rl_async.errors import ProtocolError, QueueLost, RowsLost
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.session import expect

SHARD_S = 10.0  # for a shard to answer, before another is tried
PAUSE_S = 1.0  # for the registry to change, before the same shards are tried again
_NEVER = 1 << 62  # a revision that the registry does not reach
QUEUE = ""  # the url of the queue itself


class Call(NamedTuple):
    """A request to a shard, or to the queue."""

    url: str
    request: m.Request
    payload: Sequence[Frame] = ()


Outcome = wire.ReplyMessage | QueueLost
T = TypeVar("T")
Conversation = Generator[list[Call], Sequence[Outcome], T]


def chosen(group: int, shards: Sequence[m.ShardRecord], replicas: int) -> list[m.ShardRecord]:
    """The shards that keep a group, fewer than ``replicas`` if there are no more.

    Rendezvous hashing (Thaler and Ravishankar 1998): each group ranks all shards by a hash of its own, so that groups
    spread evenly, and a shard that comes or goes moves no group between the others.
    """

    def weight(shard: m.ShardRecord) -> bytes:
        return hashlib.blake2b(f"{group} {shard.shard_id}".encode(), digest_size=8).digest()

    return sorted(shards, key=weight, reverse=True)[:replicas]


class Parcel(NamedTuple):
    """One sample on its way: headers and rows, in the same order."""

    headers: list[m.TrajectoryHeader]
    rows: list[Frame]

    @property
    def key(self) -> m.SampleKey:
        """Names it at a shard."""
        first = self.headers[0]
        return first.group_id, first.sample, first.attempt


def put(worker: str, parcels: Sequence[Parcel], timeout_s: float) -> Conversation[list[m.Refused | None]]:
    """Hand samples over; of each, None if it was taken, else why it is not wanted.

    Raises QueueLost if no shard could be found for ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    answers: list[m.Refused | None] = [None] * len(parcels)
    left = list(range(len(parcels)))
    avoid: set[str] = set()  # shards that did not answer
    registry = yield from _registry(-1, 0.0)
    while left:
        shards = [shard for shard in registry.shards if shard.shard_id not in avoid]
        stored, failed = yield from _store([(i, parcels[i]) for i in left], shards, registry.replicas)
        avoid |= failed
        if stored:
            replies = yield from _announce(worker, stored)
            for (index, _), refused in zip(stored, replies, strict=True):
                if refused is None or refused.code != wire.SHARD_LOST:
                    answers[index] = refused
                    left.remove(index)
        if left:
            if time.monotonic() >= deadline:
                raise QueueLost(f"no payload shard took {len(left)} samples for {timeout_s:.0f} s")
            if not failed:  # else others are tried at once
                registry = yield from _registry(registry.revision, PAUSE_S)
                avoid.clear()
    return answers


def _registry(after: int, wait_s: float) -> Conversation[m.ShardList]:
    (outcome,) = yield [Call(QUEUE, m.Shards(after=after, wait_s=wait_s))]
    return expect(_answered(outcome).reply, m.ShardList)


def _store(
    parcels: Sequence[tuple[int, Parcel]], shards: Sequence[m.ShardRecord], replicas: int
) -> Conversation[tuple[list[tuple[int, Parcel]], set[str]]]:
    """Bring each sample to its shards. Returns those that all of them keep, with headers that say so, and the shards
    that did not answer."""
    places = {index: chosen(parcel.headers[0].group_id, shards, replicas) for index, parcel in parcels}
    loads: dict[str, list[Parcel]] = defaultdict(list)
    for index, parcel in parcels:
        for shard in places[index]:
            loads[shard.shard_id].append(parcel)
    urls = {shard.shard_id: shard.url for shard in shards}
    outcomes = yield [_store_call(urls[shard_id], load) for shard_id, load in loads.items()]
    failed = {shard_id for shard_id, outcome in zip(loads, outcomes, strict=True) if isinstance(outcome, QueueLost)}
    for outcome in outcomes:
        if not isinstance(outcome, QueueLost):
            expect(outcome.reply, m.Done)
    stored: list[tuple[int, Parcel]] = []
    for index, parcel in parcels:
        ids = [shard.shard_id for shard in places[index]]
        if ids and failed.isdisjoint(ids):
            pairs = zip(parcel.headers, parcel.rows, strict=True)
            headers = [msgspec.structs.replace(h, shards=ids, nbytes=memoryview(row).nbytes) for h, row in pairs]
            stored.append((index, Parcel(headers, parcel.rows)))
    return stored, failed


def _store_call(url: str, load: Sequence[Parcel]) -> Call:
    lengths = [[memoryview(row).nbytes for row in parcel.rows] for parcel in load]
    request = m.Store(samples=[parcel.key for parcel in load], lengths=lengths)
    return Call(url, request, wire.join([row for parcel in load for row in parcel.rows]))


def _announce(worker: str, stored: Sequence[tuple[int, Parcel]]) -> Conversation[list[m.Refused | None]]:
    (outcome,) = yield [Call(QUEUE, m.Put(worker=worker, samples=[parcel.headers for _, parcel in stored]))]
    refused = expect(_answered(outcome).reply, m.Taken).refused
    if len(refused) != len(stored):
        raise ProtocolError(f"{len(stored)} samples were put, {len(refused)} answered")
    return refused


def fetch(rows: Sequence[m.RowKey], timeout_s: float) -> Conversation[list[Frame]]:
    """The payloads of these rows, wherever they are.

    Raises RowsLost if some went with their shard, QueueLost if a shard that should have them could not be reached for
    ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[m.RowKey, Frame] = {}
    avoid: set[str] = set()
    while len(found) < len(rows):
        left = [key for key in rows if key not in found]
        (outcome,) = yield [Call(QUEUE, m.Fetch(rows=left))]
        message = _answered(outcome)
        if isinstance(message.reply, m.Rows):
            return split(message, len(rows))
        if isinstance(message.reply, m.Refused) and message.reply.code == wire.ROWS_LOST:
            raise RowsLost(message.reply.reason)
        failed, stuck = yield from _load(left, expect(message.reply, m.Elsewhere), avoid, found)
        avoid |= failed
        if stuck:  # every copy was tried: the queue will notice, or a shard comes back
            if time.monotonic() >= deadline:
                raise QueueLost(f"the payload shards {', '.join(sorted(avoid))} did not answer for {timeout_s:.0f} s")
            avoid.clear()
            yield from _registry(_NEVER, PAUSE_S)
    return [found[key] for key in rows]


def _load(
    rows: Sequence[m.RowKey], where: m.Elsewhere, avoid: set[str], found: dict[m.RowKey, Frame]
) -> Conversation[tuple[set[str], bool]]:
    """Load what can be loaded into ``found``. Returns the shards that failed, and whether for a row none was left."""
    if len(where.attempts) != len(rows) or len(where.shards) != len(rows):
        raise ProtocolError(f"{len(rows)} rows were asked for, {len(where.attempts)} places came")
    loads: dict[str, list[tuple[m.RowKey, m.StoredKey]]] = defaultdict(list)
    failed, stuck = set[str](), False
    for (group, sample, segment), attempt, shards in zip(rows, where.attempts, where.shards, strict=True):
        shard = next((each for each in shards if each not in avoid), "")
        if shard:
            loads[shard].append(((group, sample, segment), (group, sample, attempt, segment)))
        else:
            stuck = True
    calls = [Call(where.urls[shard], m.Load(rows=[key for _, key in load])) for shard, load in loads.items()]
    outcomes = yield calls
    for (shard, load), outcome in zip(loads.items(), outcomes, strict=True):
        if isinstance(outcome, QueueLost) or isinstance(outcome.reply, m.Refused):
            failed.add(shard)  # dead, or alive again with nothing
        else:
            found.update(zip([key for key, _ in load], split(outcome, len(load)), strict=True))
    return failed, stuck


def split(message: wire.ReplyMessage, asked: int) -> list[Frame]:
    """The ``asked`` rows of an answer with payload, as views of the received frames. Raises ProtocolError."""
    lengths = expect(message.reply, m.Rows).lengths
    if len(lengths) != asked:
        raise ProtocolError(f"{asked} rows were asked for, {len(lengths)} came")
    return list(wire.split(message.payload, lengths))


def _answered(outcome: Outcome) -> wire.ReplyMessage:
    """The queue's own answer; its loss ends the conversation."""
    if isinstance(outcome, QueueLost):
        raise outcome
    return outcome
