"""A DEALER's side of ZMTP 3.1 (https://rfc.zeromq.org/spec/37/) without encryption, for thousands of them in a process.

The queue's process gets what a client with libzmq sends, which takes several times as much processor time and two files
for each connection.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn, cast

from rl_async.messages import Frame
from rl_async.transfer_queue import wire

_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_GREETING_BYTES = 64
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
_PING = b"\x04PING" + bytes(2)  # that asks for no time to live, as libzmq's does by default


def end(why: str) -> NoReturn:
    """End the process at once: to cancel thousands of workers, each with an error of its own, tells nothing more."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


def frame(body: Frame, flags: int) -> Iterator[Frame]:
    """One frame's header and body."""
    length = len(body)
    if length > 255:
        yield bytes((flags | _LONG,)) + length.to_bytes(8, "big")
    else:
        yield bytes((flags, length))
    yield body


class Connection(asyncio.Protocol):
    """One connection: messages out, and each reply to whoever waits for its request."""

    def __init__(self) -> None:
        self._greeted = False
        self._received = b""
        self._parts: list[bytes] = []
        self._waiting: dict[bytes, asyncio.Future[list[bytes]]] = {}
        # Done when the handshake is: nothing may be sent before.
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.writelines([_GREETING, *frame(_READY, _COMMAND)])

    def _beat(self) -> None:
        asyncio.get_running_loop().call_later(wire.HEARTBEAT_MS / 1000, self._beat)
        self._send([(_PING, _COMMAND)])

    def _send(self, frames: Sequence[tuple[Frame, int]]) -> None:
        self._transport.writelines([part for body, flags in frames for part in frame(body, flags)])

    def request(self, request_id: bytes, parts: Sequence[Frame]) -> "asyncio.Future[list[bytes]]":
        """Send a message; the parts of its reply."""
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._send([(part, _MORE) for part in parts[:-1]] + [(parts[-1], 0)])
        return future

    def data_received(self, data: bytes) -> None:
        """Hand the messages over that are complete."""
        received = self._received + data if self._received else data
        if not self._greeted:
            if len(received) < _GREETING_BYTES:
                self._received = received
                return
            self._greeted, received = True, received[_GREETING_BYTES:]
        at = 0
        while len(received) >= at + 2:
            flags, size, start = received[at], received[at + 1], at + 2
            if flags & _LONG:
                start = at + 9
                size = int.from_bytes(received[at + 1 : start], "big") if len(received) >= start else 0
            if len(received) < start + size or len(received) < start:
                break
            self._take(flags, received[start : start + size])
            at = start + size
        self._received = received[at:]

    def _take(self, flags: int, body: bytes) -> None:
        if flags & _COMMAND:  # the queue's part of the handshake, or the answer to a ping
            if not self.ready.done():
                self.ready.set_result(None)
                self._beat()
            return
        self._parts.append(body)
        if not flags & _MORE:
            parts, self._parts = self._parts, []
            future = self._waiting.pop(parts[0], None)
            if future is not None and not future.done():
                future.set_result(parts)

    def connection_lost(self, error: Exception | None) -> None:
        """End: these workers do not connect again."""
        end(f"the queue closed the connection of a worker: {error}")
