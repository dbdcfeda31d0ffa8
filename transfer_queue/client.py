"""Clients of the queue: ``QueueClient`` for an event loop, ``SyncQueueClient`` for a thread that may block.

    put:    shards? -> Store at each chosen shard -> Put of the headers, which name them -> answers
    fetch:  Fetch -> the rows themselves, or where they are -> Load at those shards -> rows

Every request may be sent twice, since the queue answers a repetition as it answered the first. A client that gets no
answer reconnects, says hello, and sends its unanswered requests again until their deadline. No payload passes the
queue's own process if it has shards. Fetched rows are compared with the hashes that their producers announced. A new
verb is a line in ``ClientVerbs``. ``read_batches`` reads in the trainer's place, ``read_groups`` reads trained groups.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import os
import re
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    NotRequired,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import msgspec
import zmq
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest
from zmq.utils.monitor import parse_monitor_message

from rl_async import messages as m
from rl_async.concurrency import Overdue, TimeLeft, gather_or_cancel, in_daemon_thread
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
from rl_async.messages import Frame
from rl_async.process.allocation import no_collection
from rl_async.process.private_folder import require_private
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth import ClientKeys, folder_of, is_file
from rl_async.transfer_queue.images import images_by_hash

P = ParamSpec("P")
T = TypeVar("T")

# --- verbs ----------------------------------------------------------------------------------------------------------


class ClientVerb(Generic[P, T]):
    """A method with the fields of a request as its arguments, which returns the reply.

    It is a coroutine function on a QueueClient and blocks on a SyncQueueClient. The client fills in its own worker and
    lineage.
    """

    def __init__(self, request: Any) -> None:
        self._request, self.__doc__ = request, request.__doc__

    @overload
    def __get__(self, client: "QueueClient", owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: "SyncQueueClient", owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: None, owner: Any) -> "ClientVerb[P, T]": ...
    def __get__(self, client: Any, owner: Any) -> Any:
        return self if client is None else functools.partial(client.ask, self._request)


def _verb(request: Callable[P, m.Request[T]]) -> ClientVerb[P, T]:
    return ClientVerb(request)


def _worker_verb(request: Callable[Concatenate[str, P], m.Request[T]]) -> ClientVerb[P, T]:
    """A verb whose first field is the client's worker, which callers leave out."""
    return ClientVerb(request)


class ClientVerbs:
    """The verbs that both clients have, each with the fields of its request as arguments.

    All verbs raise QueueLost when no answer came within ``timeout_s`` beyond the wait asked for, and ProtocolError when
    the queue refuses or the answer makes no sense. A client with a ``lineage`` raises TrainerReplaced once a trainer of
    a newer one has resumed.
    """

    # Agent workers.
    lease = _worker_verb(m.Lease)
    renew = _worker_verb(m.Renew)
    fail = _worker_verb(m.Fail)

    # The trainer.
    reserve = _verb(m.Reserve)
    commit = _verb(m.Commit)
    publish = _verb(m.Publish)
    retire = _verb(m.Retire)
    tighten = _verb(m.Tighten)
    resume = _verb(m.Resume)
    evaluate = _verb(m.Evaluate)
    eval_result = _verb(m.AwaitEvaluation)
    finish = _verb(m.Finish)

    # Readers of trained groups beside the trainer.
    subscribe = _verb(m.Subscribe)
    read = _verb(m.Read)
    acknowledge = _verb(m.Acknowledge)
    unsubscribe = _verb(m.Unsubscribe)

    # Engines and payload shards.
    engines = _verb(m.ListEngines)
    register_engine = _verb(m.RegisterEngine)
    remove_engine = _verb(m.RemoveEngine)
    confirm = _verb(m.Confirm)
    withdraw = _verb(m.Withdraw)
    shards = _verb(m.ListShards)
    register_shard = _verb(m.RegisterShard)
    sweep = _verb(m.Sweep)

    # Producers of tasks, people and monitoring.
    submit = _verb(m.Submit)
    requeue = _verb(m.Requeue)
    drain = _verb(m.Drain)
    status = _verb(m.Status)
    inspect = _verb(m.Inspect)
    group_list = _verb(m.ListGroups)
    peek = _verb(m.Peek)


R = TypeVar("R")


def expect(reply: m.Reply, *kinds: type[R]) -> R:
    """The reply, if it is of one of these kinds. Raises ProtocolError with the queue's reason otherwise.

    Raises TrainerReplaced for any expected kind if the queue serves a newer trainer now.
    """
    if isinstance(reply, m.Refused) and reply.code == wire.REPLACED:
        raise TrainerReplaced(f"the transfer queue refused: {reply.reason}")
    if isinstance(reply, kinds):
        return reply
    if isinstance(reply, m.Refused):
        raise ProtocolError(f"the transfer queue refused: {reply.reason} ({reply.code})")
    raise ProtocolError(f"the transfer queue answered {reply}")


def refusal(reply: m.Reply) -> str:
    """The code of a refusal; empty for other replies."""
    return reply.code if isinstance(reply, m.Refused) else ""


def checked(message: wire.ReplyMessage) -> wire.ReplyMessage:
    """Return the message of a request that was understood and allowed; raise ProtocolError or AccessDenied if not."""
    if isinstance(message.reply, m.Malformed):
        raise ProtocolError(f"the transfer queue did not understand a request: {message.reply.reason}")
    if isinstance(message.reply, m.Refused) and message.reply.code in (wire.DENIED, wire.FORBIDDEN):
        raise AccessDenied(f"the transfer queue refused: {message.reply.reason}")
    return message


# --- sessions -------------------------------------------------------------------------------------------------------

_numbers = itertools.count()

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_REFUSED = "it refused the handshake; is it closed to this key?"
_UNKNOWN = "the handshake did not complete; is it closed to clients without a key, or to this one?"
_CLOSED = "it closed the connection; is it closed to this key, or a frame of over 256 MiB?"


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
        """Stop watching, before the socket closes. The last failure stays known until another socket is watched."""
        if self._events is not None:
            self._read_events()
            # A closed socket has ended its monitor already.
            with contextlib.suppress(zmq.ZMQError):
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
            match parse_monitor_message(self._events.recv_multipart())["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    # A server that has closed one connection after the handshake does so again.
                    self._why = self._why if self._why == _CLOSED else ""
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._why = _REFUSED
                case zmq.EVENT_DISCONNECTED:
                    self._why = self._why or _CLOSED
                case _:
                    self._why = self._why or _UNKNOWN


class Session:
    """Identity, request ids and hello of one client, and the reason if it cannot connect."""

    def __init__(self, address: str, role: str, name: str, keys: ClientKeys | None = None) -> None:
        if not re.fullmatch(r"tcp://[^\s/]+:\d+|(ipc|inproc)://.+", address):
            raise UserError(f"{address} is no address of a transfer queue; write tcp://HOST:PORT")
        self.address = address
        self.watch = HandshakeWatch()
        self._keys = keys
        # The queue's reason if it has reached its limit of clients.
        self._full = ""
        self.ids = wire.RequestIds()
        # Another process under the same name must not keep this one's leases alive.
        self.worker = f"{name}-{os.getpid()}-{secrets.token_hex(3)}"
        shown = keys.secret.decode() if keys is not None and is_file(address) else ""
        self.hello = m.Hello(schema=m.SCHEMA, role=role, name=name, key=shown)
        self._run_id: str | None = None

    def check_place(self) -> None:
        """Raise UserError if another user may listen and get this client's key, QueueLost if no queue can."""
        if self._keys is None or not is_file(self.address):
            return
        folder = folder_of(self.address)
        try:
            require_private(folder)
        except FileNotFoundError:
            raise QueueLost(f"no transfer queue listens in {folder}, which does not exist") from None

    def prepare(self, socket: "zmq.Socket[Any]") -> None:
        """Set the options of a new socket, before it connects."""
        # Unanswered requests are sent again on the next connection.
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        socket.set(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
        if self._keys is not None and not is_file(self.address):
            socket.curve_serverkey = self._keys.server
            socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        self.watch.attach(socket)

    def welcome(self, reply: m.Reply) -> None:
        """Check the answer to hello; remember for ``lost`` that the queue has reached its limit of clients.

        Raises ProtocolError if it is refused for good (AccessDenied for a missing or unknown key), QueueReplaced if
        this is another queue.
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
        why = self._full or self.watch.why()
        return QueueLost(
            f"the transfer queue at {self.address} did not answer {type(request).__name__} for {seconds:.0f} s"
            + (f": {why}" if why else "")
        )


# --- samples --------------------------------------------------------------------------------------------------------


class Parcel(NamedTuple):
    """One sample to hand over: headers and rows, in the same order, and the bytes of media by hash."""

    headers: list[m.TrajectoryHeader]
    rows: Sequence[Frame]
    media: Mapping[str, Frame] = {}

    @property
    def group(self) -> int:
        """The id of the group that the sample belongs to."""
        return self.headers[0].group_id


def parcel(rows: Sequence[m.Trajectory], media: Mapping[str, bytes] | None) -> Parcel:
    """Encode the rows of one sample. Raises ProtocolError if a row refers to media that are not given."""
    headers: list[m.TrajectoryHeader] = []
    encoded: list[Frame] = []
    media, missing = media or {}, set[str]()
    for row in rows:
        frame, header = m.encode(row), row.header()
        header.payload_xxh3 = xxh3_64_intdigest(frame)
        if header.media:
            missing |= set(header.media) - media.keys()
        headers.append(header)
        encoded.append(frame)
    if missing:
        raise ProtocolError(f"a row refers to media that are not given to put: {', '.join(sorted(missing))}")
    return Parcel(headers, encoded, media)


# Limits of one message, unless a single sample exceeds them: requests of other clients wait behind it, and
# QueueLimits.frames allows at least so many rows.
MAX_BYTES = 1 << 21
MAX_ROWS = 1024
# Messages in flight.
AT_ONCE = 4

Answers = Sequence[m.Refused | None]


class _Waiting(NamedTuple):
    parcel: Parcel
    nbytes: int
    answer: "asyncio.Future[m.Done | m.Refused]"


class Outbox:
    """Sends samples through ``send`` in the order of their arrival, at most AT_ONCE messages at a time."""

    def __init__(self, send: Callable[[list[Parcel]], Awaitable[Answers]]) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        # Bytes of the waiting samples.
        self._nbytes = 0
        self._start_is_due = False
        self._sending: set[asyncio.Task[None]] = set()

    def put(self, parcel: Parcel) -> "asyncio.Future[m.Done | m.Refused]":
        """Queue one sample without waiting; the future has its answer, or the error that ``send`` raised."""
        loop = asyncio.get_running_loop()
        nbytes = sum(map(len, parcel.rows)) + sum(map(len, parcel.media.values()))
        waiting = _Waiting(parcel, nbytes, loop.create_future())
        self._waiting.append(waiting)
        self._nbytes += nbytes
        if not self._start_is_due:
            self._start_is_due = True
            loop.call_soon(self._start)
        return waiting.answer

    def _start(self) -> None:
        """Send the waiting samples if nothing is in flight; otherwise full messages only, up to AT_ONCE."""
        self._start_is_due = False
        while self._waiting and (not self._sending or (self._nbytes >= MAX_BYTES and len(self._sending) < AT_ONCE)):
            task = asyncio.create_task(self._deliver(self._take()), name="queue client outbox")
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _take(self) -> list[_Waiting]:
        """Take the oldest samples: at least one, and as many as one message may hold."""
        size, rows, count = 0, 0, 0
        for waiting in self._waiting:
            size += waiting.nbytes
            rows += len(waiting.parcel.rows) + len(waiting.parcel.media)
            if count and (size > MAX_BYTES or rows > MAX_ROWS):
                break
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._nbytes -= sum(waiting.nbytes for waiting in taken)
        return taken

    async def _deliver(self, taken: list[_Waiting]) -> None:
        """Send one message; its answers, or the error, go to the futures of its samples."""
        try:
            answers = await self._send([waiting.parcel for waiting in taken])
            if len(answers) != len(taken):
                raise ProtocolError(f"{len(taken)} samples were put, {len(answers)} answered")
        # Every error is raised again where the sample's future is awaited.
        except Exception as error:
            for waiting in taken:
                # A caller that was cancelled has cancelled its future.
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        else:
            for waiting, refused in zip(taken, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(refused or m.Done())

    def _sent(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        # Tasks are cancelled when the event loop ends, which then starts no others.
        if not task.cancelled():
            self._start()


# Media that a client remembers to have sent.
_REMEMBERED = 1 << 16


class Sending:
    """The state that puts leave behind: whether payloads go to shards, and which media were sent where."""

    def __init__(self) -> None:
        self.sharded = False
        # (group, hash, shard), oldest first; the queue itself is the shard "".
        self._sent: OrderedDict[tuple[int, str, str], None] = OrderedDict()

    def unsent(self, parcels: Sequence[Parcel], shard: str = "") -> dict[m.MediaKey, Frame]:
        """Media of these samples that were not sent to the shard before."""
        media = {(each.group, sha256): data for each in parcels for sha256, data in each.media.items()}
        return {key: data for key, data in media.items() if (*key, shard) not in self._sent}

    def sent(self, media: Iterable[m.MediaKey], shard: str = "") -> None:
        """Remember that these media were sent to the shard."""
        self._sent.update(dict.fromkeys((*key, shard) for key in media))
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)


def chosen(group: int, shards: Sequence[m.ShardRecord], replicas: int) -> list[m.ShardRecord]:
    """The shards that keep a group: ``replicas`` of them, or all if they are fewer.

    Rendezvous hashing (Thaler and Ravishankar 1998): each group ranks all shards by a hash of its own, so that groups
    spread evenly, and a shard that comes or goes moves no group between the others.
    """

    def weight(shard: m.ShardRecord) -> bytes:
        return hashlib.blake2b(f"{group} {shard.shard_id}".encode(), digest_size=8).digest()

    return sorted(shards, key=weight, reverse=True)[:replicas]


def _refusals(reply: m.Reply, count: int) -> list[m.Refused | None]:
    refused = expect(reply, m.Taken).refused
    if len(refused) != count:
        raise ProtocolError(f"{count} samples were put, {len(refused)} answered")
    return refused


# --- rows -----------------------------------------------------------------------------------------------------------


def split(message: wire.ReplyMessage, asked: int) -> list[Frame]:
    """The ``asked`` rows of an answer with payload, as views of the received frames. Raises ProtocolError."""
    lengths = expect(message.reply, m.FetchedRows).lengths
    if len(lengths) != asked:
        raise ProtocolError(f"{asked} rows were asked for, {len(lengths)} came")
    return list(wire.split(message.payload, lengths))


_decode_row = m.decoder(m.Trajectory)


def decode_rows(frames: Sequence[Frame]) -> list[m.Trajectory]:
    """The trajectories of these frames, whose arrays are views of them. Raises ProtocolError for an invalid frame."""
    with no_collection():
        return list(map(_decode_row, frames))


def announced_rows(headers: Sequence[m.TrajectoryHeader], frames: Sequence[Frame]) -> list[m.Trajectory]:
    """Decode the rows of these headers, after a comparison of their bytes with the hashes there.

    Raises RowsLost if a row is of a later attempt: the announced one was lost since, and the header with it. Raises
    RowsChanged, naming every row that differs and the process that kept it.
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


def _tokens_hash(header: m.TrajectoryHeader, frame: Frame, name: str) -> str:
    """The hash of the tokens of a row that is not the announced one, or of its bytes if they do not decode."""
    try:
        row = _decode_row(frame)
    except ProtocolError:
        return xxh3_128_hexdigest(frame)
    if row.key == header.key and row.attempt > header.attempt:
        raise RowsLost(f"{name} was generated again since its batch was reserved")
    return row.tokens_hash()


# --- the client of an event loop ------------------------------------------------------------------------------------

# How long a client waits for an answer before it reconnects, and for a shard's before it tries another.
PATIENCE_S = 3.0
SHARD_S = 10.0
# Before the same shards are tried again, unless their registry changes.
PAUSE_S = 1.0
# The pause before a request that was refused as one too many is sent again doubles between these.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# Messages that are received before the loop attends to others.
MESSAGES_AT_ONCE = 64
# A revision that the registry of shards does not reach.
_NEVER = 1 << 62


class ClientSettings(TypedDict):
    """Keyword arguments of the constructors of both clients.

    An answer is awaited for ``timeout_s`` beyond the wait that the request asks for, and for ``patience_s`` beyond it
    before the client reconnects, twice as long each time. A payload shard gets ``shard_s`` before another is tried.
    ``lineage`` is that of the trainer that the client belongs to.
    """

    role: str
    name: str
    timeout_s: NotRequired[float]
    patience_s: NotRequired[float]
    shard_s: NotRequired[float]
    keys: NotRequired[ClientKeys | None]
    lineage: NotRequired[int | None]


class _Pending(NamedTuple):
    """A request in flight, and the future of its answer."""

    frames: Sequence[Frame]
    answer: asyncio.Future[wire.ReplyMessage]


class QueueClient(ClientVerbs):
    """Any number of concurrent requests over one DEALER. Use it as ``async with``, on one event loop."""

    def __init__(
        self,
        address: str,
        *,
        role: str,
        name: str,
        timeout_s: float = 60.0,
        patience_s: float = PATIENCE_S,
        shard_s: float = SHARD_S,
        keys: ClientKeys | None = None,
        lineage: int | None = None,
    ) -> None:
        self._session = Session(address, role, name, keys)
        self._patience_s, self.timeout_s, self.lineage = patience_s, timeout_s, lineage
        self._shard_settings: ClientSettings = {
            "role": role,
            "name": name,
            "timeout_s": shard_s,
            "patience_s": patience_s,
            "keys": keys,
        }
        # By url.
        self._shards: dict[str, QueueClient] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._hello_id = b""
        # Counts connections.
        self._connection = 0
        self._pending: dict[bytes, _Pending] = {}
        self._broken: QueueLost | ProtocolError | None = None
        self.sending = Sending()
        self._outbox = Outbox(self._put)

    async def __aenter__(self) -> Self:
        self._context = zmq.Context()
        self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shard in self._shards.values():
            await shard.__aexit__(None, None, None)
        self._shards.clear()
        self._end(QueueLost("the client of the transfer queue was closed"))
        self._disconnect()
        if self._context is not None:
            self._context.term()

    @property
    def worker(self) -> str:
        """The name under which this client leases, unique to it."""
        return self._session.worker

    async def ask(self, kind: type[m.Request[T]], *fields: Any, **named: Any) -> T:
        """Send a request of this kind with these fields, and the client's worker and lineage; return its reply."""
        if kind.__struct_fields__[:1] == ("worker",):
            fields = (self.worker, *fields)
        # Resume names the lineage that it begins.
        if self.lineage is not None and "lineage" in kind.__struct_fields__ and kind is not m.Resume:
            named.setdefault("lineage", self.lineage)
        message = await self.exchange(kind(*fields, **named))
        reply: T = expect(message.reply, *m.replies_of(kind))
        if isinstance(reply, m.Leased):
            # A queue that keeps payloads reads the images of its tasks where the tasks are.
            for group in reply.groups:
                self.sending.sent((group.group_id, sha256) for sha256 in images_by_hash(group.task.prompt))
        return reply

    async def snapshot(self) -> bytes:
        """The part of a checkpoint that the queue contributes."""
        return (await self.ask(m.Snapshot)).snapshot

    # --- the connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._context is None:
            raise RuntimeError("use the queue client as `async with`")
        self._session.check_place()
        self._connection += 1
        self._socket = socket = self._context.socket(zmq.DEALER)
        self._session.prepare(socket)
        socket.connect(self._session.address)
        loop = asyncio.get_running_loop()
        loop.add_reader(socket.FD, self._receive, socket)
        loop.call_soon(self._receive, socket)
        self._hello_id = self._session.ids.take()
        self._send(wire.encode(self._hello_id, self._session.hello))

    def _disconnect(self) -> None:
        if self._socket is not None and not self._socket.closed:
            self._session.watch.detach()
            asyncio.get_running_loop().remove_reader(self._socket.FD)
            self._socket.close(0)

    def _reconnect(self, connection: int) -> None:
        """Replace the connection, unless another request has done so since ``connection`` was counted.

        All unanswered requests are sent again at once: their answers would go to the old connection.
        """
        if connection == self._connection and self._broken is None:
            # The old connection stays if the new one must not be made.
            self._session.check_place()
            self._disconnect()
            self._connect()
            for pending in self._pending.values():
                if not pending.answer.done():
                    self._send(pending.frames)

    def _send(self, frames: Sequence[Frame]) -> None:
        """Hand a message to the socket, or drop it if the queue has refused the connection: libzmq then has no other.

        It does not wait, since nothing would end the wait; the request is sent again on the next connection.
        """
        if self._socket is None:
            raise RuntimeError("use the queue client as `async with`")
        with contextlib.suppress(zmq.Again):
            wire.send(self._socket, frames)
        # Sending may use up the descriptor's signal that messages have come.
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._receive, self._socket)

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        """Give each reply to the request that waits for it.

        An error that concerns the whole connection ends every request, present and future.
        """
        for _ in range(MESSAGES_AT_ONCE):
            if socket.closed:
                return
            try:
                message = wire.decode_reply(socket.recv_multipart(zmq.NOBLOCK, copy=False))
                if message.request_id == self._hello_id:
                    self._session.welcome(message.reply)
            except zmq.Again:
                return
            except (QueueLost, ProtocolError) as error:
                self._end(error)
                continue
            pending = self._pending.get(message.request_id)
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(message)
        asyncio.get_running_loop().call_soon(self._receive, socket)

    def _end(self, error: QueueLost | ProtocolError) -> None:
        """Fail every request, present and future, with ``error``."""
        self._broken = error
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    async def exchange(
        self, request: m.Request[Any], payload: Sequence[Frame] = (), *, timeout_s: float | None = None
    ) -> wire.ReplyMessage:
        """Send any request until it is answered; the reply, which may be Refused, and its payload.

        A silent queue gets a new connection, after twice the patience each time; a busy one gets the request again
        after a pause. Raises QueueLost past the deadline, and ProtocolError if the queue did not understand the
        request.
        """
        request_id = self._session.ids.take()
        frames = wire.encode(request_id, request, payload)
        wait_s = request.wait_s if isinstance(request, m.LongPoll) else 0.0
        began = time.monotonic()
        left = TimeLeft(wait_s + (self.timeout_s if timeout_s is None else timeout_s))
        patience_s, pause_s = wait_s + self._patience_s, FIRST_PAUSE_S
        try:
            while True:
                if self._broken is not None:
                    raise self._broken
                answer = asyncio.get_running_loop().create_future()
                self._pending[request_id] = _Pending(frames, answer)
                connection, code = self._connection, ""
                self._send(frames)
                with contextlib.suppress(Overdue):
                    message = await left.within(answer, patience_s)
                    code = refusal(message.reply)
                    if code not in (wire.HELLO, wire.BUSY):
                        return checked(message)
                    await left.within(asyncio.sleep(pause_s))
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                if left.is_over:
                    raise self._session.lost(request, time.monotonic() - began)
                # A silent queue, and one that does not know this connection, need a new one.
                if code != wire.BUSY:
                    patience_s *= 2
                    self._reconnect(connection)
        finally:
            self._pending.pop(request_id, None)

    async def _ask_shard(
        self, url: str, request: m.Request[Any], payload: Sequence[Frame] = ()
    ) -> wire.ReplyMessage | QueueLost:
        """Send a request to a payload shard; return its answer, or the error if it gives none."""
        try:
            if url not in self._shards:
                self._shards[url] = await QueueClient(url, **self._shard_settings).__aenter__()
            return await self._shards[url].exchange(request, payload)
        except QueueLost as error:
            # The shard may come back under its url, with nothing.
            if url in self._shards:
                await self._shards.pop(url).__aexit__(None, None, None)
            return error

    # --- handing over samples ---------------------------------------------------------------------------------------

    def put(
        self, *rows: m.Trajectory, media: Mapping[str, bytes] | None = None
    ) -> "asyncio.Future[m.Done | m.Refused]":
        """Hand over all rows of one sample, from segment 0; Refused (``fenced``) if they are no longer wanted.

        ``media`` has the bytes, by hash, of the media that the rows refer to.
        """
        return self._outbox.put(parcel(rows, media))

    async def _put(self, parcels: Sequence[Parcel]) -> Answers:
        """Hand samples over; for each, None if it was taken, and otherwise why it is not wanted.

        Raises QueueLost if no shard could be found for ``timeout_s``.
        """
        if not self.sending.sharded:
            answers = await self._put_here(parcels)
            if answers is not None:
                return answers
            self.sending.sharded = True
        return await self._put_to_shards(parcels)

    async def _put_here(self, parcels: Sequence[Parcel]) -> Answers | None:
        """Put at the queue itself; None if it wants no payload. Media go along when new, or missing after all."""
        answers: list[m.Refused | None] = [None] * len(parcels)
        left, media = list(range(len(parcels))), self.sending.unsent(parcels)
        while left:
            some = [parcels[index] for index in left]
            rows = [row for each in some for row in each.rows]
            headers, lengths = [each.headers for each in some], list(map(len, rows))
            request = m.Put(worker=self.worker, samples=headers, lengths=lengths, media=list(media))
            reply = (await self.exchange(request, [*wire.join(rows), *media.values()])).reply
            if refusal(reply) == wire.SHARDED:
                return None
            refused = _refusals(reply, len(some))
            self.sending.sent(media)
            again: list[int] = []
            for index, why in zip(left, refused, strict=True):
                answers[index] = why
                if why is not None and why.code == wire.MEDIA:
                    again.append(index)
            every = {(parcels[i].group, sha256): data for i in again for sha256, data in parcels[i].media.items()}
            # The queue does not have them although they were just sent.
            if again and every.keys() <= media.keys():
                return answers
            left, media = again, every
        return answers

    async def _put_to_shards(self, parcels: Sequence[Parcel]) -> Answers:
        deadline = time.monotonic() + self.timeout_s
        answers: list[m.Refused | None] = [None] * len(parcels)
        left = list(range(len(parcels)))
        # Shards that did not answer.
        avoid: set[str] = set()
        registry = await self.shards(-1, 0.0)
        while left:
            shards = [shard for shard in registry.shards if shard.shard_id not in avoid]
            stored, failed = await self._store([(i, parcels[i]) for i in left], shards, registry.replicas)
            avoid |= failed
            if stored:
                request = m.Put(worker=self.worker, samples=[headers for _, headers in stored])
                replies = _refusals((await self.exchange(request)).reply, len(stored))
                for (index, _), refused in zip(stored, replies, strict=True):
                    if refused is None or refused.code != wire.SHARD_LOST:
                        answers[index] = refused
                        left.remove(index)
            if left:
                if time.monotonic() >= deadline:
                    raise QueueLost(f"no payload shard took {len(left)} samples for {self.timeout_s:.0f} s")
                # After a failure other shards are tried at once.
                if not failed:
                    registry = await self.shards(registry.revision, PAUSE_S)
                    avoid.clear()
        return answers

    async def _store(
        self, parcels: Sequence[tuple[int, Parcel]], shards: Sequence[m.ShardRecord], replicas: int
    ) -> tuple[list[tuple[int, list[m.TrajectoryHeader]]], set[str]]:
        """Bring each sample to its shards, with media that these do not have.

        Returns the samples that all of their shards keep, each with headers that say so, and the shards that did not
        answer.
        """
        places = {index: [s.shard_id for s in chosen(each.group, shards, replicas)] for index, each in parcels}
        loads: dict[str, list[Parcel]] = defaultdict(list)
        for index, each in parcels:
            for shard_id in places[index]:
                loads[shard_id].append(each)
        urls = {shard.shard_id: shard.url for shard in shards}
        media = {shard_id: self.sending.unsent(load, shard_id) for shard_id, load in loads.items()}
        calls: list[Coroutine[Any, Any, wire.ReplyMessage | QueueLost]] = []
        for shard_id, load in loads.items():
            samples = [((each.group, each.headers[0].sample, each.headers[0].attempt), each.rows) for each in load]
            new = media[shard_id].items()
            samples += [((group, m.media_sample(sha256), 0), [data]) for (group, sha256), data in new]
            lengths = [list(map(len, rows)) for _, rows in samples]
            request = m.StoreRows(samples=[key for key, _ in samples], lengths=lengths)
            payload = wire.join([row for _, rows in samples for row in rows])
            calls.append(self._ask_shard(urls[shard_id], request, payload))
        failed: set[str] = set()
        for shard_id, outcome in zip(loads, await gather_or_cancel(*calls), strict=True):
            if isinstance(outcome, QueueLost):
                failed.add(shard_id)
            else:
                expect(outcome.reply, m.Done)
                self.sending.sent(media[shard_id], shard_id)
        stored: list[tuple[int, list[m.TrajectoryHeader]]] = []
        for index, each in parcels:
            ids = places[index]
            if ids and failed.isdisjoint(ids):
                pairs = zip(each.headers, each.rows, strict=True)
                headers = [msgspec.structs.replace(h, shards=ids, nbytes=len(row)) for h, row in pairs]
                # Media that went along for this sample count for its first row.
                first = media[ids[0]]
                headers[0].nbytes += sum(len(first.pop((each.group, sha256), b"")) for sha256 in each.media)
                stored.append((index, headers))
        return stored, failed

    # --- reading rows -----------------------------------------------------------------------------------------------

    async def fetch(self, rows: Sequence[m.RowKey]) -> list[m.Trajectory]:
        """The trajectories of these rows. Raises RowsLost if some were lost with a payload shard."""
        return decode_rows(await self._fetch_frames(rows))

    async def fetch_announced(self, headers: Sequence[m.TrajectoryHeader]) -> list[m.Trajectory]:
        """The trajectories of these headers, just as they were put.

        Raises RowsLost if some were lost with a payload shard, RowsChanged if some came with other bytes.
        """
        return announced_rows(headers, await self._fetch_frames([header.key for header in headers]))

    async def fetch_media(self, rows: Sequence[m.Trajectory]) -> dict[str, bytes]:
        """The bytes, by SHA-256, of all media that these rows refer to.

        Raises RowsLost if some were lost with a payload shard, and ProtocolError for bytes that have another hash.
        """
        wanted = {each.sha256: (row.group_id, m.media_sample(each.sha256), 0) for row in rows for each in row.media}
        frames = await self._fetch_frames(list(wanted.values()))
        media = {sha256: bytes(frame) for sha256, frame in zip(wanted, frames, strict=True)}
        for sha256, data in media.items():
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ProtocolError(f"the medium {sha256} came with other bytes")
        return media

    async def _fetch_frames(self, rows: Sequence[m.RowKey]) -> list[Frame]:
        """The payloads of these rows, from the queue or from its shards.

        Raises RowsLost if some went with their shard, QueueLost if a shard that should have them could not be reached
        for ``timeout_s``.
        """
        deadline = time.monotonic() + self.timeout_s
        found: dict[m.RowKey, Frame] = {}
        avoid: set[str] = set()
        while len(found) < len(rows):
            left = [key for key in rows if key not in found]
            message = await self.exchange(m.Fetch(rows=left, lineage=self.lineage))
            if isinstance(message.reply, m.FetchedRows):
                return split(message, len(rows))
            if isinstance(message.reply, m.Refused) and message.reply.code == wire.ROWS_LOST:
                raise RowsLost(message.reply.reason)
            stuck = await self._load(left, expect(message.reply, m.Elsewhere), avoid, found)
            # Every copy was tried: either the queue notices that the shards are lost, or one of them comes back.
            if stuck:
                if time.monotonic() >= deadline:
                    names = ", ".join(sorted(avoid))
                    raise QueueLost(f"the payload shards {names} did not answer for {self.timeout_s:.0f} s")
                avoid.clear()
                await self.shards(_NEVER, PAUSE_S)
        return [found[key] for key in rows]

    async def _load(
        self, rows: Sequence[m.RowKey], where: m.Elsewhere, avoid: set[str], found: dict[m.RowKey, Frame]
    ) -> bool:
        """Load the rows that can be reached into ``found``, and add shards that fail to ``avoid``.

        Returns whether a row has no shard left.
        """
        if len(where.attempts) != len(rows) or len(where.shards) != len(rows):
            raise ProtocolError(f"{len(rows)} rows were asked for, {len(where.attempts)} places came")
        loads: dict[str, list[tuple[m.RowKey, m.StoredKey]]] = defaultdict(list)
        stuck = False
        for (group, sample, segment), attempt, shards in zip(rows, where.attempts, where.shards, strict=True):
            shard = next((each for each in shards if each not in avoid), "")
            if shard:
                loads[shard].append(((group, sample, segment), (group, sample, attempt, segment)))
            else:
                stuck = True
        requests = {shard: m.LoadRows(rows=[key for _, key in load]) for shard, load in loads.items()}
        outcomes = await gather_or_cancel(*(self._ask_shard(where.urls[shard], r) for shard, r in requests.items()))
        for (shard, load), outcome in zip(loads.items(), outcomes, strict=True):
            # A shard that refuses was restarted, and has nothing.
            if isinstance(outcome, QueueLost) or isinstance(outcome.reply, m.Refused):
                avoid.add(shard)
            else:
                found.update(zip([key for key, _ in load], split(outcome, len(load)), strict=True))
        return stuck


# --- the client of a thread -----------------------------------------------------------------------------------------


def _beside_a_loop(function: Callable[[], T]) -> T:
    """Call a function that runs an event loop: in a thread if one runs here already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        nested = False
    else:
        nested = True
    return in_daemon_thread(function, "queue client").result() if nested else function()


class SyncQueueClient(ClientVerbs):
    """A QueueClient whose event loop runs while a call waits, which blocks. Use it as ``with``, in one thread.

    As on a QueueClient, a reply that cannot be decoded ends every later request, too.
    """

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        self.inner = QueueClient(address, **settings)
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        try:
            self._wait(self.inner.__aenter__())
        except BaseException:
            self._close_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the client cannot be used any more."""
        if self._runner is not None:
            try:
                self._wait(self.inner.__aexit__(None, None, None))
            finally:
                self._close_loop()

    def _close_loop(self) -> None:
        """End what still runs on the loop, such as a ``put`` that was interrupted."""
        if self._runner is not None:
            _beside_a_loop(self._runner.close)
            self._runner = None

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the event loop, and cancel it if this wait is interrupted."""
        runner = self._runner
        if runner is None:
            work.close()
            raise RuntimeError("use the queue client as `with`")
        loop = runner.get_loop()
        try:
            return _beside_a_loop(lambda: runner.run(work))
        except BaseException:
            # An interrupted call leaves its tasks; if a thread runs them, they go on there.
            while loop.is_running():
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
                time.sleep(0.01)
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                _beside_a_loop(lambda: runner.run(asyncio.wait(left)))
            raise

    @property
    def worker(self) -> str:
        """The name under which this client leases, unique to it."""
        return self.inner.worker

    @property
    def lineage(self) -> int | None:
        """The lineage of the trainer that this client belongs to."""
        return self.inner.lineage

    @lineage.setter
    def lineage(self, lineage: int | None) -> None:
        self.inner.lineage = lineage

    def ask(self, kind: type[m.Request[T]], *fields: Any, **named: Any) -> T:
        """Send a request of this kind with these fields, and the client's worker and lineage; return its reply."""
        return self._wait(self.inner.ask(kind, *fields, **named))

    def exchange(
        self, request: m.Request[Any], payload: Sequence[Frame] = (), *, timeout_s: float | None = None
    ) -> wire.ReplyMessage:
        """Send any request until it is answered; the reply, which may be Refused, and its payload."""
        return self._wait(self.inner.exchange(request, payload, timeout_s=timeout_s))

    def snapshot(self) -> bytes:
        """The part of a checkpoint that the queue contributes."""
        return self._wait(self.inner.snapshot())

    def put(self, *rows: m.Trajectory, media: Mapping[str, bytes] | None = None) -> m.Done | m.Refused:
        """Hand over all rows of one sample, from segment 0; Refused (``fenced``) if they are no longer wanted.

        ``media`` has the bytes, by hash, of the media that the rows refer to.
        """

        async def put() -> m.Done | m.Refused:
            return await self.inner.put(*rows, media=media)

        return self._wait(put())

    def fetch(self, rows: Sequence[m.RowKey]) -> list[m.Trajectory]:
        """The trajectories of these rows. Raises RowsLost if some were lost with a payload shard."""
        return self._wait(self.inner.fetch(rows))

    def fetch_announced(self, headers: Sequence[m.TrajectoryHeader]) -> list[m.Trajectory]:
        """The trajectories of these headers, just as they were put.

        Raises RowsLost if some were lost with a payload shard, RowsChanged if some came with other bytes.
        """
        return self._wait(self.inner.fetch_announced(headers))

    def fetch_media(self, rows: Sequence[m.Trajectory]) -> dict[str, bytes]:
        """The bytes, by SHA-256, of all media that these rows refer to."""
        return self._wait(self.inner.fetch_media(rows))


# --- readers --------------------------------------------------------------------------------------------------------

# The longest wait of one request.
POLL_S = 5.0


class Batch(NamedTuple):
    """The batch that a step reserved: rows and their headers in the same order, and tasks by group."""

    step: int
    rows: list[m.Trajectory]
    headers: list[m.TrajectoryHeader]
    tasks: dict[int, m.Task]


def read_batches(client: SyncQueueClient, *, steps: int | None = None, timeout_s: float = 600.0) -> Iterator[Batch]:
    """The batches from the first that is not done, at most ``steps``; ends when the queue is finished and has no more.

    Asking for the next batch says that the last one is done: it is committed, published as a new version, which frees
    its slots, and retired. A reader that dies before gets it again. One reader a queue. Raises QueueLost when no batch
    came within ``timeout_s``, saying what was missing, and RowsChanged for rows with other bytes than were put.
    """
    published = client.status().published
    client.lineage = published.lineage
    step, end = published.step, None if steps is None else published.step + steps
    while end is None or step < end:
        batch = _next(client, step, timeout_s)
        if batch is None:
            return
        yield batch
        client.commit(step)
        step += 1
        client.publish(m.Version(published.lineage, step), [])
        client.retire(step)


def _next(client: SyncQueueClient, step: int, timeout_s: float) -> Batch | None:
    """Waits for groups to become ready; unblocked by workers, the end of the run (None), or ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        # Asked before reserving, so that rows which were put before the end are still read.
        over = client.status().finished
        left = deadline - time.monotonic()
        reply = client.reserve(step, 0.0 if over else max(0.0, min(left, POLL_S)))
        if not isinstance(reply, m.NotReady):
            try:
                rows = client.fetch_announced(reply.headers)
            except RowsLost:
                # They are generated again, and the next request waits for that.
                continue
            return Batch(step, rows, reply.headers, reply.tasks)
        if over:
            return None
        if left <= 0:
            raise QueueLost(f"no batch for step {step} within {timeout_s:g} s: {reply.why}")


class TrainedGroup(NamedTuple):
    """One group of a consumer: rows by (sample, segment); ``skipped`` groups were given up before, so far."""

    position: int
    step: int
    group_id: int
    task: m.Task
    rows: list[m.Trajectory]
    skipped: int


def read_groups(
    client: SyncQueueClient, consumer: str, *, after: int = -1, oldest: bool = False, timeout_s: float = 600.0
) -> Iterator[TrainedGroup]:
    """The groups that were trained, in order, each to every consumer; ends when the queue is finished and read.

    The queue keeps the consumer's place: asking for the next group acknowledges the last, so one that dies in between
    gets it again. To have each group exactly once, store ``position`` in the transaction that stores what was made of
    the group, and give it as ``after`` when starting again. A new consumer reads from now on, or from the ``oldest``
    group that is here. Raises QueueLost when none came within ``timeout_s``.
    """
    client.subscribe(consumer, oldest=oldest)
    deadline = time.monotonic() + timeout_s
    while True:
        wait_s = max(0.0, min(deadline - time.monotonic(), POLL_S))
        reply = client.read(consumer, wait_s, after=after, max_groups=1)
        for group in reply.groups:
            rows = rows_of(client, consumer, group)
            if rows is not None:
                yield TrainedGroup(group.position, group.step, group.group_id, group.task, rows, reply.skipped)
                client.acknowledge(consumer, group.position)
                after, deadline = group.position, time.monotonic() + timeout_s
        if reply.finished:
            return
        if not reply.groups and time.monotonic() > deadline:
            raise QueueLost(f"no group was trained within {timeout_s:g} s; consumer {consumer} has read all before")


def rows_of(client: SyncQueueClient, consumer: str, group: m.DeliveredGroup) -> list[m.Trajectory] | None:
    """A group's rows; None if it was given up since it was delivered, or some went with a payload shard: read again."""
    try:
        return client.fetch_announced(group.headers)
    except (ProtocolError, RowsLost):
        again = client.read(consumer, 0.0, after=group.position - 1, max_groups=1).groups
        if [_rows_named(each) for each in again] != [_rows_named(group)]:
            return None
        raise


def _rows_named(group: m.DeliveredGroup) -> tuple[int, list[tuple[m.RowKey, int]]]:
    return group.position, [(header.key, header.attempt) for header in group.headers]
