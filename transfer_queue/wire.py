"""The envelope on the queue's sockets, the same in both directions: ``[request id, msgpack message, payload...]``.

A DEALER sends exactly these frames; a ROUTER sees the sender's identity in front of them.
"""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from rl_async.codec import Frame
from rl_async.errors import AccessDenied, ProtocolError
from rl_async.files import UNDECODABLE
from rl_async.messages import Malformed, Refused, Reply, ReplyType, Request, RequestType
from rl_async.process.allocation import no_collection

ID_BYTES = 8
LINGER_MS = 1000  # for replies that are on their way when a socket closes
HEARTBEAT_MS = 5000  # a client notices after two of these that the queue's host is gone
JOINED_BYTES = 1 << 20
ALONE_BYTES = 1 << 16  # of a row that is a frame of its own

# Codes of refusals that clients act upon.
HELLO = "hello"  # the queue does not know this connection: it was restarted, or has forgotten a silent client
BUSY = "busy"  # the queue asks this client to wait and to ask again
DENIED = "denied"  # the client has shown no key, or one that is not allowed (any more)
FORBIDDEN = "forbidden"  # the client's key has a role that may not do this
SHARDED = "sharded"  # a payload that should have gone to a shard
SHARD_LOST = "shard_lost"  # it names a shard that does not count any more
MEDIA = "media"  # the sample refers to media that are not here: put it again with them
REPLACED = "replaced"  # the request of a trainer that another has replaced
ROWS_LOST = "rows_lost"  # what was asked for went with a shard

_COPY_BELOW = 1 << 16  # bytes of a frame; a smaller one's view would hold on to the whole receive buffer

# Of bytes that are no message: wrong types or lengths, text that is not UTF-8, a nesting that is too deep.

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
    """The rows in few frames, since each costs both sides a call: a large row is one of its own, without a copy, and
    small ones are copied into frames of not much more than JOINED_BYTES."""
    frames: list[Frame] = []
    some: list[Frame] = []
    size = 0
    for row in rows:
        alone = len(row) >= ALONE_BYTES
        if some and (alone or size >= JOINED_BYTES):
            frames.append(b"".join(some))
            some, size = [], 0
        if alone:
            frames.append(row)
        else:
            some.append(row)
            size += len(row)
    return [*frames, b"".join(some)] if some else frames


def split(frames: Sequence[Frame], lengths: Sequence[int]) -> list[memoryview]:
    """The rows that ``join`` put into ``frames``, without a copy. Raises ProtocolError if they do not fit."""
    rows: list[memoryview] = []
    left = iter(frames)
    frame, start = memoryview(b""), 0
    for length in lengths:
        if start == len(frame):
            frame, start = memoryview(next(left, b"")), 0
        end = start + length
        if not start < end <= len(frame):
            raise ProtocolError(f"a row of {length} bytes is not in a frame of which {len(frame) - start} are left")
        rows.append(frame[start:end])
        start = end
    if start != len(frame) or next(left, None) is not None:
        raise ProtocolError("there are more bytes than rows")
    return rows


def decode_request(parts: Sequence[Any]) -> RequestMessage:
    """Decode the frames behind the sender's identity. Raises ProtocolError saying what is wrong with them."""
    if len(parts) < 2 or len(parts[0]) != ID_BYTES:
        raise ProtocolError(f"a request is an id of {ID_BYTES} bytes, a message and its payload")
    try:
        request = _requests.decode(body(parts[1]))
    except UNDECODABLE as error:
        raise ProtocolError(str(error)) from error
    return RequestMessage(bytes(parts[0]), request, [body(part) for part in parts[2:]])


def decode_reply(parts: Sequence[Any]) -> ReplyMessage:
    """Decode a reply. Raises ProtocolError if it is none."""
    if len(parts) < 2:
        raise ProtocolError("a reply has at least two frames")
    try:
        with no_collection():
            reply = _replies.decode(body(parts[1]))
    except UNDECODABLE as error:
        raise ProtocolError(f"malformed reply of the transfer queue: {error}") from error
    return ReplyMessage(bytes(parts[0]), reply, [body(part) for part in parts[2:]])


def send(socket: Any, frames: Sequence[Frame]) -> None:
    """Send a message without waiting: large frames as they are, small ones copied, which costs less than sharing them.

    Raises zmq.ZMQError, always for the first frame, if that is not possible.
    """
    *first, last = frames
    for frame in first:
        socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK, copy=len(frame) < _COPY_BELOW)
    socket.send(last, zmq.NOBLOCK, copy=len(last) < _COPY_BELOW)


def body(part: Any) -> Frame:
    """The bytes of a received ``zmq.Frame``, without a copy if they are many; plain bytes are passed through."""
    if isinstance(part, bytes | memoryview):
        return part
    return part.bytes if len(part) < _COPY_BELOW else part.buffer


def checked(message: ReplyMessage) -> ReplyMessage:
    """The same message. Raises ProtocolError if the queue did not understand the request, AccessDenied if it may not be
    made with this client's key."""
    if isinstance(message.reply, Malformed):
        raise ProtocolError(f"the transfer queue did not understand a request: {message.reply.reason}")
    if isinstance(message.reply, Refused) and message.reply.code in (DENIED, FORBIDDEN):
        raise AccessDenied(f"the transfer queue refused: {message.reply.reason}")
    return message
