"""Why a client cannot connect, from the events of libzmq's socket monitor."""

import contextlib
import itertools
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

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
