"""How a client puts and fetches payloads that shards keep: conversations as generators, without a socket.

    put:    shards? -> Store at each chosen shard -> Put of the headers, which name them -> answers
    fetch:  Fetch -> the rows themselves, or where they are -> Load at those shards -> rows

A conversation yields calls that may be made at once and is sent their outcomes, in the same order; what it returns is
the result. Both clients of the queue drive the same ones. No payload passes the queue's own process.
"""

import hashlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from rl_async import messages as m
from rl_async.errors import ProtocolError, QueueLost, RowsLost
from rl_async.messages import codec
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client.session import expect

SHARD_S = 10.0  # for a shard to answer, before another is tried
PAUSE_S = 1.0  # for the registry to change, before the same shards are tried again
_REMEMBERED = 1 << 16  # media that were sent
_NEVER = 1 << 62  # a revision that the registry does not reach
QUEUE = ""  # the url of the queue itself


class PeerCall(NamedTuple):
    """A request to a shard, or to the queue."""

    url: str
    request: m.Request[Any]
    payload: Sequence[Frame] = ()


Outcome = wire.ReplyMessage | QueueLost
T = TypeVar("T")
Conversation = Generator[list[PeerCall], Sequence[Outcome], T]


def ask(request: m.Request[T], replies: tuple[type, ...]) -> Conversation[T]:
    """One request to the queue; its reply, which must be one of these. Raises ProtocolError otherwise."""
    (outcome,) = yield [PeerCall(QUEUE, request)]
    return expect(_answered(outcome).reply, *replies)


def chosen(group: int, shards: Sequence[m.ShardRecord], replicas: int) -> list[m.ShardRecord]:
    """The shards that keep a group, fewer than ``replicas`` if there are no more.

    Rendezvous hashing (Thaler and Ravishankar 1998): each group ranks all shards by a hash of its own, so that groups
    spread evenly, and a shard that comes or goes moves no group between the others.
    """

    def weight(shard: m.ShardRecord) -> bytes:
        return hashlib.blake2b(f"{group} {shard.shard_id}".encode(), digest_size=8).digest()

    return sorted(shards, key=weight, reverse=True)[:replicas]


class Parcel(NamedTuple):
    """One sample to hand over: headers and rows, in the same order, and the bytes of media by hash."""

    headers: list[m.TrajectoryHeader]
    rows: Sequence[Frame]
    media: Mapping[str, Frame] = {}

    @property
    def group(self) -> int:
        """The id of the group that the sample belongs to."""
        return self.headers[0].group_id

    @property
    def nbytes(self) -> int:
        """Bytes of rows and media together."""
        return sum(map(len, self.rows)) + (sum(map(len, self.media.values())) if self.media else 0)

    @property
    def key(self) -> m.SampleKey:
        """The name of the sample at a payload shard."""
        first = self.headers[0]
        return first.group_id, first.sample, first.attempt


def parcel(rows: Sequence[m.Trajectory], media: Mapping[str, bytes] | None) -> Parcel:
    """What is sent of one sample. Raises ProtocolError if a row refers to media that are not given."""
    headers: list[m.TrajectoryHeader] = []
    encoded: list[Frame] = []
    media, missing = media or {}, set[str]()
    for row in rows:
        frame, header = codec.encode(row), row.header()
        header.payload_xxh3 = xxh3_64_intdigest(frame)
        if header.media:
            missing |= set(header.media) - media.keys()
        headers.append(header)
        encoded.append(frame)
    if missing:
        raise ProtocolError(f"a row refers to media that are not given to put: {', '.join(sorted(missing))}")
    return Parcel(headers, encoded, media)


class Sending:
    """What a client knows from earlier puts: whether payloads go to shards, and who has which media."""

    def __init__(self) -> None:
        self.sharded = False
        self._sent: OrderedDict[tuple[int, str, str], None] = OrderedDict()  # (group, hash, shard), oldest first

    def unsent(self, parcels: Sequence[Parcel], shard: str = "") -> dict[m.MediaKey, Frame]:
        """Media of these samples that were not sent to the shard (empty: to the queue) before."""
        media = {(each.group, sha256): data for each in parcels for sha256, data in each.media.items()}
        return {key: data for key, data in media.items() if (*key, shard) not in self._sent}

    def sent(self, media: Iterable[m.MediaKey], shard: str = "") -> None:
        """Remember that these media were sent to the shard (empty: to the queue)."""
        self._sent.update(dict.fromkeys((*key, shard) for key in media))
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)


def put(
    worker: str, parcels: Sequence[Parcel], sending: Sending, timeout_s: float
) -> Conversation[list[m.Refused | None]]:
    """Hand samples over; of each, None if it was taken, else why it is not wanted.

    Raises QueueLost if no shard could be found for ``timeout_s``.
    """
    if not sending.sharded:
        answers = yield from _put_here(worker, parcels, sending)
        if answers is not None:
            return answers
        sending.sharded = True
    return (yield from _put_to_shards(worker, parcels, sending, timeout_s))


def _put_here(worker: str, parcels: Sequence[Parcel], sending: Sending) -> Conversation[list[m.Refused | None] | None]:
    """To the queue itself; None if it wants no payload. Media go along when they are new, or missed after all."""
    answers: list[m.Refused | None] = [None] * len(parcels)
    left, media = list(range(len(parcels))), sending.unsent(parcels)
    while left:
        some = [parcels[index] for index in left]
        rows = [row for each in some for row in each.rows]
        headers, lengths = [each.headers for each in some], list(map(len, rows))
        request = m.Put(worker=worker, samples=headers, lengths=lengths, media=list(media))
        (outcome,) = yield [PeerCall(QUEUE, request, [*wire.join(rows), *media.values()])]
        reply = _answered(outcome).reply
        if isinstance(reply, m.Refused) and reply.code == wire.SHARDED:
            return None
        refused = _refusals(reply, len(some))
        sending.sent(media)
        again: list[int] = []
        for index, refusal in zip(left, refused, strict=True):
            answers[index] = refusal
            if refusal is not None and refusal.code == wire.MEDIA:
                again.append(index)
        every = {(parcels[i].group, sha256): data for i in again for sha256, data in parcels[i].media.items()}
        if again and every.keys() <= media.keys():
            return answers  # sent, and still not there
        left, media = again, every
    return answers


def _put_to_shards(
    worker: str, parcels: Sequence[Parcel], sending: Sending, timeout_s: float
) -> Conversation[list[m.Refused | None]]:
    deadline = time.monotonic() + timeout_s
    answers: list[m.Refused | None] = [None] * len(parcels)
    left = list(range(len(parcels)))
    avoid: set[str] = set()  # shards that did not answer
    registry = yield from _registry(-1, 0.0)
    while left:
        shards = [shard for shard in registry.shards if shard.shard_id not in avoid]
        stored, failed = yield from _store([(i, parcels[i]) for i in left], shards, registry.replicas, sending)
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
    (outcome,) = yield [PeerCall(QUEUE, m.ListShards(after=after, wait_s=wait_s))]
    return expect(_answered(outcome).reply, m.ShardList)


def _store(
    parcels: Sequence[tuple[int, Parcel]], shards: Sequence[m.ShardRecord], replicas: int, sending: Sending
) -> Conversation[tuple[list[tuple[int, Parcel]], set[str]]]:
    """Bring each sample to its shards, with media that these do not have. Returns those that all of them keep, with
    headers that say so, and the shards that did not answer."""
    places = {index: [s.shard_id for s in chosen(each.group, shards, replicas)] for index, each in parcels}
    loads: dict[str, list[Parcel]] = defaultdict(list)
    for index, each in parcels:
        for shard_id in places[index]:
            loads[shard_id].append(each)
    urls = {shard.shard_id: shard.url for shard in shards}
    media = {shard_id: sending.unsent(load, shard_id) for shard_id, load in loads.items()}
    outcomes = yield [_store_call(urls[shard_id], load, media[shard_id]) for shard_id, load in loads.items()]
    failed: set[str] = set()
    for shard_id, outcome in zip(loads, outcomes, strict=True):
        if isinstance(outcome, QueueLost):
            failed.add(shard_id)
        else:
            expect(outcome.reply, m.Done)
            sending.sent(media[shard_id], shard_id)
    stored: list[tuple[int, Parcel]] = []
    for index, each in parcels:
        ids = places[index]
        if ids and failed.isdisjoint(ids):
            new = {key: media[ids[0]].pop(key) for key in _media_keys(each) if key in media[ids[0]]}
            stored.append((index, _kept_by(each, ids, sum(map(len, new.values())))))
    return stored, failed


def _media_keys(parcel: Parcel) -> list[m.MediaKey]:
    return [(parcel.group, sha256) for sha256 in parcel.media]


def _kept_by(parcel: Parcel, shards: list[str], media_bytes: int) -> Parcel:
    """The sample with headers that name its shards; the media that went along for it count for its first row."""
    pairs = zip(parcel.headers, parcel.rows, strict=True)
    headers = [msgspec.structs.replace(h, shards=shards, nbytes=len(row)) for h, row in pairs]
    headers[0].nbytes += media_bytes
    return Parcel(headers, parcel.rows, parcel.media)


def _store_call(url: str, load: Sequence[Parcel], media: Mapping[m.MediaKey, Frame]) -> PeerCall:
    samples = [(parcel.key, parcel.rows) for parcel in load]
    samples += [((group, m.media_sample(sha256), 0), [data]) for (group, sha256), data in media.items()]
    lengths = [list(map(len, rows)) for _, rows in samples]
    request = m.StoreRows(samples=[key for key, _ in samples], lengths=lengths)
    return PeerCall(url, request, wire.join([row for _, rows in samples for row in rows]))


def _announce(worker: str, stored: Sequence[tuple[int, Parcel]]) -> Conversation[list[m.Refused | None]]:
    (outcome,) = yield [PeerCall(QUEUE, m.Put(worker=worker, samples=[parcel.headers for _, parcel in stored]))]
    return _refusals(_answered(outcome).reply, len(stored))


def _refusals(reply: m.Reply, count: int) -> list[m.Refused | None]:
    refused = expect(reply, m.Taken).refused
    if len(refused) != count:
        raise ProtocolError(f"{count} samples were put, {len(refused)} answered")
    return refused


def fetch(rows: Sequence[m.RowKey], timeout_s: float, lineage: int | None) -> Conversation[list[Frame]]:
    """The payloads of these rows, wherever they are.

    Raises RowsLost if some went with their shard, QueueLost if a shard that should have them could not be reached for
    ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    found: dict[m.RowKey, Frame] = {}
    avoid: set[str] = set()
    while len(found) < len(rows):
        left = [key for key in rows if key not in found]
        (outcome,) = yield [PeerCall(QUEUE, m.Fetch(rows=left, lineage=lineage))]
        message = _answered(outcome)
        if isinstance(message.reply, m.FetchedRows):
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


def fetch_media(rows: Sequence[m.Trajectory], timeout_s: float, lineage: int | None) -> Conversation[dict[str, bytes]]:
    """The bytes of all media that these rows refer to, by hash. Raises as ``fetch`` does, and ProtocolError for bytes
    that have another hash."""
    wanted = {medium.sha256: (row.group_id, m.media_sample(medium.sha256), 0) for row in rows for medium in row.media}
    frames = yield from fetch(list(wanted.values()), timeout_s, lineage)
    media = {sha256: bytes(frame) for sha256, frame in zip(wanted, frames, strict=True)}
    for sha256, data in media.items():
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ProtocolError(f"the medium {sha256} came with other bytes")
    return media


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
    calls = [PeerCall(where.urls[shard], m.LoadRows(rows=[key for _, key in load])) for shard, load in loads.items()]
    outcomes = yield calls
    for (shard, load), outcome in zip(loads.items(), outcomes, strict=True):
        if isinstance(outcome, QueueLost) or isinstance(outcome.reply, m.Refused):
            failed.add(shard)  # dead, or alive again with nothing
        else:
            found.update(zip([key for key, _ in load], split(outcome, len(load)), strict=True))
    return failed, stuck


def split(message: wire.ReplyMessage, asked: int) -> list[Frame]:
    """The ``asked`` rows of an answer with payload, as views of the received frames. Raises ProtocolError."""
    lengths = expect(message.reply, m.FetchedRows).lengths
    if len(lengths) != asked:
        raise ProtocolError(f"{asked} rows were asked for, {len(lengths)} came")
    return list(wire.split(message.payload, lengths))


def _answered(outcome: Outcome) -> wire.ReplyMessage:
    """The queue's own answer. Raises QueueLost if there was none: without the queue no conversation can go on."""
    if isinstance(outcome, QueueLost):
        raise outcome
    return outcome
