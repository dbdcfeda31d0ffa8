"""The queue's socket: one ROUTER, one thread.

    DEALERs --requests--> receive all that came -> handle each -> flush the journal ONCE -> replies --> DEALERs

No reply, to a request or to one that was parked, leaves before the flush that makes durable what it says. Under load
one flush serves many requests (group commit); without load every request has its own.
"""

import itertools
import logging
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import zmq

from rl_async.configs.schema.queue import QueueLimits
from rl_async.errors import UserError
from rl_async.process.private_folder import make_private
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.authenticator import Authenticator, lock
from rl_async.transfer_queue.auth.keys import ServerKeys
from rl_async.transfer_queue.auth.sockets import folder_of, is_file
from rl_async.transfer_queue.server.gate import Outgoing

log = logging.getLogger("rl_async.queue")

TICK_S = 0.05  # deadlines of waits and leases are kept to within this
MOST_REQUESTS = 64  # of one flush: the first of them waits for the last
MOST_BYTES = 1 << 23  # of the requests of one flush
MOST_UNHANDLED = 64  # requests of one connection in the queue's memory; its next ones stay in the network
MOST_UNREAD = 1 << 14  # replies that one connection leaves unread; it counts as gone with the next
PROBE_S, PROBES = 5, 2  # a host that has been silent for PROBE_S is probed, and counts as gone after so many probes
OTHER_FILES = 256  # open files besides those of connections


SLOW_FLUSH_S = 1.0  # and longer is logged


class RequestServer(Protocol):
    """What answers requests. All that its methods return is to be sent after the next flush."""

    def begin_turn(self) -> None: ...
    def handle(self, parts: Sequence[Any], user: bytes = b"") -> list[Outgoing]: ...
    def tick(self) -> list[Outgoing]: ...
    def undelivered(self, message: Outgoing) -> list[Outgoing]: ...


def serve(
    socket: "zmq.Socket[bytes]",
    server: RequestServer,
    flush: Callable[[], None],
    stopped: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    auth: Authenticator | None = None,
) -> None:
    """Answer requests until ``stopped``, which is asked at least every TICK_S.

    Consumes: requests of all clients, and with ``auth`` libzmq's questions whether a client may connect. Produces:
    replies, and the store's transitions. Waits for: the socket and those questions. Unblocked by: either of them, or
    the next tick, which ends leases and waits that are due. Raises what ``flush`` raises, and then does not send the
    replies that were to follow it.
    """
    next_tick, flush_s = clock(), 0.0

    def timed_flush() -> None:
        nonlocal flush_s
        began = clock()
        flush()
        # What is told of clients that are gone, after this, is not to count the time of the flush.
        server.begin_turn()
        flush_s = clock() - began
        if flush_s > SLOW_FLUSH_S:
            log.warning("the journal took %.1f s to write: its disk or server is slow", flush_s)

    while not stopped():
        _wait(socket, auth, max(0, int((next_tick - clock()) * 1000)) + 1)
        server.begin_turn()
        if auth is not None:
            auth.answer()
        outgoing: list[Outgoing] = []
        # Where flushes are slow, each serves more requests: as many as can be handled in the time of the last one.
        for parts, user in _waiting(socket, clock, clock() + flush_s, encrypted=auth is not None):
            outgoing += server.handle(parts, user)
        # Deadlines are looked at after all that has come was heard: a worker's renewal may have waited here.
        if clock() >= next_tick:
            outgoing += server.tick()
            if not outgoing:
                timed_flush()  # a journal may have to say that it is alive
            next_tick = clock() + TICK_S
        _deliver(socket, server, timed_flush, outgoing)


def _wait(socket: "zmq.Socket[bytes]", auth: Authenticator | None, timeout_ms: int) -> None:
    """Wait for a request, for a client that wants to connect, or for the timeout."""
    if auth is None:
        socket.poll(timeout_ms)
    else:
        zmq.select([socket, auth.socket], [], [], timeout_ms / 1000)


def _waiting(
    socket: Any, clock: Callable[[], float], until: float, *, encrypted: bool
) -> Iterator[tuple[list[zmq.Frame], bytes]]:
    """The messages that have come, each with the key that encrypted it: as many as one flush should serve, and those
    that can be had ``until`` then."""
    nbytes = 0
    for number in itertools.count():
        if number >= MOST_REQUESTS and clock() >= until:
            return
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield parts, parts[0].get("User-Id").encode() if encrypted else b""
        nbytes += sum(map(len, parts))
        if nbytes > MOST_BYTES:
            return


def _deliver(
    socket: "zmq.Socket[bytes]", server: RequestServer, flush: Callable[[], None], outgoing: list[Outgoing]
) -> None:
    """Flush and send answers, and those that follow from one whose client is gone."""
    while outgoing:
        flush()
        encoded: dict[int, wire.Frame] = {}  # of replies that go to several clients, by the object's id
        failed = [message for message in outgoing if not _send(socket, message, encoded)]
        outgoing = [answer for message in failed for answer in server.undelivered(message)]


def _send(socket: Any, message: Outgoing, encoded: dict[int, wire.Frame]) -> bool:
    """Whether the client's connection is still there, and its replies are read."""
    reply = message.response.reply
    if (body := encoded.get(id(reply))) is None:
        body = encoded[id(reply)] = wire.encode_message(reply)
    frames = [message.request_id, body, *message.response.payload]
    try:
        wire.send(socket, [message.identity, *frames])
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True


def bind(
    context: "zmq.Context[Any]",
    address: str,
    *,
    keys: ServerKeys | None = None,
    limits: QueueLimits | None = None,
) -> Any:
    """A ROUTER on ``address``; if there are ``keys``, closed by TCP to all whom no Authenticator lets in, and else in a
    folder that only this user can enter.

    Raises UserError if it cannot be had.
    """
    limits = limits or QueueLimits()
    if keys is not None and is_file(address):
        make_private(folder_of(address))
    socket = context.socket(zmq.ROUTER)
    if keys is not None and not is_file(address):
        lock(socket, keys)
    socket.set(zmq.MAXMSGSIZE, limits.frame_bytes)
    socket.set(zmq.LINGER, wire.LINGER_MS)
    socket.set(zmq.RCVHWM, MOST_UNHANDLED)
    socket.set(zmq.SNDHWM, MOST_UNREAD)
    # A restarted queue is sought by all clients at once. By default libzmq lets 100 wait to be accepted, and those that
    # come too late try again after longer and longer pauses, of up to a minute.
    socket.set(zmq.BACKLOG, limits.clients)
    _probe_hosts(socket)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # an answer to a client that is gone is an error, and its leases are taken back
    _allow_files(limits.clients + OTHER_FILES)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise UserError(f"the transfer queue cannot listen on {address}: {error.strerror} (queue.port)") from error
    return socket


def _probe_hosts(socket: Any) -> None:
    """Have the kernel notice a client whose host is gone, after (PROBES + 1) * PROBE_S at most.

    Clients notice the queue's by libzmq's heartbeats. Those have a timer per connection, and libzmq goes through all of
    its timers to cancel one: with 10,000 clients, heartbeats from here take a third of a processor.
    """
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, PROBE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, PROBES)
    socket.set(zmq.TCP_MAXRT, 1000 * PROBE_S * (PROBES + 1))  # with unacknowledged data the kernel sends no probes


def _allow_files(most: int) -> None:
    """Raise this process's limit on open files to ``most``, since each connection takes one, or as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < most:
            log.warning(
                "only %d files may be open, too few for queue.limits.clients=%d connections; raise the hard limit "
                "(ulimit -Hn) to %d",
                allowed,
                most - OTHER_FILES,
                most,
            )
