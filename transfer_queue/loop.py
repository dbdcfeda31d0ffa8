"""The queue's socket: one ROUTER, one thread.

    DEALERs --requests--> receive all that came -> handle each -> flush the journal ONCE -> replies --> DEALERs

No reply, to a request or to one that was parked, leaves before the flush that makes durable what it says. Under load
one flush serves many requests (group commit); without load every request has its own.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from rl_async.codec import Frame
from rl_async.errors import UserError
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.server import Outgoing, QueueServer

TICK_S = 0.05  # deadlines of waits and leases are kept to within this
MOST_REQUESTS = 64  # of one flush: the first of them waits for the last
MOST_BYTES = 1 << 23  # of the requests of one flush
_COPY_BELOW = 1 << 16  # bytes of a frame for which a copy is cheaper than sharing it with the sending thread


def serve(
    socket: "zmq.Socket[bytes]",
    server: QueueServer,
    flush: Callable[[], None],
    stopped: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Answer requests until ``stopped``, which is asked at least every TICK_S.

    Consumes: requests of all clients. Produces: replies, and the store's transitions. Waits for: the socket.
    Unblocked by: a request, or the next tick, which ends leases and waits that are due. Raises what ``flush`` raises;
    the replies that it was for are then not sent.
    """
    next_tick = clock()
    while not stopped():
        outgoing: list[Outgoing] = []
        if clock() >= next_tick:
            outgoing = server.tick()
            flush()  # even if there is nothing: a journal may have to say that it is alive
            next_tick = clock() + TICK_S
        if not outgoing:
            socket.poll(max(0, int((next_tick - clock()) * 1000)) + 1)
        for parts in _waiting(socket):
            outgoing += server.handle(parts)
        _deliver(socket, server, flush, outgoing)


def _waiting(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    """The messages that have come, as many as one flush should serve."""
    nbytes = 0
    for _ in range(MOST_REQUESTS):
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield parts
        nbytes += sum(map(len, parts))
        if nbytes > MOST_BYTES:
            return


def _deliver(
    socket: "zmq.Socket[bytes]", server: QueueServer, flush: Callable[[], None], outgoing: list[Outgoing]
) -> None:
    """Flush and send answers, and those that follow from one whose client is gone."""
    while outgoing:
        flush()
        failed = [message for message in outgoing if not _send(socket, message)]
        outgoing = [answer for message in failed for answer in server.undelivered(message)]


def _send(socket: Any, message: Outgoing) -> bool:
    """Whether the client's connection is still there."""
    frames: list[Frame] = [
        message.identity,
        *wire.encode(message.request_id, message.answer.reply, message.answer.payload),
    ]
    try:
        for frame in frames[:-1]:
            socket.send(frame, zmq.SNDMORE, copy=len(frame) < _COPY_BELOW)
        socket.send(frames[-1], copy=len(frames[-1]) < _COPY_BELOW)
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


def bind(context: "zmq.Context[Any]", address: str) -> Any:
    """A ROUTER on ``address``. Raises UserError if it cannot be had."""
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, wire.LINGER_MS)
    socket.set(zmq.SNDHWM, 0)  # a reply is never dropped; there are at most as many as requests
    socket.set(zmq.HEARTBEAT_IVL, wire.HEARTBEAT_MS)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # an answer to a client that is gone is an error, and its leases are taken back
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise UserError(f"the transfer queue cannot listen on {address}: {error.strerror} (queue.port)") from error
    return socket
