"""What the two clients of the queue share: identity, hello, and judging replies."""

import os
import secrets
from typing import Any, TypeVar

import zmq

from rl_async import codec
from rl_async import messages as m
from rl_async.codec import Frame
from rl_async.errors import ProtocolError, QueueLost
from rl_async.transfer_queue import wire

PATIENCE_S = 3.0  # without an answer for this long (beyond the wait asked for), reconnect; doubled each time

R = TypeVar("R", bound=m.Reply)
S = TypeVar("S", bound=m.Reply)

_decode_row = codec.decoder(m.Trajectory)


class Session:
    """What both clients share: who they are, request ids, and what they think of the queue's replies."""

    def __init__(self, address: str, role: str, name: str) -> None:
        self.address = address
        self.ids = wire.RequestIds()
        # Another process under the same name must not keep this one's leases alive.
        self.worker = f"{name}-{os.getpid()}-{secrets.token_hex(3)}"
        self._hello = m.Hello(schema=m.SCHEMA, role=role, name=name)
        self._run_id: str | None = None

    def hello(self) -> tuple[bytes, list[Frame]]:
        """The first message of a connection, with its id."""
        request_id = self.ids.take()
        return request_id, wire.encode(request_id, self._hello)

    def welcome(self, reply: m.Reply) -> None:
        """Judge the answer to hello. Raises ProtocolError if it is refused, QueueLost if this is another queue."""
        if not isinstance(reply, m.Welcome):
            raise ProtocolError(f"the transfer queue at {self.address} refused the connection: {reply}")
        if self._run_id is not None and self._run_id != reply.run_id:
            raise QueueLost(f"the transfer queue at {self.address} was restarted and has lost its state")
        self._run_id = reply.run_id

    def lost(self, request: m.Request, seconds: float) -> QueueLost:
        """The error for a request that nobody answered."""
        return QueueLost(
            f"the transfer queue at {self.address} did not answer {type(request).__name__} for {seconds:.0f} s"
        )


def wait_of(request: m.Request) -> float:
    """How long the queue may take on purpose to answer."""
    return request.wait_s if isinstance(request, m.Lease | m.Reserve | m.EvalResult | m.Engines) else 0.0


def wants_hello(reply: m.Reply) -> bool:
    """Whether the queue does not know this connection: it was restarted, or has forgotten a silent client."""
    return isinstance(reply, m.Refused) and reply.code == "hello"


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


def trajectories(message: wire.ReplyMessage, asked: int) -> list[m.Trajectory]:
    """Decode the ``asked`` rows of a Fetch; their arrays are views of the received frames."""
    expect(message.reply, m.Rows)
    if len(message.payload) != asked:
        raise ProtocolError(f"{asked} rows were asked for, {len(message.payload)} came")
    return [_decode_row(frame) for frame in message.payload]


def set_options(socket: "zmq.Socket[Any]") -> None:
    """Of a client's socket, before it connects."""
    socket.set(zmq.LINGER, 0)  # what is unanswered is sent again on a new connection
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    socket.set(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
