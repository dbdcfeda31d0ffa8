"""Clients of the queue: ``QueueClient`` for an event loop, ``SyncQueueClient`` for a thread that may block.

A verb starts a conversation (``conversations.py``), and the client that it is called on carries it out: ``lease`` is
``async`` on a ``QueueClient`` and blocks on a ``SyncQueueClient``. A new verb is one line in ``ClientVerbs``. Every
request may be sent twice, since the queue answers a repetition as it answered the first, so a client that hears
nothing reconnects, says hello, and sends its unanswered requests again until their deadline. ``read_batches`` reads
in the trainer's place, ``read_groups`` reads what was trained.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import (
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    NotRequired,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import zmq

from rl_async import messages as m
from rl_async.codec import Frame
from rl_async.concurrency import gather_or_cancel
from rl_async.errors import ProtocolError, QueueLost, RowsLost
from rl_async.messages import DeliveredGroup, NotReady, RowKey, Task, Trajectory, TrajectoryHeader, Version
from rl_async.transfer_queue import conversations, wire
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.conversations import (
    PATIENCE_S,
    SHARD_S,
    Conversation,
    Parcel,
    RequestExchange,
    Retry,
    Session,
    announced_rows,
    decode_rows,
    send,
)

P = ParamSpec("P")
T = TypeVar("T")


class _Awaiting(Protocol):
    def run(self, conversation: Conversation[T]) -> Coroutine[Any, Any, T]: ...


class _Blocking(Protocol):
    def run(self, conversation: Conversation[T]) -> T: ...


class ClientVerb(Generic[P, T]):
    """A method that runs a conversation: it returns a coroutine on a client whose ``run`` does, else the result."""

    def __init__(self, start: Callable[Concatenate[Any, P], Conversation[T]], doc: str | None) -> None:
        self._start, self.__doc__ = start, doc

    @overload
    def __get__(self, client: _Awaiting, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: _Blocking, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: None, owner: Any) -> "ClientVerb[P, T]": ...
    def __get__(self, client: Any, owner: Any) -> Any:
        if client is None:
            return self
        start, run = self._start, client.run

        def call(*arguments: Any, **named: Any) -> Any:
            return run(start(client, *arguments, **named))

        return call


def _verb(request: Callable[P, m.Request[T]]) -> ClientVerb[P, T]:
    """A method with the fields of a request as its arguments, which returns the request's reply."""
    kind: Any = request
    replies = m.replies_of(kind)
    return ClientVerb(lambda _, *fields, **named: conversations.ask(kind(*fields, **named), replies), kind.__doc__)


def _worker_verb(request: Callable[Concatenate[str, P], m.Request[T]]) -> ClientVerb[P, T]:
    """The same for a request whose first field is the name of the client's worker."""
    kind: Any = request
    replies = m.replies_of(kind)
    return ClientVerb(
        lambda client, *fields, **named: conversations.ask(kind(client.worker, *fields, **named), replies), kind.__doc__
    )


def _trainer_verb(request: Callable[P, m.Request[T]]) -> ClientVerb[P, T]:
    """The same for a request with a lineage, which is the client's unless it is given."""
    kind: Any = request
    replies = m.replies_of(kind)
    return ClientVerb(
        lambda client, *fields, **named: conversations.ask(kind(*fields, **(client.for_trainer() | named)), replies),
        kind.__doc__,
    )


def _conversation(start: Callable[Concatenate[Any, P], Conversation[T]]) -> ClientVerb[P, T]:
    """A method that takes several requests; its function gets the client first."""
    return ClientVerb(start, start.__doc__)


def _snapshot(client: "ClientVerbs") -> Conversation[bytes]:
    """What a checkpoint must keep of the queue."""
    taken = yield from conversations.ask(m.Snapshot(lineage=client.lineage), m.replies_of(m.Snapshot))
    return taken.snapshot


def _put(client: "ClientVerbs", parcels: Sequence[conversations.Parcel]) -> Conversation[list[m.Refused | None]]:
    """Hand over samples; for each, None if it was taken, else why not."""
    return conversations.put(client.worker, parcels, client.sending, client.timeout_s)


def _fetch(client: "ClientVerbs", rows: Sequence[m.RowKey]) -> Conversation[list[m.Trajectory]]:
    """The trajectories of these rows. Raises RowsLost if some were lost with a payload shard."""
    found = yield from conversations.fetch(rows, client.timeout_s, client.lineage)
    return decode_rows(found)


def _fetch_announced(client: "ClientVerbs", headers: Sequence[m.TrajectoryHeader]) -> Conversation[list[m.Trajectory]]:
    """The trajectories of these headers, just as they were put.

    Raises RowsLost if some were lost with a payload shard, RowsChanged if some came with other bytes.
    """
    keys = [header.key for header in headers]
    found = yield from conversations.fetch(keys, client.timeout_s, client.lineage)
    return announced_rows(headers, found)


def _fetch_media(client: "ClientVerbs", rows: Sequence[m.Trajectory]) -> Conversation[dict[str, bytes]]:
    """The bytes, by SHA-256, of all media that these rows refer to."""
    return conversations.fetch_media(rows, client.timeout_s, client.lineage)


class ClientSettings(TypedDict):
    """Keyword arguments of the constructors of both clients."""

    role: str
    name: str
    timeout_s: NotRequired[float]  # for an answer, beyond the wait that is asked for
    patience_s: NotRequired[float]  # without an answer, beyond that wait, until it reconnects; doubled each time
    shard_s: NotRequired[float]  # for a payload shard's answer, before another is tried
    keys: NotRequired[ClientKeys | None]
    lineage: NotRequired[int | None]  # of the trainer that this client belongs to


class ClientVerbs:
    """What a client can do, and the settings that both clients have.

    All verbs raise QueueLost when no answer came within ``timeout_s`` beyond the wait asked for, and ProtocolError when
    the queue refuses or the answer makes no sense. A client with a ``lineage`` raises TrainerReplaced once a trainer of
    a newer one has resumed.
    """

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
        self.sending = conversations.Sending()

    @property
    def worker(self) -> str:
        """The name under which this client leases, unique to it."""
        return self._session.worker

    def for_trainer(self) -> dict[str, int]:
        """The field ``lineage`` of a request that may have one."""
        return {} if self.lineage is None else {"lineage": self.lineage}

    # Agent workers.
    lease = _worker_verb(m.Lease)
    renew = _worker_verb(m.Renew)
    fail = _worker_verb(m.Fail)
    put_parcels = _conversation(_put)

    # The trainer.
    reserve = _trainer_verb(m.Reserve)
    commit = _trainer_verb(m.Commit)
    publish = _verb(m.Publish)
    retire = _trainer_verb(m.Retire)
    tighten = _trainer_verb(m.Tighten)
    snapshot = _conversation(_snapshot)
    resume = _verb(m.Resume)
    evaluate = _trainer_verb(m.Evaluate)
    eval_result = _trainer_verb(m.AwaitEvaluation)
    finish = _trainer_verb(m.Finish)

    # Rows, for the trainer and for other readers.
    fetch = _conversation(_fetch)
    fetch_announced = _conversation(_fetch_announced)
    fetch_media = _conversation(_fetch_media)
    subscribe = _verb(m.Subscribe)
    read = _verb(m.Read)
    acknowledge = _verb(m.Acknowledge)
    unsubscribe = _verb(m.Unsubscribe)

    # Engines and payload shards.
    engines = _trainer_verb(m.ListEngines)
    register_engine = _verb(m.RegisterEngine)
    remove_engine = _trainer_verb(m.RemoveEngine)
    confirm = _verb(m.Confirm)
    withdraw = _trainer_verb(m.Withdraw)
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


MESSAGES_AT_ONCE = 64  # messages, before the loop looks after others


class LoopSocket:
    """Hands every message of a connected socket to ``received`` until it is closed.

    Make it on the running loop. A zmq.ZMQError of the socket ends up with the loop's handler of exceptions.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", received: Callable[[Sequence[Any]], None]) -> None:
        self._socket, self._received = socket, received
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(socket.FD, self._take)
        self._loop.call_soon(self._take)

    def send(self, frames: Sequence[Frame]) -> None:
        """Hand a message to the socket, as ``session.send`` does."""
        send(self._socket, frames)
        if self._events() & zmq.POLLIN:
            self._loop.call_soon(self._take)

    def _events(self) -> int:
        events = self._socket.get(zmq.EVENTS)
        assert isinstance(events, int)
        return events

    def _take(self) -> None:
        for _ in range(MESSAGES_AT_ONCE):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._received(parts)
        self._loop.call_soon(self._take)

    def close(self) -> None:
        """Close the socket; what is unsent is dropped."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(0)


MAX_BYTES = 1 << 21  # of one message, unless a single sample is larger: what other clients ask for waits behind it
AT_ONCE = 4  # messages on their way
MAX_ROWS = 1024  # of one message, unless a single sample has more; queue.limits.frames allows at least these

Answers = Sequence[m.Refused | None]
Send = Callable[[list[Parcel]], Awaitable[Answers]]


class _Waiting(NamedTuple):
    parcel: Parcel
    nbytes: int  # of rows and media together
    answer: "asyncio.Future[m.Done | m.Refused]"


class Outbox:
    """Sends samples through ``send``, at most AT_ONCE messages at a time, in the order in which they came."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        self._nbytes = 0  # of what waits
        self._due = False  # what waits is looked at soon
        self._sending: set[asyncio.Task[None]] = set()

    def put(self, parcel: Parcel) -> "asyncio.Future[m.Done | m.Refused]":
        """Hand over one sample, at once; its answer, or what ``send`` raises, comes when awaited."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(parcel, parcel.nbytes, loop.create_future())
        self._waiting.append(waiting)
        self._nbytes += waiting.nbytes
        if not self._due:
            self._due = True
            loop.call_soon(self._start)
        return waiting.answer

    def _start(self) -> None:
        """Send what waits if nothing is on its way, and full messages while not too many are."""
        self._due = False
        while self._waiting and (not self._sending or (self._nbytes >= MAX_BYTES and len(self._sending) < AT_ONCE)):
            task = asyncio.create_task(self._deliver(self._take()), name="queue client outbox")
            self._sending.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        if not task.cancelled():  # else the event loop ends
            self._start()

    async def _deliver(self, taken: list[_Waiting]) -> None:
        """Send one message; its answers, or the error, go to whoever handed the samples over."""
        try:
            answers = await self._send([waiting.parcel for waiting in taken])
            if len(answers) != len(taken):
                raise ProtocolError(f"{len(taken)} samples were put, {len(answers)} answered")
        except Exception as error:  # handed to whoever awaits, whatever it is
            for waiting in taken:
                if not waiting.answer.done():  # else whoever put it no longer waits
                    waiting.answer.set_exception(error)
        else:
            for waiting, refused in zip(taken, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(refused or m.Done())

    def _take(self) -> list[_Waiting]:
        """The first that wait: at least one, and as many as one message may hold."""
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


class _Pending(NamedTuple):
    """A request that was sent, and its answer once there is one."""

    frames: Sequence[Frame]
    answer: asyncio.Future[wire.ReplyMessage]


class QueueClient(ClientVerbs):
    """Any number of concurrent requests over one DEALER. Use it as ``async with``, on one event loop."""

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        super().__init__(address, **settings)
        self._shards: dict[str, QueueClient] = {}  # by url
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: LoopSocket | None = None
        self._hello_id = b""
        self._connection = 0  # counts connections
        self._pending: dict[bytes, _Pending] = {}
        self._broken: QueueLost | ProtocolError | None = None
        self._outbox = Outbox(self.put_parcels)

    async def __aenter__(self) -> Self:
        self._context = zmq.Context()
        self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for url in list(self._shards):
            await self._part(url)
        self._end(QueueLost("the client of the transfer queue was closed"))
        self._disconnect()
        if self._context is not None:
            self._context.term()

    def put(
        self, *rows: m.Trajectory, media: Mapping[str, bytes] | None = None
    ) -> "asyncio.Future[m.Done | m.Refused]":
        """Hand over all rows of one sample, from segment 0; Refused (``fenced``) if they are no longer wanted.

        ``media`` has the bytes, by hash, of what the rows refer to.
        """
        return self._outbox.put(conversations.parcel(rows, media))

    # --- the connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._context is None:
            raise RuntimeError("use the queue client as `async with`")
        self._session.check_place()
        self._connection += 1
        socket = self._context.socket(zmq.DEALER)
        self._session.prepare(socket)
        socket.connect(self._session.address)
        self._hello_id, frames = self._session.hello()
        self._socket = LoopSocket(socket, self._receive)
        self._socket.send(frames)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._session.abandon()
            self._socket.close()

    def _reconnect(self, connection: int) -> None:
        """Replace the connection, unless another request has done so since ``connection`` was counted.

        All that is unanswered is sent again at once: its answers would go to the old connection.
        """
        if connection == self._connection and self._broken is None:
            self._session.check_place()  # the old connection stays if there is no place for another
            self._disconnect()
            self._connect()
            assert self._socket is not None
            for pending in self._pending.values():
                if not pending.answer.done():
                    self._socket.send(pending.frames)

    def _receive(self, parts: Sequence[Any]) -> None:
        """Give a reply to the request that waits for it.

        An error that concerns the whole connection ends every request, present and future.
        """
        try:
            message = wire.decode_reply(parts)
            if message.request_id == self._hello_id:
                self._session.welcome(message.reply)
        except (QueueLost, ProtocolError) as error:
            self._end(error)
            return
        pending = self._pending.get(message.request_id)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(message)

    def _end(self, error: QueueLost | ProtocolError) -> None:
        """Fail every request, present and future, with ``error``."""
        self._broken = error
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)

    async def exchange(
        self, request: m.Request[Any], payload: Sequence[Frame] = (), *, timeout_s: float | None = None
    ) -> wire.ReplyMessage:
        """Send any request until it is answered; the reply, which may be Refused, and its payload."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        exchange = RequestExchange(self._session, request, payload, timeout_s, self._patience_s)
        try:
            while True:
                if self._broken is not None:
                    raise self._broken
                future = asyncio.get_running_loop().create_future()
                self._pending[exchange.request_id] = _Pending(exchange.frames, future)
                connection = self._connection
                if self._socket is None:
                    raise RuntimeError("use the queue client as `async with`")
                self._socket.send(exchange.frames)
                await asyncio.wait([future], timeout=exchange.patience_s())
                outcome = exchange.after(future.result() if future.done() else None)
                if not isinstance(outcome, Retry):
                    return outcome
                if outcome.pause_s:
                    await asyncio.sleep(outcome.pause_s)
                if outcome.reconnect:
                    self._reconnect(connection)
        finally:
            self._pending.pop(exchange.request_id, None)

    # --- conversations ----------------------------------------------------------------------------------------------

    async def run(self, conversation: conversations.Conversation[T]) -> T:
        """Carry out a conversation, the calls of one turn at once; its result."""
        try:
            calls = next(conversation)
            while True:
                if len(calls) == 1:
                    outcomes = [await self._call(calls[0])]
                else:
                    outcomes = await gather_or_cancel(*map(self._call, calls))
                calls = conversation.send(outcomes)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _call(self, call: conversations.PeerCall) -> conversations.Outcome:
        try:
            client = self if call.url == conversations.QUEUE else await self._shard(call.url)
            return await client.exchange(call.request, call.payload)
        except QueueLost as error:
            if call.url in self._shards:  # it may come back under its url, with nothing
                await self._part(call.url)
            return error

    async def _shard(self, url: str) -> "QueueClient":
        if url not in self._shards:
            self._shards[url] = await QueueClient(url, **self._shard_settings).__aenter__()
        return self._shards[url]

    async def _part(self, url: str) -> None:
        await self._shards.pop(url).__aexit__(None, None, None)


MOST_CALLS = 16  # at once


class SyncQueueClient(ClientVerbs):
    """One request at a time over one DEALER, blocking. Use it as ``with``, in one thread."""

    def __init__(self, address: str, **settings: Unpack[ClientSettings]) -> None:
        super().__init__(address, **settings)
        self._shards: dict[str, SyncQueueClient] = {}  # by url
        self._callers: ThreadPoolExecutor | None = None  # for several shards at once
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._hello_id = b""

    def __enter__(self) -> Self:
        self._connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the client cannot be used any more."""
        if self._callers is not None:
            self._callers.shutdown()
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()
        if self._socket is not None:
            self._session.abandon()
            self._socket.close(0)
        self._context.term()

    def put(self, *rows: m.Trajectory, media: Mapping[str, bytes] | None = None) -> m.Done | m.Refused:
        """Hand over all rows of one sample, from segment 0; Refused (``fenced``) if they are no longer wanted.

        ``media`` has the bytes, by hash, of what the rows refer to.
        """
        (refused,) = self.put_parcels([conversations.parcel(rows, media)])
        return refused or m.Done()

    # --- the connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> "zmq.Socket[bytes]":
        self._session.check_place()
        if self._socket is not None:
            self._session.abandon()
            self._socket.close(0)
        self._socket = self._context.socket(zmq.DEALER)
        self._session.prepare(self._socket)
        self._socket.connect(self._session.address)
        self._hello_id, frames = self._session.hello()
        send(self._socket, frames)
        return self._socket

    def exchange(
        self, request: m.Request[Any], payload: Sequence[Frame] = (), *, timeout_s: float | None = None
    ) -> wire.ReplyMessage:
        """Send any request until it is answered; the reply, which may be Refused, and its payload."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        exchange = RequestExchange(self._session, request, payload, timeout_s, self._patience_s)
        socket = self._socket or self._connect()
        while True:
            send(socket, exchange.frames)
            until = time.monotonic() + exchange.patience_s()
            outcome = exchange.after(self._receive(socket, exchange.request_id, until))
            if not isinstance(outcome, Retry):
                return outcome
            time.sleep(outcome.pause_s)
            if outcome.reconnect:
                socket = self._connect()

    def _receive(self, socket: "zmq.Socket[bytes]", request_id: bytes, until: float) -> wire.ReplyMessage | None:
        """The reply to ``request_id``, ignoring late replies to earlier requests; None when time is up."""
        while (left := until - time.monotonic()) > 0:
            if not socket.poll(max(1, int(left * 1000))):
                continue
            message = wire.decode_reply(socket.recv_multipart(copy=False))
            if message.request_id == self._hello_id:
                self._session.welcome(message.reply)
            elif message.request_id == request_id:
                return message
        return None

    # --- conversations ----------------------------------------------------------------------------------------------

    def run(self, conversation: conversations.Conversation[T]) -> T:
        """Carry out a conversation, the calls of one turn at once; its result."""
        try:
            calls = next(conversation)
            while True:
                calls = conversation.send(self._call_all(calls))
        except StopIteration as end:
            result: T = end.value
            return result

    def _call_all(self, calls: Sequence[conversations.PeerCall]) -> list[conversations.Outcome]:
        if len(calls) < 2:
            return [self._call(call) for call in calls]
        if self._callers is None:
            self._callers = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="queue client")
        return list(self._callers.map(self._call, calls))

    def _call(self, call: conversations.PeerCall) -> conversations.Outcome:
        """The calls of one turn go to different shards, so no two threads use one of these clients at a time."""
        try:
            if call.url == conversations.QUEUE:
                return self.exchange(call.request, call.payload)
            if call.url not in self._shards:
                self._shards[call.url] = SyncQueueClient(call.url, **self._shard_settings)
            return self._shards[call.url].exchange(call.request, call.payload)
        except QueueLost as error:
            if call.url in self._shards:  # it may come back under its url, with nothing
                self._shards.pop(call.url).close()
            return error


POLL_S = 5.0  # of one question


class Batch(NamedTuple):
    """What a step reserved: rows and their headers in the same order, by (group, sample, segment)."""

    step: int
    rows: list[Trajectory]
    headers: list[TrajectoryHeader]
    tasks: dict[int, Task]  # by group


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
        client.publish(Version(published.lineage, step), [])
        client.retire(step)


def _next(client: SyncQueueClient, step: int, timeout_s: float) -> Batch | None:
    """Waits for groups to become ready; unblocked by workers, the end of the run (None), or ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        over = client.status().finished  # asked first: what was put before the end is still read
        left = deadline - time.monotonic()
        reply = client.reserve(step, 0.0 if over else max(0.0, min(left, POLL_S)))
        if not isinstance(reply, NotReady):
            try:
                rows = client.fetch_announced(reply.headers)
            except RowsLost:
                continue  # they are generated again, which the next question waits for
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
    task: Task
    rows: list[Trajectory]
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


def rows_of(client: SyncQueueClient, consumer: str, group: DeliveredGroup) -> list[Trajectory] | None:
    """A group's rows; None if it was given up since it was delivered, or some went with a payload shard: read again."""
    try:
        return client.fetch_announced(group.headers)
    except (ProtocolError, RowsLost):
        again = client.read(consumer, 0.0, after=group.position - 1, max_groups=1).groups
        if [_rows_named(each) for each in again] != [_rows_named(group)]:
            return None
        raise


def _rows_named(group: DeliveredGroup) -> tuple[int, list[tuple[RowKey, int]]]:
    return group.position, [(header.key, header.attempt) for header in group.headers]
