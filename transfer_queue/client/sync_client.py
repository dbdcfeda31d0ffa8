"""The client of the queue for a thread that may block; ``async_client.py`` has the one for an event loop."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import zmq

from rl_async import messages as m
from rl_async.errors import QueueLost
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import conversations
from rl_async.transfer_queue.client.session import RequestExchange, Retry, send
from rl_async.transfer_queue.client.verbs import ClientSettings, ClientVerbs

T = TypeVar("T")
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
