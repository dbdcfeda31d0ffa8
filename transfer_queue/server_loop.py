"""The socket of a server: one ROUTER, one thread, for the queue and for its payload shards.

    DEALERs --requests--> receive all that came -> handle each -> flush the journal ONCE -> replies --> DEALERs

Every request passes the gate first: limits, decoding, a hello on each connection, a rate limit, and its key. No
reply, to a request or to one that was parked, leaves before the flush that makes durable what it says. Under load one
flush serves many requests (group commit); without load every request has its own.
"""

import itertools
import logging
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from rl_async import messages as m
from rl_async.codec import Frame
from rl_async.configs.schema.queue import QueueLimits
from rl_async.errors import ProtocolError, UserError
from rl_async.process.private_folder import make_private
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.keys import Authenticator, ServerKeys, folder_of, is_file, lock, public_of
from rl_async.transfer_queue.auth.roles import AllowList, Role

IDLE_S = 120.0  # a connection silent for this long gives its place up; a client waits a minute at most


class _Peer:
    __slots__ = ("heard", "key", "name", "tokens")

    def __init__(self, name: str, key: bytes, tokens: float, heard: float) -> None:
        self.name, self.key, self.tokens, self.heard = name, key, tokens, heard


class Peers:
    """At most ``most`` connections with a token bucket each, the longest silent first.

    A bucket holds one second's worth of ``per_s`` requests, at least one.
    """

    def __init__(self, most: int, per_s: float) -> None:
        self._most, self._per_s, self._burst = most, per_s, max(1.0, per_s)
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def name(self, identity: bytes) -> str:
        """The name given in the hello; the identity of a connection without one."""
        peer = self._peers.get(identity)
        return identity.hex() if peer is None else peer.name

    def key(self, identity: bytes) -> bytes:
        """The public key that a known connection has shown; empty if it needed none."""
        return self._peers[identity].key

    def greet(self, identity: bytes, name: str, now: float, key: bytes = b"") -> bool:
        """Admit a connection, again or for the first time; False if there are too many."""
        known = self._peers.get(identity)
        if known is not None:
            known.name, known.key = name, key
            return True
        if len(self._peers) >= self._most:
            oldest = next(iter(self._peers))
            if now - self._peers[oldest].heard < IDLE_S:
                return False
            del self._peers[oldest]
        self._peers[identity] = _Peer(name, key, self._burst, now)
        return True

    def spend(self, identity: bytes, now: float) -> bool:
        """Charge a known connection for one request; False if it exceeds its rate."""
        peer = self._peers[identity]
        peer.tokens = min(self._burst, peer.tokens + (now - peer.heard) * self._per_s)
        peer.heard = now
        self._peers.move_to_end(identity)
        if peer.tokens < 1:
            return False
        peer.tokens -= 1
        return True

    def forget(self, identity: bytes) -> None:
        """Drop a connection that is gone."""
        self._peers.pop(identity, None)


log = logging.getLogger("rl_async.queue")


class Response(NamedTuple):
    """A reply with the payload frames that follow it."""

    reply: m.Reply
    payload: Sequence[Frame] = ()


class Outgoing(NamedTuple):
    """A response with the connection and the request that it belongs to."""

    identity: bytes
    request_id: bytes
    response: Response


Handler = Callable[[bytes, wire.RequestMessage], Response | None]  # of who asks, and what


class Gate:
    """Checks limits, decoding, hello and keys before a server handles a request; ``count`` counts what is refused.

    Without ``allowed`` everybody may do everything.
    """

    def __init__(
        self,
        limits: QueueLimits,
        clock: Callable[[], float],
        count: Callable[[str], None],
        run_id: str,
        allowed: AllowList | None = None,
    ) -> None:
        self._limits, self._clock, self._count, self._run_id = limits, clock, count, run_id
        self._allowed = allowed
        self._peers = Peers(limits.clients, limits.requests_per_s)

    def refresh(self) -> None:
        """Read the keys again if their folder has changed."""
        if self._allowed is not None:
            self._allowed.refresh()

    def forget(self, identity: bytes) -> None:
        """Drop what is known about a connection that is gone."""
        self._peers.forget(identity)

    def forbidden(self, identity: bytes, message: wire.RequestMessage, roles: frozenset[Role]) -> Response | None:
        """The refusal of a request that only ``roles`` may make, if this connection's key has another one."""
        if self._allowed is None or self._allowed.roles.get(self._peers.key(identity)) in roles:
            return None
        self._count("forbidden")
        kind, name = type(message.request).__name__, self._peers.name(identity)
        log.warning("%s may not send a %s", name, kind)
        role = self._allowed.roles.get(self._peers.key(identity))
        reason = f"a {kind} needs the key of: {', '.join(sorted(roles))}; {name} has that of: {role}"
        return Response(m.Refused(code=wire.FORBIDDEN, reason=reason))

    def answer(self, parts: Sequence[Any], handle: Handler, user: bytes = b"") -> Outgoing | None:
        """The answer to a message: ``handle``'s, or the gate's own to a hello and to what goes no further.

        ``user`` is the public key that encrypts the connection, if one does. None if ``handle`` has no answer yet. A
        ProtocolError that it raises is answered Malformed, as bytes are that are no message.
        """
        identity = bytes(wire.body(parts[0]))
        try:
            found = self._answer(identity, parts, handle, user)
        except ProtocolError as error:
            self._count("malformed")
            log.warning("malformed message from %s: %s", self._peers.name(identity), error)
            found = Response(m.Malformed(reason=str(error)))
        return None if found is None else Outgoing(identity, _request_id(parts), found)

    def _answer(self, identity: bytes, parts: Sequence[Any], handle: Handler, user: bytes) -> Response | None:
        if refused := self._beyond_limits(identity, parts):
            return Response(refused)
        message = wire.decode_request(parts[1:])
        if isinstance(message.request, m.Hello):
            if message.payload:
                raise ProtocolError("a Hello with payload frames")
            return self._hello(identity, message.request, user)
        if identity not in self._peers or (user and user != self._peers.key(identity)):
            return Response(m.Refused(code=wire.HELLO, reason="say Hello first"))
        if self._allowed is not None and self._peers.key(identity) not in self._allowed.roles:
            return self._denied(self._peers.name(identity))
        return handle(identity, message)

    def _denied(self, name: str) -> Response:
        self._count("denied")
        log.warning("%s has no key that is allowed", name)
        return Response(m.Refused(code=wire.DENIED, reason=f"{name} has no key that is allowed here"))

    def _beyond_limits(self, identity: bytes, parts: Sequence[Any]) -> m.Refused | None:
        """The refusal of a message that exceeds a limit, before it is decoded; None if it does not."""
        limits = self._limits
        if identity in self._peers and not self._peers.spend(identity, self._clock()):
            self._count("too_many_requests")
            return m.Refused(code=wire.BUSY, reason=f"more than {limits.requests_per_s:g} requests a second")
        size, frames = sum(len(part) for part in parts[1:]), len(parts) - 1
        if size > limits.message_bytes or frames > limits.frames:
            self._count("too_large")
            log.warning("%s sent %d bytes in %d frames", self._peers.name(identity), size, frames)
            reason = (
                f"a message of {size} bytes in {frames} frames; the limits are "
                f"queue.limits.message_bytes={limits.message_bytes} and queue.limits.frames={limits.frames}"
            )
            return m.Refused(code="too_large", reason=reason)
        return None

    def _hello(self, identity: bytes, request: m.Hello, user: bytes) -> Response:
        if request.schema != m.SCHEMA:
            reason = f"the queue speaks schema {m.SCHEMA}, {request.role} {request.name} speaks {request.schema}"
            return Response(m.Refused(code="schema", reason=reason))
        key = user or _public(request.key)
        self.refresh()
        if self._allowed is not None and key not in self._allowed.roles:
            return self._denied(request.name)
        if not self._peers.greet(identity, request.name, self._clock(), key):
            self._count("too_many_clients")
            reason = f"{len(self._peers)} clients are connected, and queue.limits.clients={self._limits.clients}"
            return Response(m.Refused(code=wire.BUSY, reason=reason))
        return Response(m.Welcome(schema=m.SCHEMA, run_id=self._run_id))


def _public(secret: str) -> bytes:
    """The public key of a secret one that was shown; empty if none was, or if it is no key."""
    try:
        return public_of(secret.encode(), "the hello") if secret else b""
    except UserError:
        return b""


def _request_id(parts: Sequence[Any]) -> bytes:
    return bytes(wire.body(parts[1])) if len(parts) > 1 else b""


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
