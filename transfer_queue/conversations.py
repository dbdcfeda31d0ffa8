"""What both clients of the queue share, without I/O: sessions, retries, and conversations as generators.

    put:    shards? -> Store at each chosen shard -> Put of the headers, which name them -> answers
    fetch:  Fetch -> the rows themselves, or where they are -> Load at those shards -> rows

A session holds a client's identity and hello, and explains a failed handshake. A conversation yields calls that may be
made at once, is sent their outcomes in the same order, and returns the result. No payload passes the queue's own
process if it has shards. Fetched rows are compared with the hashes that their producers announced.
"""

import contextlib
import hashlib
import itertools
import os
import re
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest
from zmq.utils.monitor import parse_monitor_message

from rl_async import codec
from rl_async import messages as m
from rl_async.codec import Frame
from rl_async.errors import (
    AccessDenied,
    ProtocolError,
    QueueLost,
    QueueReplaced,
    RowsChanged,
    RowsLost,
    TrainerReplaced,
    UserError,
)
from rl_async.messages import Trajectory, TrajectoryHeader
from rl_async.process.allocation import no_collection
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.keys import ClientKeys, check_private, folder_of, is_file, use_keys

_numbers = itertools.count()

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_REFUSED = "it refused the handshake; is it closed to this key?"
_UNKNOWN = "the handshake did not complete; is it closed to clients without a key, or to this one?"
_CLOSED = "it closed the connection; is it closed to this key, or a frame larger than queue.limits.frame_bytes?"


class HandshakeWatch:
    """The newest failure to connect, over all sockets that were watched."""

    def __init__(self) -> None:
        self._events: zmq.Socket[bytes] | None = None
        self._watched: Any = None
        self._why = ""

    def attach(self, socket: "zmq.Socket[Any]") -> None:
        """Watch a socket from now on, before it connects."""
        self.detach()
        self._why = ""
        address = f"inproc://handshakes-{next(_numbers)}"
        socket.monitor(address, _EVENTS)
        self._watched = socket
        self._events = zmq.Context.shadow(socket.context.underlying).socket(zmq.PAIR)
        self._events.set(zmq.LINGER, 0)
        self._events.connect(address)

    def detach(self) -> None:
        """Watch no longer; what was seen stays known until another is watched. Call it before the socket closes."""
        if self._events is not None:
            self._read_events()
            with contextlib.suppress(zmq.ZMQError):  # a socket that is closed already has ended it
                self._watched.disable_monitor()
            self._events.close(0)
            self._events = None

    def why(self) -> str:
        """Why the connection does not work; empty if no reason is known."""
        if self._events is not None:
            self._read_events()
        return self._why

    def _read_events(self) -> None:
        assert self._events is not None
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            self._why = _reason(event["event"], self._why)


def _reason(event: int, before: str) -> str:
    """The reason after an event, given the reason known before it."""
    match event:
        case zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return before if before == _CLOSED else ""  # what closed it once will do so again
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return _REFUSED
        case zmq.EVENT_DISCONNECTED:
            return before or _CLOSED
    return before or _UNKNOWN


PATIENCE_S = 3.0  # without an answer before a client reconnects

R = TypeVar("R")

FIRST_PAUSE_S = 0.1  # before a request that was refused as too many is sent again; doubled each time, up to
LONGEST_PAUSE_S = 2.0


class Session:
    """Identity, request ids and hello of one client, and why its connection fails if it does."""

    def __init__(self, address: str, role: str, name: str, keys: ClientKeys | None = None) -> None:
        if not re.fullmatch(r"tcp://[^\s/]+:\d+|(ipc|inproc)://\S+", address):
            raise UserError(f"{address} is no address of a transfer queue; write tcp://HOST:PORT")
        self.address = address
        self._keys = keys
        self._watch = HandshakeWatch()
        self._full = ""  # why the queue has no place for this client, if so
        self.ids = wire.RequestIds()
        # Another process under the same name must not keep this one's leases alive.
        self.worker = f"{name}-{os.getpid()}-{secrets.token_hex(3)}"
        shown = keys.secret.decode() if keys is not None and is_file(address) else ""
        self._hello = m.Hello(schema=m.SCHEMA, role=role, name=name, key=shown)
        self._run_id: str | None = None

    def check_place(self) -> None:
        """Raise UserError if a stranger may listen who would be shown this client's key, QueueLost if nobody can."""
        if self._keys is not None and is_file(self.address):
            check_private(folder_of(self.address))

    def prepare(self, socket: "zmq.Socket[Any]") -> None:
        """Set the options of a new socket, before it connects."""
        _set_options(socket)
        if self._keys is not None and not is_file(self.address):
            use_keys(socket, self._keys)
        self._watch.attach(socket)

    def abandon(self) -> None:
        """Stop watching the socket; call it before the socket is closed."""
        self._watch.detach()

    def hello(self) -> tuple[bytes, list[Frame]]:
        """The first message of a connection, with its id."""
        request_id = self.ids.take()
        return request_id, wire.encode(request_id, self._hello)

    def welcome(self, reply: m.Reply) -> None:
        """Check the answer to hello; remember for ``lost`` that the queue has no place for another client now.

        Raises ProtocolError if it is refused for good (AccessDenied: for want of a key), QueueReplaced if this is
        another queue.
        """
        if isinstance(reply, m.Refused) and reply.code == wire.DENIED:
            raise AccessDenied(f"the transfer queue at {self.address} refused the connection: {reply.reason}")
        self._full = reply.reason if isinstance(reply, m.Refused) and reply.code == wire.BUSY else ""
        if self._full:
            return
        if not isinstance(reply, m.Welcome):
            raise ProtocolError(f"the transfer queue at {self.address} refused the connection: {reply}")
        if self._run_id is not None and self._run_id != reply.run_id:
            raise QueueReplaced(f"the transfer queue at {self.address} was restarted and has lost its state")
        self._run_id = reply.run_id

    def lost(self, request: m.Request[Any], seconds: float) -> QueueLost:
        """The error for a request that was not answered."""
        why = self._full or self._watch.why()
        return QueueLost(
            f"the transfer queue at {self.address} did not answer {type(request).__name__} for {seconds:.0f} s"
            + (f": {why}" if why else "")
        )


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> None:
    """Hand a message to the socket, or drop it if the queue has refused the connection: libzmq then has no other.

    It does not wait, since nothing would end the wait; the request is sent again on the next connection.
    """
    with contextlib.suppress(zmq.Again):
        wire.send(socket, frames)


def wait_of(request: m.Request[Any]) -> float:
    """Seconds for which the queue may hold back the answer on purpose."""
    return request.wait_s if isinstance(request, m.LongPoll) else 0.0


def refusal(reply: m.Reply) -> str:
    """The code of a refusal; empty for other replies."""
    return reply.code if isinstance(reply, m.Refused) else ""


class Retry(NamedTuple):
    """Send the request again after ``pause_s`` seconds, on a new connection if ``reconnect``."""

    pause_s: float
    reconnect: bool


class RequestExchange:
    """One request until it is answered: how long to wait, and when to back off, to reconnect and to give up.

    Every request may be sent twice: the queue answers a repetition as it answered the first.
    """

    def __init__(
        self, session: Session, request: m.Request[Any], payload: Sequence[Frame], timeout_s: float, patience_s: float
    ) -> None:
        wait_s = wait_of(request)
        self._session, self._request = session, request
        self._began = time.monotonic()
        self._deadline = self._began + wait_s + timeout_s
        self._patience_s, self._pause_s = wait_s + patience_s, FIRST_PAUSE_S
        self.request_id = session.ids.take()
        self.frames = wire.encode(self.request_id, request, payload)

    def patience_s(self) -> float:
        """Seconds to wait for the reply after sending."""
        return max(0.0, min(self._patience_s, self._deadline - time.monotonic()))

    def after(self, answer: wire.ReplyMessage | None) -> wire.ReplyMessage | Retry:
        """The final answer, or how to try again after ``answer`` (None: there was no reply in time).

        Raises QueueLost past the deadline, and ProtocolError if the queue did not understand the request.
        """
        code = "" if answer is None else refusal(answer.reply)
        if answer is not None and code not in (wire.HELLO, wire.BUSY):
            return wire.checked(answer)
        now = time.monotonic()
        if now >= self._deadline:
            raise self._session.lost(self._request, now - self._began)
        if code != wire.BUSY:  # the queue is silent, or does not know this connection
            self._patience_s *= 2
        if answer is None:
            return Retry(0.0, reconnect=True)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return Retry(min(pause_s, self._deadline - now), reconnect=code != wire.BUSY)


def expect(reply: m.Reply, *kinds: type[R]) -> R:
    """The reply, if it is of one of these kinds. Raises ProtocolError with the queue's reason otherwise.

    Raises TrainerReplaced, whatever is expected, if the queue serves a newer trainer now.
    """
    if isinstance(reply, m.Refused) and reply.code == wire.REPLACED:
        raise TrainerReplaced(f"the transfer queue refused: {reply.reason}")
    if isinstance(reply, kinds):
        return reply
    if isinstance(reply, m.Refused):
        raise ProtocolError(f"the transfer queue refused: {reply.reason} ({reply.code})")
    raise ProtocolError(f"the transfer queue answered {reply}")


def _set_options(socket: "zmq.Socket[Any]") -> None:
    """Set the options of a client's socket, before it connects."""
    socket.set(zmq.LINGER, 0)  # what is unanswered is sent again on a new connection
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    socket.set(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)


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


_decode_row = codec.decoder(Trajectory)


def decode_rows(frames: Sequence[Frame]) -> list[Trajectory]:
    """The trajectories of these frames, whose arrays are views of them. Raises ProtocolError if one is none."""
    with no_collection():
        return list(map(_decode_row, frames))


def announced_rows(headers: Sequence[TrajectoryHeader], frames: Sequence[Frame]) -> list[Trajectory]:
    """Decode the rows of these headers, after a comparison of their bytes with the hashes there.

    Raises RowsLost if a row is of a later attempt: the announced one was lost since, and the header with it. Raises
    RowsChanged, naming every row that differs and who kept it.
    """
    changed: dict[tuple[int, int, int], str] = {}
    texts: list[str] = []
    for header, frame in zip(headers, frames, strict=True):
        if xxh3_64_intdigest(frame) != header.payload_xxh3:
            name = f"group {header.group_id} sample {header.sample}"
            name += f" segment {header.segment}" * bool(header.segment)
            changed[header.key] = _tokens_hash(header, frame, name)
            by = f"payload shard {' or '.join(header.shards)}" if header.shards else "the queue"
            texts.append(f"{name}, from {by}")
    if changed:
        raise RowsChanged(
            f"rows came with other bytes than were put: {'; '.join(texts)}. Continue with --resume; if it happens "
            "again, check that host's memory and disk, and move RUN/queue.sqlite* and queue-payloads/ away",
            changed,
        )
    return decode_rows(frames)


def _tokens_hash(header: TrajectoryHeader, frame: Frame, name: str) -> str:
    """The hash of the tokens of a row that is not the announced one, or of its bytes if it is none at all."""
    try:
        row = _decode_row(frame)
    except ProtocolError:
        return xxh3_128_hexdigest(frame)
    if row.key == header.key and row.attempt > header.attempt:
        raise RowsLost(f"{name} was generated again since its batch was reserved")
    return row.tokens_hash()
