"""The envelope on the queue's sockets, the same in both directions: ``[request id, msgpack message, payload...]``.

A DEALER sends exactly these frames; a ROUTER sees the sender's identity in front of them.
"""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from rl_async.errors import ProtocolError
from rl_async.files import UNDECODABLE
from rl_async.messages import Frame, Reply, ReplyType, Request, RequestType
from rl_async.process.allocation import no_collection

ID_BYTES = 8
# For replies in flight when a socket closes.
LINGER_MS = 1000
# After two of these without an answer a client knows that the queue's host is gone.
HEARTBEAT_MS = 5000
# A row of SEPARATE_BYTES is a frame of its own; smaller ones are joined up to JOINED_BYTES.
JOINED_BYTES = 1 << 20
SEPARATE_BYTES = 1 << 16

# Codes of refusals that clients act upon.
# The queue does not know this connection: it was restarted, or has forgotten a silent client.
HELLO = "hello"
# The queue asks this client to wait and to ask again.
BUSY = "busy"
# The client has shown no key, or one that is not allowed (any more).
DENIED = "denied"
# The client's key has a role that may not send this request.
FORBIDDEN = "forbidden"
# The payload should have gone to a shard.
SHARDED = "sharded"
# The sample names a shard that is not registered any more.
SHARD_LOST = "shard_lost"
# The sample refers to media that the queue lacks: put it again with them.
MEDIA = "media"
# Another trainer has replaced the one that sent the request.
REPLACED = "replaced"
# The rows were lost with a shard.
ROWS_LOST = "rows_lost"

# A view of a smaller frame would hold on to the whole receive buffer.
_COPY_BELOW = 1 << 16

_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(RequestType)
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ReplyType)
encode_message = msgspec.msgpack.Encoder().encode


class RequestMessage(NamedTuple):
    """A decoded request with its id and payload frames."""

    request_id: bytes
    request: Request[Any]
    payload: list[Frame]


class ReplyMessage(NamedTuple):
    """A decoded reply with its request's id and payload frames."""

    request_id: bytes
    reply: Reply
    payload: list[Frame]


class RequestIds:
    """Ids that no other client uses: a random start, then counting."""

    def __init__(self) -> None:
        self._next = secrets.randbits(8 * ID_BYTES)

    def take(self) -> bytes:
        """The next id, which no other request has."""
        self._next = (self._next + 1) % (1 << 8 * ID_BYTES)
        return self._next.to_bytes(ID_BYTES, "big")


def encode(request_id: bytes, message: Request[Any] | Reply, payload: Sequence[Frame] = ()) -> list[Frame]:
    """The frames of one message, in the order of the envelope."""
    return [request_id, encode_message(message), *payload]


def join(rows: Sequence[Frame]) -> list[Frame]:
    """Pack rows into few frames, since each costs both sides a call.

    A large row becomes a frame without a copy; small ones are copied into frames of not much more than JOINED_BYTES.
    """
    frames: list[Frame] = []
    some: list[Frame] = []
    size = 0
    for row in rows:
        separate = len(row) >= SEPARATE_BYTES
        if some and (separate or size >= JOINED_BYTES):
            frames.append(b"".join(some))
            some, size = [], 0
        if separate:
            frames.append(row)
        else:
            some.append(row)
            size += len(row)
    return [*frames, b"".join(some)] if some else frames


def split(frames: Sequence[Frame], lengths: Sequence[int]) -> list[memoryview]:
    """Unpack the rows that ``join`` packed, without a copy. Raises ProtocolError if their lengths do not fit."""
    rows: list[memoryview] = []
    left = iter(frames)
    frame, start = memoryview(b""), 0
    for length in lengths:
        if start == len(frame):
            frame, start = memoryview(next(left, b"")), 0
        end = start + length
        if not start < end <= len(frame):
            raise ProtocolError(f"a row of {length} bytes is not in a frame with {len(frame) - start} left")
        rows.append(frame[start:end])
        start = end
    if start != len(frame) or next(left, None) is not None:
        raise ProtocolError("there are more bytes than rows")
    return rows


def decode_request(parts: Sequence[Any]) -> RequestMessage:
    """Decode the frames behind the sender's identity. Raises ProtocolError if they are malformed."""
    if len(parts) < 2 or len(parts[0]) != ID_BYTES:
        raise ProtocolError(f"a request is an id of {ID_BYTES} bytes, a message and its payload")
    try:
        request = _requests.decode(body(parts[1]))
    except UNDECODABLE as error:
        raise ProtocolError(str(error)) from error
    return RequestMessage(bytes(parts[0]), request, [body(part) for part in parts[2:]])


def decode_reply(parts: Sequence[Any]) -> ReplyMessage:
    """Decode a reply. Raises ProtocolError if it is malformed."""
    if len(parts) < 2:
        raise ProtocolError("a reply has at least two frames")
    try:
        frame = body(parts[1])
        with no_collection():
            reply = _replies.decode(frame)
    except UNDECODABLE as error:
        raise ProtocolError(f"malformed reply of the transfer queue: {error}") from error
    return ReplyMessage(bytes(parts[0]), reply, [body(part) for part in parts[2:]])


def send(socket: Any, frames: Sequence[Frame]) -> None:
    """Send a message without waiting. Small frames are copied, which costs less than sharing them.

    Raises zmq.ZMQError, always at the first frame, if the socket takes no message.
    """
    *first, last = frames
    for frame in first:
        socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=len(frame) < _COPY_BELOW)
    socket.send(last, zmq.NOBLOCK, copy=len(last) < _COPY_BELOW)


def body(part: Any) -> Frame:
    """The bytes of a received ``zmq.Frame``, without a copy of large ones; plain bytes are passed through."""
    if isinstance(part, bytes | memoryview):
        return part
    return part.bytes if len(part) < _COPY_BELOW else part.buffer
