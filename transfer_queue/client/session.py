"""What both clients of the queue share, without I/O: identity, hello, retries of a request, and expected replies."""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import zmq

from rl_async import messages as m
from rl_async.errors import AccessDenied, ProtocolError, QueueLost, QueueReplaced, TrainerReplaced, UserError
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.handshakes import HandshakeWatch
from rl_async.transfer_queue.auth.keys import ClientKeys, use_keys
from rl_async.transfer_queue.auth.sockets import check_private, folder_of, is_file

PATIENCE_S = 3.0  # without an answer before a client reconnects

R = TypeVar("R")

FIRST_PAUSE_S = 0.1  # before a request that was refused as too many is sent again; doubled each time, up to
LONGEST_PAUSE_S = 2.0


class Session:
    """Identity, request ids and hello of one client, and why its connection fails if it does."""

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
        shown = keys.secret.decode() if keys is not None and is_file(address) else ""
        self._hello = m.Hello(schema=m.SCHEMA, role=role, name=name, key=shown)
        self._run_id: str | None = None

    def check_place(self) -> None:
        """Raise UserError if a stranger may listen who would be shown this client's key, QueueLost if nobody can."""
        if self._keys is not None and is_file(self.address):
            check_private(folder_of(self.address))

    def prepare(self, socket: "zmq.Socket[Any]") -> None:
        """Set the options of a new socket, before it connects."""
        _set_options(socket)
        if self._keys is not None and not is_file(self.address):
            use_keys(socket, self._keys)
        self._watch.attach(socket)

    def abandon(self) -> None:
        """Stop watching the socket; call it before the socket is closed."""
        self._watch.detach()

    def hello(self) -> tuple[bytes, list[Frame]]:
        """The first message of a connection, with its id."""
        request_id = self.ids.take()
        return request_id, wire.encode(request_id, self._hello)

    def welcome(self, reply: m.Reply) -> None:
        """Check the answer to hello; remember for ``lost`` that the queue has no place for another client now.

        Raises ProtocolError if it is refused for good (AccessDenied: for want of a key), QueueReplaced if this is
        another queue.
        """
        if isinstance(reply, m.Refused) and reply.code == wire.DENIED:
            raise AccessDenied(f"the transfer queue at {self.address} refused the connection: {reply.reason}")
        self._full = reply.reason if isinstance(reply, m.Refused) and reply.code == wire.BUSY else ""
        if self._full:
            return
        if not isinstance(reply, m.Welcome):
            raise ProtocolError(f"the transfer queue at {self.address} refused the connection: {reply}")
        if self._run_id is not None and self._run_id != reply.run_id:
            raise QueueReplaced(f"the transfer queue at {self.address} was restarted and has lost its state")
        self._run_id = reply.run_id

    def lost(self, request: m.Request[Any], seconds: float) -> QueueLost:
        """The error for a request that was not answered."""
        why = self._full or self._watch.why()
        return QueueLost(
            f"the transfer queue at {self.address} did not answer {type(request).__name__} for {seconds:.0f} s"
            + (f": {why}" if why else "")
        )


def send(socket: "zmq.Socket[bytes]", frames: Sequence[Frame]) -> None:
    """Hand a message to the socket, or drop it if the queue has refused the connection: libzmq then has no other.

    It does not wait, since nothing would end the wait; the request is sent again on the next connection.
    """
    with contextlib.suppress(zmq.Again):
        wire.send(socket, frames)


def wait_of(request: m.Request[Any]) -> float:
    """Seconds for which the queue may hold back the answer on purpose."""
    return request.wait_s if isinstance(request, m.LongPoll) else 0.0


def refusal(reply: m.Reply) -> str:
    """The code of a refusal; empty for other replies."""
    return reply.code if isinstance(reply, m.Refused) else ""


class Retry(NamedTuple):
    """Send the request again after ``pause_s`` seconds, on a new connection if ``reconnect``."""

    pause_s: float
    reconnect: bool


class RequestExchange:
    """One request until it is answered: how long to wait, and when to back off, to reconnect and to give up.

    Every request may be sent twice: the queue answers a repetition as it answered the first.
    """

    def __init__(
        self, session: Session, request: m.Request[Any], payload: Sequence[Frame], timeout_s: float, patience_s: float
    ) -> None:
        wait_s = wait_of(request)
        self._session, self._request = session, request
        self._began = time.monotonic()
        self._deadline = self._began + wait_s + timeout_s
        self._patience_s, self._pause_s = wait_s + patience_s, FIRST_PAUSE_S
        self.request_id = session.ids.take()
        self.frames = wire.encode(self.request_id, request, payload)

    def patience_s(self) -> float:
        """Seconds to wait for the reply after sending."""
        return max(0.0, min(self._patience_s, self._deadline - time.monotonic()))

    def after(self, answer: wire.ReplyMessage | None) -> wire.ReplyMessage | Retry:
        """The final answer, or how to try again after ``answer`` (None: there was no reply in time).

        Raises QueueLost past the deadline, and ProtocolError if the queue did not understand the request.
        """
        code = "" if answer is None else refusal(answer.reply)
        if answer is not None and code not in (wire.HELLO, wire.BUSY):
            return wire.checked(answer)
        now = time.monotonic()
        if now >= self._deadline:
            raise self._session.lost(self._request, now - self._began)
        if code != wire.BUSY:  # the queue is silent, or does not know this connection
            self._patience_s *= 2
        if answer is None:
            return Retry(0.0, reconnect=True)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return Retry(min(pause_s, self._deadline - now), reconnect=code != wire.BUSY)


def expect(reply: m.Reply, *kinds: type[R]) -> R:
    """The reply, if it is of one of these kinds. Raises ProtocolError with the queue's reason otherwise.

    Raises TrainerReplaced, whatever is expected, if the queue serves a newer trainer now.
    """
    if isinstance(reply, m.Refused) and reply.code == wire.REPLACED:
        raise TrainerReplaced(f"the transfer queue refused: {reply.reason}")
    if isinstance(reply, kinds):
        return reply
    if isinstance(reply, m.Refused):
        raise ProtocolError(f"the transfer queue refused: {reply.reason} ({reply.code})")
    raise ProtocolError(f"the transfer queue answered {reply}")


def _set_options(socket: "zmq.Socket[Any]") -> None:
    """Set the options of a client's socket, before it connects."""
    socket.set(zmq.LINGER, 0)  # what is unanswered is sent again on a new connection
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    socket.set(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
