"""The queue's server: a socket, a gate, and verbs and parked long polls around the pure store.

    DEALERs --requests--> [gate -> verb -> store] --> flush the journal ONCE --> replies --> DEALERs
                                   |  transitions
                                   v
                    journal, ledger; parked long polls are tried again

One thread does all of it, so handlers need no locks. A request that cannot be understood is answered Malformed and
counted; one that does not apply is answered Refused. Neither changes anything. No reply leaves before the flush that
makes it durable. Under load one flush serves many requests (group commit); without load every request has its own.
Payload shards use the same loop and gate. ``recover`` restores the store from a journal and completes the ledger.
``serve`` runs a queue without a run, for scripts, tests and other systems:

    with serve(tasks, group_size=4, batch_groups=8) as address:  # in this process, on a thread
        ...  # clients, here or elsewhere
"""

import contextlib
import heapq
import itertools
import logging
import math
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import zmq

from rl_async import messages as m
from rl_async.configs.derived import is_loopback, slack
from rl_async.configs.schema.run import QueueConfig, RunConfig
from rl_async.configs.suggestions import nearest
from rl_async.errors import JournalError, ProtocolError, UserError
from rl_async.files import UNDECODABLE
from rl_async.process.http_auth import Role
from rl_async.process.private_folder import make_private
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings, Sampling
from rl_async.transfer_queue.auth import AllowList, Authenticator, ServerKeys, folder_of, is_file, lock, public_of
from rl_async.transfer_queue.delivery import TaskList
from rl_async.transfer_queue.journal import Journal, MemoryJournal, SqliteJournal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.store import Feed, Rates, Store
from rl_async.transfer_queue.verbs import ENGINES_CHANGE, VERBS, Announcing, Incoming, Leasing, Response, Serving, Verb

log = logging.getLogger("rl_async.queue")

# --- the gate ---------------------------------------------------------------------------------------------------------

# A connection that has been silent for this long gives up its place. A client waits a minute at most.
IDLE_S = 120.0


class _Peer:
    __slots__ = ("heard", "key", "name", "tokens")

    def __init__(self, name: str, key: bytes, tokens: float, heard: float) -> None:
        self.name, self.key, self.tokens, self.heard = name, key, tokens, heard


class Peers:
    """At most ``most`` connections with a token bucket each, the longest silent first.

    A bucket holds the requests of one second, at least one.
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


class Outgoing(NamedTuple):
    """A response with the connection and the request that it belongs to."""

    identity: bytes
    request_id: bytes
    response: Response


@dataclass(frozen=True)
class QueueLimits:
    """What one client may send, so that no client harms the others.

    ``frames`` and both sizes must allow what our own clients send (client.py): each row of 64 KiB and more is a frame.
    ``requests_per_s`` holds for each connection, after a burst of one second's worth. A connection beyond ``clients``
    waits until another has been silent for two minutes.
    """

    frame_bytes: int = 1 << 28
    message_bytes: int = 1 << 29
    frames: int = 4096
    clients: int = 4096
    requests_per_s: float = 5000.0

    @classmethod
    def of(cls, config: RunConfig) -> "QueueLimits":
        """Derive the limits of a run. Workers that were killed keep their places for two minutes."""
        return cls(clients=max(cls.clients, 2 * config.agent.workers))


class Gate:
    """Checks limits, decoding, hello and keys before a server handles a request; ``count`` counts refusals.

    Without ``allowed`` every client may send every request.
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
        """Drop a connection that is gone."""
        self._peers.forget(identity)

    def forbidden(self, identity: bytes, message: wire.RequestMessage, roles: frozenset[Role]) -> Response | None:
        """Refuse a request that only ``roles`` may send if this connection's key has another role."""
        if self._allowed is None or self._allowed.roles.get(self._peers.key(identity)) in roles:
            return None
        self._count("forbidden")
        kind, name = type(message.request).__name__, self._peers.name(identity)
        log.warning("%s may not send a %s", name, kind)
        role = self._allowed.roles.get(self._peers.key(identity))
        reason = f"a {kind} needs the key of: {', '.join(sorted(roles))}; {name} has that of: {role}"
        return Response(m.Refused(code=wire.FORBIDDEN, reason=reason))

    def answer(
        self, parts: Sequence[Any], handle: Callable[[bytes, wire.RequestMessage], Response | None], user: bytes = b""
    ) -> Outgoing | None:
        """Answer a message: a hello or a refused request by itself, others through ``handle(identity, message)``.

        ``user`` is the public key that encrypts the connection, or empty. Returns None if ``handle`` has parked the
        request. Bytes that do not decode, and a ProtocolError of ``handle``, are answered Malformed.
        """
        identity = bytes(parts[0])
        try:
            admitted = self._admit(identity, parts, user)
            found = handle(identity, admitted) if isinstance(admitted, wire.RequestMessage) else admitted
        except ProtocolError as error:
            self._count("malformed")
            log.warning("malformed message from %s: %s", self._peers.name(identity), error)
            found = Response(m.Malformed(reason=str(error)))
        request_id = bytes(parts[1]) if len(parts) > 1 else b""
        return None if found is None else Outgoing(identity, request_id, found)

    def _admit(self, identity: bytes, parts: Sequence[Any], user: bytes) -> wire.RequestMessage | Response:
        """Return the decoded request if it may be handled, and otherwise the gate's own response."""
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
        return message

    def _denied(self, name: str) -> Response:
        self._count("denied")
        log.warning("%s has no key that is allowed", name)
        return Response(m.Refused(code=wire.DENIED, reason=f"{name} has no key that is allowed here"))

    def _beyond_limits(self, identity: bytes, parts: Sequence[Any]) -> m.Refused | None:
        """Refuse a message that exceeds a limit, before it is decoded."""
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
                f"{limits.message_bytes} bytes and {limits.frames} frames"
            )
            return m.Refused(code="too_large", reason=reason)
        return None

    def _hello(self, identity: bytes, request: m.Hello, user: bytes) -> Response:
        if request.schema != m.SCHEMA:
            reason = f"the queue speaks schema {m.SCHEMA}, {request.role} {request.name} speaks {request.schema}"
            return Response(m.Refused(code="schema", reason=reason))
        key = user
        if not key and request.key:
            with contextlib.suppress(UserError):
                key = public_of(request.key.encode(), "the hello")
        self.refresh()
        if self._allowed is not None and key not in self._allowed.roles:
            return self._denied(request.name)
        if not self._peers.greet(identity, request.name, self._clock(), key):
            self._count("too_many_clients")
            reason = f"{len(self._peers)} clients are connected, and at most {self._limits.clients} may be"
            return Response(m.Refused(code=wire.BUSY, reason=reason))
        return Response(m.Welcome(schema=m.SCHEMA, run_id=self._run_id))


# --- the queue --------------------------------------------------------------------------------------------------------


class _Parked(NamedTuple):
    incoming: Incoming[Any]
    deadline: float


class Parking:
    """The parked requests of all connections. A repeated request replaces its first copy."""

    def __init__(self, verbs: Sequence[Verb]) -> None:
        self._parked: dict[Verb, dict[bytes, _Parked]] = {verb: {} for verb in verbs if verb.wakes}
        # By connection. Ids may repeat among verbs.
        self._of: dict[bytes, set[tuple[Verb, bytes]]] = {}
        # A heap that keeps requests which have been answered since. The number keeps verbs from being compared.
        self._deadlines: list[tuple[float, int, Verb, bytes]] = []
        self._added = 0

    def add(self, verb: Verb, incoming: Incoming[Any], deadline: float) -> None:
        """Park a request until ``deadline`` at the latest."""
        if (before := self._parked[verb].get(incoming.request_id)) is not None:
            self.remove(verb, before.incoming)
        self._parked[verb][incoming.request_id] = _Parked(incoming, deadline)
        self._of.setdefault(incoming.identity, set()).add((verb, incoming.request_id))
        self._added += 1
        heapq.heappush(self._deadlines, (deadline, self._added, verb, incoming.request_id))

    def remove(self, verb: Verb, incoming: Incoming[Any]) -> None:
        """Forget a parked request."""
        del self._parked[verb][incoming.request_id]
        own = self._of[incoming.identity]
        own.discard((verb, incoming.request_id))
        if not own:
            del self._of[incoming.identity]

    def waking(self, changed: set[Any]) -> list[tuple[Verb, list[Incoming[Any]]]]:
        """The verbs with parked requests that one of these transitions concerns, and those requests."""
        return [
            (verb, [waiting.incoming for waiting in parked.values()])
            for verb, parked in self._parked.items()
            if parked and not changed.isdisjoint(verb.wakes)
        ]

    def due(self, now: float) -> list[tuple[Verb, Incoming[Any]]]:
        """The requests whose deadline has come; they stay parked until they are removed."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, verb, request_id = heapq.heappop(self._deadlines)
            waiting = self._parked[verb].get(request_id)
            if waiting is not None and waiting.deadline <= now:
                due.append((verb, waiting.incoming))
        return due

    def holds(self, verb: Verb, request_id: bytes) -> bool:
        return request_id in self._parked[verb]

    def forget(self, identity: bytes) -> None:
        """Forget all requests of a connection."""
        for verb, request_id in self._of.pop(identity, ()):
            del self._parked[verb][request_id]


# A turn of the loop that is late by more than this is logged.
HELD_UP_S = 1.0
_VERBS = {verb.request: verb for verb in VERBS}


class QueueServer:
    """Answers requests from the store.

    The responses of ``handle``, ``tick`` and ``undelivered`` must be sent after the journal's next flush: no client may
    hear of a change that a crash could undo.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal,
        feed: Feed,
        clock: Callable[[], float] = time.monotonic,
        limits: QueueLimits | None = None,
        allowed: AllowList | None = None,
    ) -> None:
        self._store, self._read_clock = store, clock
        self._began, self._held_up_s, self._latest = clock(), 0.0, clock()
        clock = self._clock
        self._gate = Gate(limits or QueueLimits(), clock, store.count, journal.run_id, allowed)
        self._leasing, self._rates = Leasing(store.delivery), Rates(clock())
        self._announcing = Announcing(store.engines)
        self._queue = Serving(store, journal, self._leasing, self._announcing, self._rates, clock)
        self._changed: set[type[t.Transition]] = set()
        self._parking = Parking(VERBS)
        feed.subscribe(self._see)

    def begin_turn(self) -> None:
        """Note that the loop is at work again.

        Time beyond an eighth of a lease since the turn before counts for no deadline: meanwhile the queue could not
        hear any client.
        """
        now = self._read_clock()
        held_up_s = now - self._began - self._store.settings.lease_s / 8
        if held_up_s > 0:
            self._held_up_s += held_up_s
            if held_up_s > HELD_UP_S:
                self._store.count("held_up")
                log.warning("the queue was held up for %.1f s; no lease and no shard ends by that", now - self._began)
        self._began = now

    def _clock(self) -> float:
        """The time that the queue has served, in seconds."""
        self._latest = max(self._latest, self._read_clock() - self._held_up_s)
        return self._latest

    def _see(self, transition: t.Transition) -> None:
        self._changed.add(type(transition))
        self._rates.see(transition, self._clock())

    def handle(self, parts: Sequence[Any], user: bytes = b"") -> list[Outgoing]:
        """Answer one message, and the parked requests that its effect concerns."""
        own = self._gate.answer(parts, self._answer, user)
        return ([] if own is None else [own]) + self._wake()

    def tick(self) -> list[Outgoing]:
        """End leases and waits that are due; return the responses that follow."""
        self._gate.refresh()
        now = self._clock()
        self._store.expire(now)
        if self._announcing.is_due(now):
            self._changed |= ENGINES_CHANGE
        outgoing = self._wake()
        for verb, incoming in self._parking.due(now):
            if self._parking.holds(verb, incoming.request_id):
                outgoing += self._try(verb, incoming, last=True)
        return outgoing + self._wake()

    def undelivered(self, message: Outgoing) -> list[Outgoing]:
        """Forget the requests of a lost connection, and lease the groups that it did not get to others.

        If the client lives, it says hello on a new connection and repeats its requests.
        """
        self._gate.forget(message.identity)
        self._parking.forget(message.identity)
        self._leasing.undelivered(message.request_id, message.identity)
        return self._wake()

    def _wake(self) -> list[Outgoing]:
        """Try parked requests again, until the store does not change any more."""
        outgoing: list[Outgoing] = []
        while self._changed:
            changed, self._changed = self._changed, set()
            for verb, parked in self._parking.waking(changed):
                for incoming in verb.retry(self._queue, parked):
                    outgoing += self._try(verb, incoming, last=False)
        return outgoing

    def _try(self, verb: Verb, incoming: Incoming[Any], *, last: bool) -> list[Outgoing]:
        """Answer a parked request if its verb has an answer now, as it must at its ``last`` chance."""
        response = verb.handle(self._queue, incoming, last)
        if response is None:
            return []
        self._parking.remove(verb, incoming)
        return [Outgoing(incoming.identity, incoming.request_id, response)]

    def _answer(self, identity: bytes, message: wire.RequestMessage) -> Response | None:
        """The response, or None if the request is parked. Raises ProtocolError for a payload in the wrong place."""
        kind = type(message.request)
        verb = _VERBS.get(kind)
        if message.payload and (verb is None or not verb.payload):
            raise ProtocolError(f"a {kind.__name__} with {len(message.payload)} payload frames")
        if verb is None:
            return Response(m.Refused(code="not_here", reason=f"a {kind.__name__} is for payload shards"))
        if refused := self._gate.forbidden(identity, message, verb.roles):
            return refused
        incoming = Incoming(identity, message.request_id, message.request, message.payload)
        if not isinstance(message.request, m.LongPoll):
            return verb.handle(self._queue, incoming, True)
        longest_s = verb.arrive(self._store, message.request, self._clock())
        wait_s = 0.0 if math.isnan(message.request.wait_s) else min(message.request.wait_s, longest_s)
        response = verb.handle(self._queue, incoming, wait_s <= 0)
        if response is None:
            self._parking.add(verb, incoming, self._clock() + wait_s)
        return response


# --- the journal ------------------------------------------------------------------------------------------------------

# The status keeps the slowest flush for this long.
SLOWEST_OF_S = 60.0


def recover(
    store: Store, journal: Journal, ledger: Ledger, now: float, *, clients_remain: bool = False, within: bool = False
) -> int:
    """Replay the journal into a new store and complete the ledger; return the number of transitions.

    The ledger is on the disk before the journal records anything more: a ledger that does not name its journal could
    not be continued. A journal that is ``within`` the run's folder is this run's: a lost ledger is written again from
    it.

    Raises JournalError if the journal is inconsistent, belongs to another run of the same name, or ends before the
    ledger does while ``clients_remain`` that have heard the rest, or if the ledger is lost and the journal no longer
    has all of its contents; DataError if the tasks are not those that the journal was recorded with.
    """
    dump, dumped, transitions = journal.recover()
    lost = ledger.is_empty and within
    if lost and dump:
        raise JournalError(
            "ledger.jsonl is lost, and the journal no longer has the beginning of what it said, which the audit needs: "
            "put the file back, or move the journal away and continue from the newest checkpoint with --resume"
        )
    known = ledger.follow(journal.run_id, dumped) or lost
    try:
        recorded = _of_this_run(dump, transitions, known, journal.run_id)
        store.recover(dump, ledger.catch_up(recorded, may_cut=not clients_remain), now)
    except (*UNDECODABLE, LookupError, ValueError) as error:
        raise JournalError(
            f"the journal of {journal.run_id} does not fit this version of the queue ({type(error).__name__}: {error}"
            "); finish the run with the version that began it, or move the journal away and continue with --resume"
        ) from error
    ledger.force()
    return ledger.count


def _of_this_run(dump: bytes, transitions: Iterable[t.Transition], known: bool, run_id: str) -> Iterator[t.Transition]:
    """Yield the transitions; raise JournalError unless they are none or the ledger has followed this journal."""
    empty = not dump
    for transition in transitions:
        empty = False
        if known:
            yield transition
    if not empty and not known:
        raise JournalError(
            f"the journal is that of {run_id}, which ledger.jsonl in this run folder does not mention: is it "
            "another run of the same name? Choose another name, or move that journal away (a run that moves to another "
            "host takes its folder along)"
        )


class JournalRecorder:
    """Flushes journal and ledger together, and compacts the journal once it has outgrown the state."""

    def __init__(
        self, store: Store, journal: Journal, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._journal, self._ledger, self._clock = store, journal, ledger, clock
        self._slowest_at = -SLOWEST_OF_S

    def flush(self) -> None:
        """Make the journal durable, then the ledger that people read; note how long the slowest recent flush took."""
        began = self._clock()
        self._journal.flush()
        self._ledger.flush()
        if self._journal.outgrown:
            self._ledger.compacting()
            self._journal.compact(self._store.dump())
        now = self._clock()
        if now - began >= self._store.flush_s or now - self._slowest_at >= SLOWEST_OF_S:
            self._store.flush_s, self._slowest_at = now - began, now


# --- the socket -------------------------------------------------------------------------------------------------------

# Deadlines of waits and leases are kept to within this.
TICK_S = 0.05
# The first request of a flush waits for the last, so that one flush serves only so many requests and bytes.
MOST_REQUESTS = 64
MOST_BYTES = 1 << 23
# More requests of one connection stay in the network.
MOST_UNHANDLED = 64
# A connection with more unread replies counts as gone.
MOST_UNREAD = 1 << 14
# A host that has been silent for PROBE_S is probed, and counts as gone after so many probes.
PROBE_S, PROBES = 5, 2
# Open files besides those of connections.
OTHER_FILES = 256
# A flush that takes longer is logged.
SLOW_FLUSH_S = 1.0


class RequestServer(Protocol):
    """Answers requests: the queue or a payload shard. Its responses must be sent after the next flush."""

    def begin_turn(self) -> None: ...
    def handle(self, parts: Sequence[Any], user: bytes = b"") -> list[Outgoing]: ...
    def tick(self) -> list[Outgoing]: ...
    def undelivered(self, message: Outgoing) -> list[Outgoing]: ...


def serve_requests(
    socket: "zmq.Socket[bytes]",
    server: RequestServer,
    flush: Callable[[], None],
    stopped: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    auth: Authenticator | None = None,
) -> None:
    """Answer requests until ``stopped``, which is called at least every TICK_S.

    Consumes: requests of all clients, and with ``auth`` libzmq's questions whether a client may connect. Produces:
    replies, and the store's transitions. Waits for: the socket and those questions. Unblocked by: either of them, or
    the next tick, which ends leases and waits that are due. An error of ``flush`` is raised, and the replies that were
    to follow it are not sent.
    """
    next_tick, flush_s = clock(), 0.0

    def timed_flush() -> None:
        nonlocal flush_s
        began = clock()
        flush()
        # The time of the flush must not count against clients whose loss is handled after it.
        server.begin_turn()
        flush_s = clock() - began
        if flush_s > SLOW_FLUSH_S:
            log.warning("the journal took %.1f s to write: its disk or server is slow", flush_s)

    while not stopped():
        timeout_ms = max(0, int((next_tick - clock()) * 1000)) + 1
        if auth is None:
            socket.poll(timeout_ms)
        else:
            zmq.select([socket, auth.socket], [], [], timeout_ms / 1000)
        server.begin_turn()
        if auth is not None:
            auth.answer()
        outgoing: list[Outgoing] = []
        # Where flushes are slow, each serves more requests: as many as can be handled in the time of the last one.
        for parts, user in _waiting(socket, clock, clock() + flush_s, encrypted=auth is not None):
            outgoing += server.handle(parts, user)
        # Deadlines come after the requests: a worker's renewal may have waited in the socket.
        if clock() >= next_tick:
            outgoing += server.tick()
            if not outgoing:
                # A journal may have to show that it is alive.
                timed_flush()
            next_tick = clock() + TICK_S
        # A response that meets a lost connection may free leases, which other responses then hand out.
        while outgoing:
            timed_flush()
            # Of replies that go to several clients, by the object's id.
            encoded: dict[int, wire.Frame] = {}
            failed = [message for message in outgoing if not _send(socket, message, encoded)]
            outgoing = [answer for message in failed for answer in server.undelivered(message)]


def _waiting(
    socket: Any, clock: Callable[[], float], until: float, *, encrypted: bool
) -> Iterator[tuple[list[zmq.Frame], bytes]]:
    """The messages that have arrived, each with the key that encrypted it.

    Ends at MOST_BYTES, and at MOST_REQUESTS unless more can be received ``until`` then.
    """
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


def _send(socket: Any, message: Outgoing, encoded: dict[int, wire.Frame]) -> bool:
    """Send a response. Returns False if the connection is gone, or does not read its replies."""
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
    context: "zmq.Context[Any]", address: str, *, keys: ServerKeys | None = None, limits: QueueLimits | None = None
) -> Any:
    """Bind a ROUTER to ``address``.

    With ``keys``, an Authenticator decides by TCP which clients may connect, and a socket file lies in a folder that
    only this user can enter. Raises UserError if the address cannot be bound.
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
    # All clients reconnect to a restarted queue at once. By default libzmq lets 100 wait to be accepted, and the others
    # try again after longer and longer pauses, of up to a minute.
    socket.set(zmq.BACKLOG, limits.clients)
    # The kernel notices a client whose host is gone after (PROBES + 1) * PROBE_S at most. Clients notice the queue's by
    # libzmq's heartbeats. Those have a timer per connection, and libzmq goes through all of its timers to cancel one:
    # with 10,000 clients, heartbeats from here take a third of a processor.
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, PROBE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, PROBES)
    # The kernel sends no probes while data is unacknowledged.
    socket.set(zmq.TCP_MAXRT, 1000 * PROBE_S * (PROBES + 1))
    # A response to a client that is gone is an error, so that its leases can be taken back.
    socket.set(zmq.ROUTER_MANDATORY, 1)
    _allow_files(limits.clients + OTHER_FILES)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise UserError(f"the transfer queue cannot listen on {address}: {error.strerror} (queue.port)") from error
    return socket


def _allow_files(most: int) -> None:
    """Raise this process's limit on open files to ``most`` or the hard limit: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < most:
            log.warning(
                "only %d files may be open, too few for %d connections; raise the hard limit (ulimit -Hn) to %d",
                allowed,
                most - OTHER_FILES,
                most,
            )


# --- a queue without a run --------------------------------------------------------------------------------------------

LOOPBACK = "tcp://127.0.0.1:*"
ENDLESS_STEPS = 1 << 40
CHOICES = ("fifo", "freshest", "priority")
START_S = 30.0
STOP_S = 30.0


def standalone_settings(
    *,
    group_size: int,
    batch_groups: int,
    max_staleness: int = 1,
    lease_s: float = 15.0,
    sampling: Sampling = "fifo",
    window: int = 0,
) -> QueueSettings:
    """The settings of a queue without a run. Raises UserError naming an argument that is out of range."""
    least = {"group_size": (group_size, 1), "batch_groups": (batch_groups, 1), "max_staleness": (max_staleness, 0)}
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise UserError(f"{name}={value}: at least {smallest} is needed")
    if not lease_s > 0:
        raise UserError(f"lease_s={lease_s}: more than 0 seconds are needed")
    if sampling not in CHOICES:
        raise UserError(
            f"sampling={sampling}{nearest(sampling, CHOICES)} (quotas need the data sets of a run's config)"
        )
    if sampling != "fifo" and max_staleness < 2:
        raise UserError(f"sampling={sampling} has nothing to choose from with max_staleness={max_staleness}: give 2")
    settings = QueueSettings(
        sampling=sampling,
        slack=slack(QueueConfig(sampling=sampling)),
        window=window,
        steps=ENDLESS_STEPS,
        batch_groups=batch_groups,
        group_size=group_size,
        max_staleness=max_staleness,
        lease_s=lease_s,
    )
    slots = settings.slots_at(max_staleness)
    if window and not batch_groups <= window < slots:
        raise UserError(f"window={window}: at least batch_groups={batch_groups} and fewer than all {slots}, or 0")
    return settings


def serve_standalone(
    settings: QueueSettings,
    tasks: Sequence[m.Task],
    *,
    address: str = LOOPBACK,
    folder: Path | None = None,
    listening: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """Serve until ``stopped``; ``listening`` is called once with the address.

    With a ``folder`` the queue is durable: another one with the same folder and tasks continues from there. Raises
    UserError for an address that is not this machine's loopback, a taken port, a journal that cannot be used, or a list
    of tasks of another length than the journal's.
    """
    if not is_loopback(urlsplit(address).hostname or ""):
        raise UserError(f"{address} can be reached from elsewhere, and a queue served without a run has no keys")
    with contextlib.ExitStack() as stack:
        journal: Journal = MemoryJournal("alone") if folder is None else SqliteJournal(folder, "alone")
        stack.callback(journal.close)
        flush, feed = journal.flush, Feed(journal.append)
        if folder is None:
            store = Store(settings, TaskList(tasks), [], feed)
        else:
            ledger = stack.enter_context(contextlib.closing(Ledger(folder / "ledger.jsonl")))
            feed.subscribe(ledger.append)
            store = Store(settings, TaskList(tasks), [], feed)
            recover(store, journal, ledger, time.monotonic())
            flush = JournalRecorder(store, journal, ledger).flush
        if store.status(time.monotonic()).published.step < 0:
            store.publish(m.Version(0, 0), [])
        flush()
        socket = stack.enter_context(bind(stack.enter_context(zmq.Context()), address))
        listening(socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        serve_requests(socket, QueueServer(store, journal, feed), flush, stopped)


@contextlib.contextmanager
def serve(
    tasks: Sequence[m.Task] = (),
    *,
    group_size: int = 1,
    batch_groups: int = 1,
    max_staleness: int = 1,
    lease_s: float = 15.0,
    sampling: Sampling = "fifo",
    window: int = 0,
    address: str = LOOPBACK,
    folder: Path | None = None,
) -> Iterator[str]:
    """A queue on a thread of this process while the block runs; its address.

    ``tasks`` are handed out once each, then the tasks that producers submit or bring. Up to ``(max_staleness + 1) *
    batch_groups`` groups of ``group_size`` samples are alive between admission and publication. With a ``folder``,
    which must exist, the queue is durable. Raises UserError as ``serve_standalone`` does, at the end of the block if it
    happens in between.
    """
    settings = standalone_settings(
        group_size=group_size,
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        lease_s=lease_s,
        sampling=sampling,
        window=window,
    )
    addresses: list[str] = []
    changed, stop = threading.Event(), threading.Event()

    def listening(at: str) -> None:
        addresses.append(at)
        changed.set()

    with ThreadPoolExecutor(1, thread_name_prefix="transfer queue") as thread:
        serving = thread.submit(
            serve_standalone, settings, tasks, address=address, folder=folder, listening=listening, stopped=stop.is_set
        )
        serving.add_done_callback(lambda _: changed.set())
        try:
            if not changed.wait(START_S):
                raise UserError(f"the transfer queue did not start within {START_S:g} s")
            if addresses:
                yield addresses[0]
        finally:
            stop.set()
            serving.result(STOP_S)
    if not addresses:
        raise UserError("the transfer queue ended before it began")
