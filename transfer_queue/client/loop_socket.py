"""A ZeroMQ socket on an event loop, without a task: what comes is handed to a function, what is sent never waits.

    libzmq's descriptor is readable --> take messages until there are none --> received(frames of each)

The descriptor says only that something may have changed, and a send may take note of that in its place. So after each
send the socket is asked whether messages have come.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from rl_async.messages.codec import Frame
from rl_async.transfer_queue.client.session import send

AT_ONCE = 64  # messages, before the loop looks after others


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
        for _ in range(AT_ONCE):
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
