"""The queue's server without its socket: verbs and parked long polls around the pure store.

    request --> [gate -> verb -> store] --> responses, to be sent when the journal has them (``loop.py``)
                            |  transitions
                            v
             journal, ledger; parked long polls are tried again

One thread does all of it, so handlers need no locks. A request that cannot be understood is answered Malformed and
counted; one that does not apply is answered Refused. Neither changes anything.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from rl_async import messages as m
from rl_async.configs.schema.queue import QueueLimits
from rl_async.errors import ProtocolError
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.allow_list import AllowList
from rl_async.transfer_queue.journal.interface import Journal
from rl_async.transfer_queue.server.announcing import Announcing
from rl_async.transfer_queue.server.gate import Gate, Outgoing, Response
from rl_async.transfer_queue.server.leasing import Leasing
from rl_async.transfer_queue.server.parking import Parking
from rl_async.transfer_queue.server.serving import Incoming, Serving
from rl_async.transfer_queue.server.verbs import ENGINES_CHANGE, VERBS, Verb
from rl_async.transfer_queue.state import transitions as t
from rl_async.transfer_queue.state.observe import Rates
from rl_async.transfer_queue.state.store import Store

log = logging.getLogger("rl_async.queue")

HELD_UP_S = 1.0  # beyond which a turn of the loop is logged
_VERBS = {verb.request: verb for verb in VERBS}


class QueueServer:
    """Answers requests from the store. What ``handle``, ``tick`` and ``undelivered`` return is to be sent once the
    journal is flushed: no client may hear of what a crash could undo."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        feed: t.Feed,
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

        Time beyond an eighth of a lease since the turn before is not counted in any deadline: meanwhile the queue heard
        nobody, so nobody was silent.
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
        """Seconds in which the queue has served."""
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
        """End leases and waits whose time is over; the answers that follow."""
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
        """Forget what a lost connection waits for, and lease to others what it did not get.

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
        """Answer a parked request if there is something to say, or if this is its ``last`` chance."""
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
        wait_s = min(self._wait_s(message.request), verb.arrive(self._store, message.request, self._clock()))
        response = verb.handle(self._queue, incoming, wait_s <= 0)
        if response is None:
            self._parking.add(verb, incoming, self._clock() + wait_s)
        return response

    @staticmethod
    def _wait_s(request: m.LongPoll[Any]) -> float:
        return 0.0 if math.isnan(request.wait_s) else request.wait_s
