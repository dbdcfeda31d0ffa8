"""What the two clients of the queue share: identity, hello, and judging replies."""

import contextlib
import os
import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from rl_async import messages as m
from rl_async.errors import ProtocolError, QueueLost, UserError
from rl_async.messages import codec
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.handshakes import HandshakeWatch
from rl_async.transfer_queue.auth.keys import ClientKeys, use_keys

PATIENCE_S = 3.0  # without an answer before a client reconnects

R = TypeVar("R", bound=m.Reply)
S = TypeVar("S", bound=m.Reply)

FIRST_PAUSE_S = 0.1  # before a request that was refused as too many is sent again; doubled each time, up to
LONGEST_PAUSE_S = 2.0

decode_row = codec.decoder(m.Trajectory)


class Session:
    """What both clients share: who they are, request ids, and what they think of the queue's replies."""

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
        self._hello = m.Hello(schema=m.SCHEMA, role=role, name=name)
        self._run_id: str | None = None

    def prepare(self, socket: "zmq.Socket[Any]") -> None:
        """Options of a new socket, before it connects."""
        _set_options(socket)
        use_keys(socket, self._keys)
        self._watch.attach(socket)

    def abandon(self) -> None:
        """Before the socket is closed."""
        self._watch.detach()

    def hello(self) -> tuple[bytes, list[Frame]]:
        """The first message of a connection, with its id."""
        request_id = self.ids.take()
        return request_id, wire.encode(request_id, self._hello)

    def welcome(self, reply: m.Reply) -> None:
        """Judge the answer to hello. That there is no place now is kept for ``lost``.

        Raises ProtocolError if it is refused for good, QueueLost if this is another queue.
        """
        self._full = reply.reason if is_busy(reply) and isinstance(reply, m.Refused) else ""
        if self._full:
            return
        if not isinstance(reply, m.Welcome):
            raise ProtocolError(f"the transfer queue at {self.address} refused the connection: {reply}")
        if self._run_id is not None and self._run_id != reply.run_id:
            raise QueueLost(f"the transfer queue at {self.address} was restarted and has lost its state")
        self._run_id = reply.run_id

    def lost(self, request: m.Request, seconds: float) -> QueueLost:
        """The error for a request that nobody answered."""
        why = self._full or self._watch.why()
        return QueueLost(
            f"the transfer queue at {self.address} did not answer {type(request).__name__} for {seconds:.0f} s"
            + (f": {why}" if why else "")
        )


async def send(socket: zmq.asyncio.Socket, frames: Sequence[Frame]) -> None:
    """Hand a message to the socket, or drop it if the queue has refused the connection: libzmq then has no other.

    It does not wait, since nothing would end the wait; the request is sent again on the next connection.
    """
    with contextlib.suppress(zmq.Again):
        await socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


def send_sync(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> None:
    """The same, for a thread that may block."""
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(frames, zmq.NOBLOCK)


def wait_of(request: m.Request) -> float:
    """How long the queue may take on purpose to answer."""
    return request.wait_s if isinstance(request, m.LongPoll) else 0.0


def wants_hello(reply: m.Reply) -> bool:
    """Whether the queue does not know this connection: it was restarted, or has forgotten a silent client."""
    return isinstance(reply, m.Refused) and reply.code == "hello"


def is_busy(reply: m.Reply) -> bool:
    """Whether the queue asks this client to wait and ask again."""
    return isinstance(reply, m.Refused) and reply.code == "busy"


def must_repeat(reply: m.Reply) -> bool:
    """Whether the request was not looked at and is to be sent again."""
    return wants_hello(reply) or is_busy(reply)


def expect(reply: m.Reply, kind: type[R]) -> R:
    """The reply, which must be of this kind. Raises ProtocolError with the queue's reason otherwise."""
    return expect_either(reply, kind, kind)


def expect_either(reply: m.Reply, kind: type[R], other: type[S]) -> R | S:
    """The reply, which must be of one of two kinds. Raises ProtocolError with the queue's reason otherwise."""
    if isinstance(reply, (kind, other)):
        return reply
    if isinstance(reply, m.Refused):
        raise ProtocolError(f"the transfer queue refused: {reply.reason} ({reply.code})")
    raise ProtocolError(f"the transfer queue answered {reply}")


def _set_options(socket: "zmq.Socket[Any]") -> None:
    """Of a client's socket, before it connects."""
    socket.set(zmq.LINGER, 0)  # what is unanswered is sent again on a new connection
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    socket.set(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
