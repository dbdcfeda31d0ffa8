"""Why a client's connection does not come about, as libzmq tells it on a socket of its own."""

import contextlib
import itertools
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

_numbers = itertools.count()

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_REFUSED = "it refused the handshake; is it closed to this key?"
_UNKNOWN = "no handshake came about; is it closed to clients without a key, or to this one?"
_CLOSED = "it closed the connection; is it closed to this key, or a frame larger than queue.limits.frame_bytes?"


class HandshakeWatch:
    """The newest failure to connect, over all sockets that it was attached to."""

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
            self._look()
            with contextlib.suppress(zmq.ZMQError):  # a socket that is closed already has ended it
                self._watched.disable_monitor()
            self._events.close(0)
            self._events = None

    def why(self) -> str:
        """What keeps the connection from working; empty if nothing is known to."""
        if self._events is not None:
            self._look()
        return self._why

    def _look(self) -> None:
        assert self._events is not None
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            self._why = _judged(event["event"], self._why)


def _judged(event: int, before: str) -> str:
    """What is known after an event, given what was."""
    match event:
        case zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return before if before == _CLOSED else ""  # what closed it once will do so again
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return _REFUSED
        case zmq.EVENT_DISCONNECTED:
            return before or _CLOSED
    return before or _UNKNOWN
