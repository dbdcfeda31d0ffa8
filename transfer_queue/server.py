"""The queue's socket: one ROUTER on one event loop around the pure store.

    DEALERs --request--> [decode -> handler -> store] --reply--> DEALERs
                                |  transitions
                                v
                 journal, ledger, payloads; parked long-polls are tried again

Nothing but this loop touches the store, so handlers need no locks. A request that nobody can understand is answered
Malformed and counted; one that does not apply is answered Refused. Neither changes anything.
"""

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from rl_async import messages as m
from rl_async.codec import Frame
from rl_async.errors import ProtocolError, UserError
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.payloads import Payloads
from rl_async.transfer_queue.store import Store

log = logging.getLogger("rl_async.queue")

TICK_S = 0.05  # deadlines of waits and leases are kept to within this
MAX_WAIT_S = 60.0  # longer waits are cut to this
REMEMBERED = 4096  # answers to leases, and peers that said hello


class Answer(NamedTuple):
    """A reply and its payload frames."""

    reply: m.Reply
    payload: Sequence[Frame] = ()


class Parked(NamedTuple):
    """A long-poll that waits for the store to change."""

    identity: bytes
    request: m.Request
    deadline: float


class Granted(NamedTuple):
    """The answer to a lease, who asked, and over which connection."""

    identity: bytes
    worker: str
    leased: m.Leased


class Outgoing(NamedTuple):
    """An answer with its address."""

    identity: bytes
    request_id: bytes
    answer: Answer


# Which transitions can change the answer to a parked request.
_WAKES: dict[type[m.Request], frozenset[type[t.Transition]]] = {
    m.Lease: frozenset(
        {
            t.LeaseLost,
            t.SampleFailed,
            t.GroupDropped,
            t.DeadLettered,
            t.BatchReserved,
            t.Published,
            t.Retired,
            t.Tightened,
            t.EvalOpened,
            t.RunFinished,
        }
    ),
    m.Reserve: frozenset({t.GroupReady, t.GroupDropped, t.DeadLettered, t.BatchReserved}),
    m.EvalResult: frozenset({t.GroupReady, t.EvalClosed}),
    m.Engines: frozenset({t.EnginesChanged}),
}


class QueueServer:
    """Answers requests from the store. ``handle`` and ``tick`` are synchronous; ``serve`` is the loop around them."""

    def __init__(
        self,
        store: Store,
        payloads: Payloads,
        feed: t.Feed,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._payloads, self._run_id, self._clock = store, payloads, run_id, clock
        self._changed: set[type[t.Transition]] = set()
        feed.subscribe(lambda transition: self._changed.add(type(transition)))
        self._parked: dict[type[m.Request], dict[bytes, Parked]] = {kind: {} for kind in _WAKES}
        self._greeted: OrderedDict[bytes, str] = OrderedDict()  # identity -> name; the longest silent first
        self._leased: OrderedDict[bytes, Granted] = OrderedDict()  # by request id, so that a resend gets the same
        self._polls: dict[type[m.Request], Callable[[Any, bool], Answer | None]] = {
            m.Lease: self._lease,
            m.Reserve: self._reserve,
            m.EvalResult: self._eval_result,
            m.Engines: self._engines,
        }
        self._handlers: dict[type[m.Request], Callable[[Any], Answer]] = {
            m.Renew: lambda r: Answer(store.renew(r.worker, clock())),
            m.Fail: lambda r: Answer(store.fail(r.worker, r.group_id, r.sample, r.attempt, r.error, clock())),
            m.Fetch: self._fetch,
            m.Commit: lambda r: Answer(store.commit(r.step)),
            m.Publish: lambda r: Answer(store.publish(r.version, r.engines)),
            m.Confirm: lambda r: Answer(store.confirm(r.engine_id, r.version)),
            m.Snapshot: lambda r: Answer(m.SnapshotTaken(snapshot=store.snapshot())),
            m.Resume: lambda r: Answer(store.resume(r.step, r.lineage, r.snapshot)),
            m.Retire: lambda r: Answer(store.retire(r.step)),
            m.Tighten: lambda r: Answer(store.tighten(r.max_staleness)),
            m.Evaluate: lambda r: Answer(store.evaluate(r.eval_id)),
            m.RegisterEngine: lambda r: Answer(store.register_engine(r.engine_id, r.url, r.kind)),
            m.RemoveEngine: self._remove_engine,
            m.Status: lambda r: Answer(store.status(clock())),
            m.Finish: lambda r: Answer(store.finish()),
        }

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def serve(self, socket: zmq.asyncio.Socket) -> None:
        """Answer requests until cancelled.

        Consumes: requests of all clients. Produces: replies, and the store's transitions. Waits for: the socket.
        Unblocked by: a request, or the next tick, which ends leases and waits that are due.
        """
        while True:
            outgoing = self.tick()
            if await socket.poll(TICK_S * 1000):
                parts = await socket.recv_multipart(copy=False)
                outgoing += self.handle(parts)
            await self._send(socket, outgoing)

    async def _send(self, socket: zmq.asyncio.Socket, outgoing: list[Outgoing]) -> None:
        """Send answers, and those that follow from one whose client is gone."""
        while outgoing:
            failed: list[Outgoing] = []
            for message in outgoing:
                frames = wire.encode(message.request_id, message.answer.reply, message.answer.payload)
                try:
                    await socket.send_multipart([message.identity, *frames], copy=False)
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    failed.append(message)
            outgoing = [answer for message in failed for answer in self.undelivered(message)]

    def handle(self, parts: Sequence[Any]) -> list[Outgoing]:
        """Answer one message, and whatever was waiting for its effect."""
        identity = bytes(wire.body(parts[0]))
        try:
            message = wire.decode_request([wire.body(part) for part in parts[1:]])
            answer = self._answer(identity, message)
        except ProtocolError as error:
            self._store.count("malformed")
            log.warning("malformed message from %s: %s", self._greeted.get(identity, identity.hex()), error)
            request_id = bytes(wire.body(parts[1])) if len(parts) > 1 else b""
            return [Outgoing(identity, request_id, Answer(m.Malformed(reason=str(error))))]
        own = [] if answer is None else [Outgoing(identity, message.request_id, answer)]
        return own + self._wake()

    def tick(self) -> list[Outgoing]:
        """End leases and waits whose time is over; the answers that follow."""
        now = self._clock()
        self._store.expire(now)
        outgoing = self._wake()
        for parked in self._parked.values():
            due = [request_id for request_id, waiting in parked.items() if waiting.deadline <= now]
            for request_id in due:
                waiting = parked.pop(request_id)
                answer = self._polled(request_id, waiting, last=True)
                if answer is not None:
                    outgoing.append(Outgoing(waiting.identity, request_id, answer))
        return outgoing + self._wake()

    def undelivered(self, message: Outgoing) -> list[Outgoing]:
        """The client's connection is gone: forget what it waits for, and lease to others what it did not get.

        If the client lives, it says hello on a new connection and repeats its requests.
        """
        self._greeted.pop(message.identity, None)
        for parked in self._parked.values():
            for request_id in [key for key, waiting in parked.items() if waiting.identity == message.identity]:
                del parked[request_id]
        granted = self._leased.get(message.request_id)
        if granted is not None and granted.identity == message.identity:  # else it was a repetition
            del self._leased[message.request_id]
            log.info(
                "%d groups leased by %s, which is gone, are taken back", len(granted.leased.groups), granted.worker
            )
            self._store.undelivered(granted.worker, granted.leased.groups)
        return self._wake()

    def _wake(self) -> list[Outgoing]:
        """Try parked requests again, until the store does not change any more."""
        outgoing: list[Outgoing] = []
        while self._changed:
            changed, self._changed = self._changed, set()
            for kind, reasons in _WAKES.items():
                if changed.isdisjoint(reasons):
                    continue
                for request_id, waiting in list(self._parked[kind].items()):
                    answer = self._polled(request_id, waiting, last=False)
                    if answer is not None:
                        del self._parked[kind][request_id]
                        outgoing.append(Outgoing(waiting.identity, request_id, answer))
        return outgoing

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def _answer(self, identity: bytes, message: wire.RequestMessage) -> Answer | None:
        """The answer, or None if the request is parked. Raises ProtocolError for a payload in the wrong place."""
        request, kind = message.request, type(message.request)
        if isinstance(request, m.Put) != bool(message.payload):
            raise ProtocolError(f"a {kind.__name__} with {len(message.payload)} payload frames")
        if isinstance(request, m.Hello):
            return self._hello(identity, request)
        if identity not in self._greeted:
            return Answer(m.Refused(code="hello", reason="say Hello first"))
        self._greeted.move_to_end(identity)
        if isinstance(request, m.Put):
            return self._put(request, message.payload)
        if kind in self._polls:
            return self._poll(identity, message.request_id, request)
        return self._handlers[kind](request)

    def _poll(self, identity: bytes, request_id: bytes, request: Any) -> Answer | None:
        wait_s = 0.0 if math.isnan(request.wait_s) else min(request.wait_s, MAX_WAIT_S)
        if isinstance(request, m.Lease):  # only its arrival is a sign of life, not that it is still parked
            self._store.renew(request.worker, self._clock())
        waiting = Parked(identity, request, self._clock() + wait_s)
        answer = self._polled(request_id, waiting, last=wait_s <= 0)
        if answer is None:
            self._parked[type(request)][request_id] = waiting
        return answer

    def _polled(self, request_id: bytes, waiting: Parked, *, last: bool) -> Answer | None:
        """Try a long-poll; when ``last``, there is always an answer. A lease that was granted is granted again."""
        granted = self._leased.get(request_id)
        if granted is not None:
            return Answer(granted.leased)
        request = waiting.request
        answer = self._polls[type(request)](request, last)
        if answer is None or not isinstance(request, m.Lease):
            return answer
        if isinstance(answer.reply, m.Leased) and answer.reply.groups:
            self._leased[request_id] = Granted(waiting.identity, request.worker, answer.reply)
            if len(self._leased) > REMEMBERED:
                self._leased.popitem(last=False)
        return answer

    # --- handlers ---------------------------------------------------------------------------------------------------

    def _hello(self, identity: bytes, request: m.Hello) -> Answer:
        if request.schema != m.SCHEMA:
            reason = f"the queue speaks schema {m.SCHEMA}, {request.role} {request.name} speaks {request.schema}"
            return Answer(m.Refused(code="schema", reason=reason))
        self._greeted[identity] = request.name
        self._greeted.move_to_end(identity)
        if len(self._greeted) > REMEMBERED:
            self._greeted.popitem(last=False)
        return Answer(m.Welcome(schema=m.SCHEMA, run_id=self._run_id))

    def _put(self, request: m.Put, payload: Sequence[Frame]) -> Answer:
        if not all(request.samples) or sum(map(len, request.samples)) != len(payload):
            raise ProtocolError(
                f"a Put of {[len(headers) for headers in request.samples]} rows with {len(payload)} payload frames"
            )
        frames = iter(payload)
        samples = [(headers, list(itertools.islice(frames, len(headers)))) for headers in request.samples]
        return Answer(m.Taken(refused=[self._take(request.worker, headers, rows) for headers, rows in samples]))

    def _take(self, worker: str, headers: Sequence[m.TrajectoryHeader], rows: Sequence[Frame]) -> m.Refused | None:
        headers = [
            msgspec.structs.replace(header, nbytes=memoryview(row).nbytes)
            for header, row in zip(headers, rows, strict=True)
        ]
        reply = self._store.put(worker, headers, self._clock())
        if isinstance(reply, m.Refused):
            return reply
        if self._store.holds(headers[0].group_id):
            self._payloads.put(headers[0].group_id, headers[0].sample, rows)
        return None

    def _fetch(self, request: m.Fetch) -> Answer:
        rows = [self._payloads.get(key) for key in request.rows]
        missing = [key for key, row in zip(request.rows, rows) if row is None]
        if missing:
            return Answer(m.Refused(code="unknown_row", reason=f"no row (group, sample, segment) {missing[:8]}"))
        return Answer(m.Rows(), [row for row in rows if row is not None])

    def _remove_engine(self, request: m.RemoveEngine) -> Answer:
        log.info("engine %s leaves: %s", request.engine_id, request.reason)
        return Answer(self._store.remove_engine(request.engine_id))

    def _lease(self, request: m.Lease, last: bool) -> Answer | None:
        reply = self._store.lease(request.worker, request.max_groups, self._clock())
        return Answer(reply) if reply.groups or reply.finished or last else None

    def _reserve(self, request: m.Reserve, last: bool) -> Answer | None:
        reply = self._store.reserve(request.step, self._clock())
        return None if isinstance(reply, m.NotReady) and not last else Answer(reply)

    def _eval_result(self, request: m.EvalResult, last: bool) -> Answer | None:
        reply = self._store.eval_result(request.eval_id)
        return None if isinstance(reply, m.NotReady) and not last else Answer(reply)

    def _engines(self, request: m.Engines, last: bool) -> Answer | None:
        reply = self._store.engines()
        return Answer(reply) if reply.revision > request.after or last else None


def bind(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
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
