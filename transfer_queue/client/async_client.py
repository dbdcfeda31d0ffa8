"""The client of the queue for an event loop; ``sync_client.py`` has the one for a thread that may block.

Every request may be sent twice: the queue answers a repetition as it answered the first. So a client that hears
nothing opens a new connection, says hello, and sends its unanswered requests again, until their deadline.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import zmq
import zmq.asyncio

from rl_async import messages as m
from rl_async.errors import ProtocolError, QueueLost
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client import conversations
from rl_async.transfer_queue.client.conversations import SHARD_S
from rl_async.transfer_queue.client.outbox import Outbox
from rl_async.transfer_queue.client.session import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PATIENCE_S,
    Session,
    decode_row,
    expect,
    expect_either,
    is_busy,
    must_repeat,
    send,
    wait_of,
)

R = TypeVar("R", bound=m.Reply)
S = TypeVar("S", bound=m.Reply)
T = TypeVar("T")


class QueueClient:
    """Any number of concurrent requests over one DEALER. Use it as ``async with``, on one event loop.

    All methods raise QueueLost when no answer came within ``timeout_s`` beyond the wait asked for, and ProtocolError
    when the answer makes no sense.
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
    ) -> None:
        """``patience_s`` without an answer, beyond the wait asked for, make it reconnect; doubled each time.

        A payload shard that does not answer for ``shard_s`` is passed over.
        """
        self._session = Session(address, role, name, keys)
        self._connect_shard = partial(
            QueueClient, role=role, name=name, timeout_s=shard_s, patience_s=patience_s, keys=keys
        )
        self._shards: dict[str, QueueClient] = {}  # by url
        self._sending = conversations.Sending()
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._hello_id = b""
        self._connection = 0  # counts connections
        self._pending: dict[bytes, asyncio.Future[wire.ReplyMessage]] = {}
        self._broken: QueueLost | ProtocolError | None = None
        self._outbox = Outbox(self._put)

    @property
    def worker(self) -> str:
        """The name under which this client leases, unique to it."""
        return self._session.worker

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for url in list(self._shards):
            await self._part(url)
        self._end(QueueLost("the client of the transfer queue was closed"))
        await self._disconnect()
        if self._context is not None:
            self._context.term()

    async def _connect(self) -> None:
        if self._context is None:
            raise RuntimeError("use the queue client as `async with`")
        self._connection += 1
        self._socket = self._context.socket(zmq.DEALER)
        self._session.prepare(self._socket)
        self._socket.connect(self._session.address)
        self._hello_id, frames = self._session.hello()
        await send(self._socket, frames)
        self._reader = asyncio.create_task(self._read(self._socket), name="queue client reader")

    async def _disconnect(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait([reader])
        if self._socket is not None:
            self._session.abandon()
            self._socket.close(0)

    async def _reconnect(self, connection: int) -> None:
        """Replace the connection, unless another request has done so since ``connection`` was counted."""
        if connection == self._connection and self._broken is None:
            await self._disconnect()
            await self._connect()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        """Consumes replies; produces the results of pending requests. Waits for the socket; ended by cancellation.

        An error that concerns the whole connection ends every request, present and future.
        """
        try:
            while True:
                message = wire.decode_reply(await socket.recv_multipart(copy=False))
                if message.request_id == self._hello_id:
                    self._session.welcome(message.reply)
                    continue
                future = self._pending.get(message.request_id)
                if future is not None and not future.done():
                    future.set_result(message)
        except (QueueLost, ProtocolError) as error:
            self._end(error)

    def _end(self, error: QueueLost | ProtocolError) -> None:
        """Every request, present and future, fails with ``error``."""
        self._broken = error
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)

    async def exchange(
        self, request: m.Request, payload: Sequence[Frame] = (), *, timeout_s: float | None = None
    ) -> wire.ReplyMessage:
        """Send a request until it is answered."""
        wait_s, timeout_s = wait_of(request), self._timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        deadline = began + wait_s + timeout_s
        patience, pause = wait_s + self._patience_s, FIRST_PAUSE_S
        request_id = self._session.ids.take()
        frames = wire.encode(request_id, request, payload)
        try:
            while True:
                if self._broken is not None:
                    raise self._broken
                future = asyncio.get_running_loop().create_future()
                self._pending[request_id] = future
                connection = self._connection
                if self._socket is None:
                    raise RuntimeError("use the queue client as `async with`")
                await send(self._socket, frames)
                await asyncio.wait([future], timeout=max(0.0, min(patience, deadline - time.monotonic())))
                if future.done() and not must_repeat(future.result().reply):
                    return wire.checked(future.result())
                if time.monotonic() >= deadline:
                    raise self._session.lost(request, time.monotonic() - began)
                if future.done():
                    await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                    pause = min(2 * pause, LONGEST_PAUSE_S)
                    if is_busy(future.result().reply):
                        continue
                patience *= 2
                await self._reconnect(connection)
        finally:
            self._pending.pop(request_id, None)

    async def request(
        self, message: m.Request, frames: Sequence[Frame] = (), *, timeout_s: float | None = None
    ) -> tuple[m.Reply, list[Frame]]:
        """Send any request; its reply, which may be Refused, and the reply's payload."""
        answer = await self.exchange(message, frames, timeout_s=timeout_s)
        return answer.reply, answer.payload

    async def _ask(self, request: m.Request, kind: type[R]) -> R:
        return expect((await self.exchange(request)).reply, kind)

    async def _ask_either(self, request: m.Request, kind: type[R], other: type[S]) -> R | S:
        return expect_either((await self.exchange(request)).reply, kind, other)

    # --- agent workers ----------------------------------------------------------------------------------------------

    async def lease(self, max_groups: int, wait_s: float, task: m.Task | None = None) -> m.Leased:
        """Groups to generate, empty if there were none within ``wait_s``; of a ``task`` of the caller's own, one."""
        request = m.Lease(worker=self.worker, max_groups=max_groups, wait_s=wait_s, task=task)
        return await self._ask(request, m.Leased)

    async def renew(self) -> m.Done:
        """Keep this worker's leases."""
        return await self._ask(m.Renew(worker=self.worker), m.Done)

    def put(
        self, *rows: m.Trajectory, media: Mapping[str, bytes] | None = None
    ) -> "asyncio.Future[m.Done | m.Refused]":
        """Hand over all rows of one sample, from segment 0; Refused (``fenced``) if they are no longer wanted.

        ``media`` has the bytes, by hash, of what the rows refer to.
        """
        return self._outbox.put(conversations.parcel(rows, media))

    async def _put(self, parcels: list[conversations.Parcel]) -> list[m.Refused | None]:
        return await self._converse(conversations.put(self.worker, parcels, self._sending, self._timeout_s))

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> m.Done | m.Refused:
        """Give up one attempt at one sample."""
        request = m.Fail(worker=self.worker, group_id=group_id, sample=sample, attempt=attempt, error=error)
        return await self._ask_either(request, m.Done, m.Refused)

    # --- engines ----------------------------------------------------------------------------------------------------

    async def engines(self, after: int = -1, wait_s: float = 0.0) -> m.EngineList:
        """The registry, at once or when its revision passes ``after``."""
        return await self._ask(m.Engines(after=after, wait_s=wait_s), m.EngineList)

    async def register_engine(self, engine_id: str, url: str, kind: str) -> m.Done:
        """Announce an engine that answers its health probe."""
        return await self._ask(m.RegisterEngine(engine_id=engine_id, url=url, kind=kind), m.Done)

    async def remove_engine(self, engine_id: str, reason: str) -> m.Done:
        """Announce that an engine is gone."""
        return await self._ask(m.RemoveEngine(engine_id=engine_id, reason=reason), m.Done)

    async def confirm(self, engine_id: str, version: m.Version) -> m.Done | m.Refused:
        """An engine caught up; Refused if it was removed meanwhile."""
        return await self._ask_either(m.Confirm(engine_id=engine_id, version=version), m.Done, m.Refused)

    async def publish(self, version: m.Version, engines: Sequence[str]) -> m.Done:
        """These engines confirmed ``version``."""
        return await self._ask(m.Publish(version=version, engines=list(engines)), m.Done)

    # --- the run ----------------------------------------------------------------------------------------------------

    async def status(self) -> m.StatusReport:
        """Counts of everything."""
        return await self._ask(m.Status(), m.StatusReport)

    async def submit(self, tasks: Sequence[m.Task]) -> m.Done | m.Refused:
        """Tasks to admit before those of the queue's own; Refused (``full``) if too many wait."""
        return await self._ask_either(m.Submit(tasks=list(tasks)), m.Done, m.Refused)

    async def requeue(self, group_id: int) -> m.Done | m.Refused:
        """Admit the task of a dead letter once more, as a new group; Refused if it could not be trained."""
        return await self._ask_either(m.Requeue(group_id=group_id), m.Done, m.Refused)

    async def drain(self, on: bool = True) -> m.Done:
        """Stop admission, or go on with it."""
        return await self._ask(m.Drain(on=on), m.Done)

    async def inspect(self) -> m.Inspection:
        """Counts, ages, rates and dead letters."""
        return await self._ask(m.Inspect(), m.Inspection)

    async def group_list(self, after: int = -1, limit: int = 1000, state: str = "") -> m.GroupList:
        """Groups by id, of one state unless it is empty."""
        return await self._ask(m.ListGroups(after=after, limit=limit, state=state), m.GroupList)

    async def peek(self, group_id: int) -> m.Peeked | m.Refused:
        """One group with the headers of what is here of it; Refused if it is not here."""
        return await self._ask_either(m.Peek(group_id=group_id), m.Peeked, m.Refused)

    async def evaluate(self, eval_id: int) -> m.Done:
        """Begin an evaluation."""
        return await self._ask(m.Evaluate(eval_id=eval_id), m.Done)

    async def eval_result(self, eval_id: int, wait_s: float) -> m.Reserved | m.NotReady:
        """What an evaluation produced, once it is complete."""
        return await self._ask_either(m.EvalResult(eval_id=eval_id, wait_s=wait_s), m.Reserved, m.NotReady)

    async def finish(self) -> m.Done:
        """The run is over."""
        return await self._ask(m.Finish(), m.Done)

    # --- rows, for the trainer and for other readers -----------------------------------------------------------------

    async def fetch(self, rows: Sequence[m.RowKey]) -> list[m.Trajectory]:
        """The trajectories of these rows. Raises RowsLost if they went with a payload shard."""
        return [decode_row(row) for row in await self._converse(conversations.fetch(rows, self._timeout_s))]

    async def fetch_media(self, rows: Sequence[m.Trajectory]) -> dict[str, bytes]:
        """The bytes, by hash, of all media that these rows refer to."""
        return await self._converse(conversations.fetch_media(rows, self._timeout_s))

    async def subscribe(self, consumer: str, *, oldest: bool = False) -> m.Subscription:
        """Read what is trained from now on, or from the oldest group that is here; a known consumer goes on."""
        return await self._ask(m.Subscribe(consumer=consumer, oldest=oldest), m.Subscription)

    async def read(self, consumer: str, wait_s: float, *, after: int = -1, max_groups: int = 16) -> m.Delivered:
        """Trained groups in order of commit, behind ``after`` or what was acknowledged; ``fetch`` has the rows."""
        request = m.Read(consumer=consumer, after=after, max_groups=max_groups, wait_s=wait_s)
        return await self._ask(request, m.Delivered)

    async def acknowledge(self, consumer: str, position: int) -> m.Done:
        """Everything up to ``position`` was read, and need not be kept for this consumer."""
        return await self._ask(m.Acknowledge(consumer=consumer, position=position), m.Done)

    async def unsubscribe(self, consumer: str) -> m.Done:
        """Forget the consumer."""
        return await self._ask(m.Unsubscribe(consumer=consumer), m.Done)

    # --- payload shards ---------------------------------------------------------------------------------------------

    async def _converse(self, conversation: conversations.Conversation[T]) -> T:
        """Make the calls of a conversation, those of one turn at once."""
        try:
            calls = next(conversation)
            while True:
                calls = conversation.send(await asyncio.gather(*map(self._call, calls)))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _call(self, call: conversations.Call) -> conversations.Outcome:
        try:
            client = self if call.url == conversations.QUEUE else await self._shard(call.url)
            return await client.exchange(call.request, call.payload)
        except QueueLost as error:
            if call.url in self._shards:  # it may come back under its url, with nothing
                await self._part(call.url)
            return error

    async def _shard(self, url: str) -> "QueueClient":
        if url not in self._shards:
            self._shards[url] = await self._connect_shard(url).__aenter__()
        return self._shards[url]

    async def _part(self, url: str) -> None:
        await self._shards.pop(url).__aexit__(None, None, None)
