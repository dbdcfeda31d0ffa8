"""The client of the queue for an event loop; ``sync_client.py`` has the one for a thread that may block.

Every request may be sent twice: the queue answers a repetition as it answered the first. So a client that hears
nothing opens a new connection, says hello, and sends its unanswered requests again, until their deadline.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, Unpack

import zmq

from rl_async import messages as m
from rl_async.errors import ProtocolError, QueueLost
from rl_async.messages.codec import Frame
from rl_async.tasks import together
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import conversations
from rl_async.transfer_queue.client.loop_socket import LoopSocket
from rl_async.transfer_queue.client.outbox import Outbox
from rl_async.transfer_queue.client.session import RequestExchange, Retry
from rl_async.transfer_queue.client.verbs import ClientSettings, ClientVerbs

T = TypeVar("T")


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
                    outcomes = await together(*map(self._call, calls))
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
