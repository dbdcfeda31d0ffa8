"""What the queue answers: requests and parked long-polls around the pure store, without a socket.

    request --> [decode -> handler -> store] --> answers, to be sent when the journal has them (``loop.py``)
                             |  transitions
                             v
              journal, ledger; parked long-polls are tried again

One thread does all of it, so handlers need no locks. A request that nobody can understand is answered
Malformed and counted; one that does not apply is answered Refused. Neither changes anything.
"""

import hashlib
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from rl_async import messages as m
from rl_async.configs.schema.queue import QueueLimits
from rl_async.errors import ProtocolError
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.journal.interface import Journal
from rl_async.transfer_queue.journal.payloads import FREEING
from rl_async.transfer_queue.server.gate import Answer, Gate, Outgoing
from rl_async.transfer_queue.state import transitions as t
from rl_async.transfer_queue.state.rates import Rates
from rl_async.transfer_queue.state.store import Store

log = logging.getLogger("rl_async.queue")

MAX_WAIT_S = 60.0  # longer waits are cut to this
REMEMBERED = 4096  # those that were given leases


class Parked(NamedTuple):
    """A long-poll that waits for the store to change."""

    identity: bytes
    request: m.LongPoll
    deadline: float


# Which transitions can change the answer to a parked request.
_WAKES: dict[type[m.LongPoll], frozenset[type[t.Transition]]] = {
    m.Lease: frozenset(
        {
            t.LeaseLost,
            t.ShardLost,
            t.SampleFailed,
            t.GroupDropped,
            t.DeadLettered,
            t.BatchReserved,
            t.Published,
            t.Retired,
            t.Tightened,
            t.Submitted,
            t.Requeued,
            t.Drained,
            t.EvalOpened,
            t.RunFinished,
        }
    ),
    m.Reserve: frozenset({t.GroupReady, t.GroupDropped, t.DeadLettered, t.BatchReserved}),
    m.EvalResult: frozenset({t.GroupReady, t.EvalClosed}),
    m.Engines: frozenset({t.EnginesChanged}),
    m.Shards: frozenset({t.ShardsChanged, t.ShardLost, t.RolledBack}),
    m.Sweep: FREEING | {t.ShardLost},
    m.Read: frozenset({t.BatchCommitted, t.RolledBack, t.RunFinished}),
}


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
    ) -> None:
        self._store, self._journal, self._clock = store, journal, clock
        self._gate = Gate(limits or QueueLimits(), clock, store.count, journal.run_id)
        self._changed: set[type[t.Transition]] = set()
        self._rates = Rates(clock())
        feed.subscribe(self._see)
        self._parked: dict[type[m.LongPoll], dict[bytes, Parked]] = {kind: {} for kind in _WAKES}
        self._leased_to: OrderedDict[bytes, set[bytes]] = OrderedDict()  # who was sent a lease, by request id
        self._empty: OrderedDict[bytes, None] = OrderedDict()  # requests for leases that were answered with nothing
        self._served: OrderedDict[str, int] = OrderedDict()  # workers that got groups, by turn; the latest last
        self._turn = 0
        self._polls: dict[type[m.LongPoll], Callable[[Any, bool], Answer | None]] = {
            m.Reserve: self._reserve,
            m.EvalResult: self._eval_result,
            m.Engines: self._engines,
            m.Shards: self._shards,
            m.Sweep: self._sweep,
            m.Read: self._read,
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
            m.RegisterShard: self._register_shard,
            m.Status: lambda r: Answer(store.status(clock())),
            m.Drain: lambda r: Answer(store.drain(r.on)),
            m.Inspect: lambda r: Answer(store.inspect(clock(), self._rates.per_second(clock()))),
            m.ListGroups: lambda r: Answer(store.group_list(r.after, r.limit, r.state, clock())),
            m.Peek: lambda r: Answer(store.peek(r.group_id, clock())),
            m.Subscribe: lambda r: Answer(store.subscribe(r.consumer, r.oldest)),
            m.Acknowledge: lambda r: Answer(store.acknowledge(r.consumer, r.position)),
            m.Unsubscribe: lambda r: Answer(store.unsubscribe(r.consumer)),
            m.Finish: lambda r: Answer(store.finish()),
        }

    def _see(self, transition: t.Transition) -> None:
        self._changed.add(type(transition))
        self._rates.see(transition, self._clock())

    def handle(self, parts: Sequence[Any]) -> list[Outgoing]:
        """Answer one message, and whatever was waiting for its effect."""
        own = self._gate.answer(parts, self._answer)
        return ([] if own is None else [own]) + self._wake()

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
        self._gate.forget(message.identity)
        for parked in self._parked.values():
            for request_id in [key for key, waiting in parked.items() if waiting.identity == message.identity]:
                del parked[request_id]
        sent_to = self._leased_to.get(message.request_id, set())
        sent_to.discard(message.identity)
        if message.request_id in self._leased_to and not sent_to:  # no copy of the answer may have arrived
            del self._leased_to[message.request_id]
            log.info("an answer with leases reached nobody; they are taken back")
            self._store.undelivered(message.request_id)
        return self._wake()

    def _wake(self) -> list[Outgoing]:
        """Try parked requests again, until the store does not change any more."""
        outgoing: list[Outgoing] = []
        while self._changed:
            changed, self._changed = self._changed, set()
            for kind, reasons in _WAKES.items():
                if changed.isdisjoint(reasons):
                    continue
                if kind is m.Lease:
                    outgoing += self._share_out()
                    continue
                for request_id, waiting in list(self._parked[kind].items()):
                    answer = self._polled(request_id, waiting, last=False)
                    if answer is not None:
                        del self._parked[kind][request_id]
                        outgoing.append(Outgoing(waiting.identity, request_id, answer))
        return outgoing

    def _share_out(self) -> list[Outgoing]:
        """Give parked workers equal shares of the groups that may be leased, the longest unserved first."""
        parked = self._parked[m.Lease].items()
        hungry = [(key, each, each.request) for key, each in parked if isinstance(each.request, m.Lease)]
        hungry.sort(key=lambda item: self._served.get(item[2].worker, 0))
        outgoing: list[Outgoing] = []
        for place, (request_id, waiting, request) in enumerate(hungry):
            share = max(1, -(-self._store.leasable() // (len(hungry) - place)))
            modest = msgspec.structs.replace(request, max_groups=min(request.max_groups, share))
            answer = self._lease(request_id, waiting.identity, modest, last=False)
            if answer is not None:
                del self._parked[m.Lease][request_id]
                outgoing.append(Outgoing(waiting.identity, request_id, answer))
        return outgoing

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def _answer(self, identity: bytes, message: wire.RequestMessage) -> Answer | None:
        """The answer, or None if the request is parked. Raises ProtocolError for a payload in the wrong place."""
        request, kind = message.request, type(message.request)
        if isinstance(request, m.Put):
            return self._put(request, message.payload)
        if message.payload:
            raise ProtocolError(f"a {kind.__name__} with {len(message.payload)} payload frames")
        if isinstance(request, m.LongPoll):
            return self._poll(identity, message.request_id, request)
        if isinstance(request, m.Submit):
            return Answer(self._store.submit(request.tasks, message.request_id))
        if isinstance(request, m.Requeue):
            return Answer(self._store.requeue(request.group_id, message.request_id))
        if kind not in self._handlers:
            return Answer(m.Refused(code="not_here", reason=f"a {kind.__name__} is for payload shards"))
        return self._handlers[kind](request)

    def _poll(self, identity: bytes, request_id: bytes, request: m.LongPoll) -> Answer | None:
        wait_s = 0.0 if math.isnan(request.wait_s) else min(request.wait_s, MAX_WAIT_S)
        if isinstance(request, m.Lease):  # only its arrival is a sign of life, not that it is still parked
            self._store.renew(request.worker, self._clock())
        if isinstance(request, m.Sweep):
            self._store.shards.hear(request.shard_id, self._clock())
            wait_s = min(wait_s, self._store.settings.lease_s / 4)  # it must be heard of again before it counts as lost
        waiting = Parked(identity, request, self._clock() + wait_s)
        answer = self._polled(request_id, waiting, last=wait_s <= 0)
        if answer is None:
            self._parked[type(request)][request_id] = waiting
        return answer

    def _polled(self, request_id: bytes, waiting: Parked, *, last: bool) -> Answer | None:
        """Try a long-poll; when ``last``, there is always an answer."""
        request = waiting.request
        if isinstance(request, m.Lease):
            return self._lease(request_id, waiting.identity, request, last)
        return self._polls[type(request)](request, last)

    # --- handlers ---------------------------------------------------------------------------------------------------

    def _put(self, request: m.Put, payload: Sequence[Frame]) -> Answer:
        if not all(request.samples):
            raise ProtocolError("a Put of a sample without rows")
        hashes = {sha256 for headers in request.samples for header in headers for sha256 in header.media}
        places = {sha256: m.media_sample(sha256) for sha256 in hashes}
        if self._store.settings.replicas:
            if payload:
                return Answer(m.Refused(code=wire.SHARDED, reason="the payloads of this queue go to its shards"))
            return Answer(m.Taken(refused=[self._take_header(request.worker, each) for each in request.samples]))
        rows = sum(map(len, request.samples))
        if rows + len(request.media) != len(payload) or not all(map(len, payload)):
            raise ProtocolError(
                f"a Put of {[len(headers) for headers in request.samples]} rows and {len(request.media)} media with "
                f"{len(payload)} payload frames, none of which may be empty"
            )
        frames = iter(payload)
        samples = [(headers, list(itertools.islice(frames, len(headers)))) for headers in request.samples]
        media = checked_media(request.media, list(frames))
        taken = [self._take(request.worker, headers, rows, media, places) for headers, rows in samples]
        return Answer(m.Taken(refused=taken))

    def _take_header(self, worker: str, headers: Sequence[m.TrajectoryHeader]) -> m.Refused | None:
        """A sample whose payload is with shards."""
        if refused := self._store.shards.misplaced(headers):
            return refused
        reply = self._store.put(worker, headers, self._clock())
        return reply if isinstance(reply, m.Refused) else None

    def _take(
        self,
        worker: str,
        headers: Sequence[m.TrajectoryHeader],
        rows: Sequence[Frame],
        media: dict[m.MediaKey, Frame],
        places: dict[str, int],
    ) -> m.Refused | None:
        """A sample with its payload, and the media that the group does not have; ``places`` by their hashes."""
        group = headers[0].group_id
        wanted = dict.fromkeys(sha256 for header in headers for sha256 in header.media)
        new = [sha256 for sha256 in wanted if not self._journal.has(group, places[sha256])]
        if missing := [sha256 for sha256 in new if (group, sha256) not in media]:
            return m.Refused(code=wire.MEDIA, reason=" ".join(missing))
        headers = [
            msgspec.structs.replace(header, nbytes=memoryview(row).nbytes, shards=[])
            for header, row in zip(headers, rows, strict=True)
        ]
        headers[0].nbytes += sum(memoryview(media[group, sha256]).nbytes for sha256 in new)
        reply = self._store.put(worker, headers, self._clock())
        if isinstance(reply, m.Refused):
            return reply
        if self._store.holds(group):
            self._journal.put(group, headers[0].sample, rows)
            for sha256 in new:
                self._journal.put(group, places[sha256], [media[group, sha256]])
        return None

    def _fetch(self, request: m.Fetch) -> Answer:
        if len(set(request.rows)) != len(request.rows):
            return Answer(m.Refused(code="rows", reason="a row is asked for twice"))
        if self._store.settings.replicas:
            return Answer(self._store.shards.places(request.rows))
        rows = [self._journal.get(key) for key in request.rows]
        missing = [key for key, row in zip(request.rows, rows) if row is None]
        if missing:
            return Answer(m.Refused(code="unknown_row", reason=f"no row (group, sample, segment) {missing[:8]}"))
        found = [row for row in rows if row is not None]
        return Answer(m.Rows(lengths=[memoryview(row).nbytes for row in found]), wire.join(found))

    def _remove_engine(self, request: m.RemoveEngine) -> Answer:
        log.info("engine %s leaves: %s", request.engine_id, request.reason)
        return Answer(self._store.remove_engine(request.engine_id))

    def _lease(self, request_id: bytes, identity: bytes, request: m.Lease, last: bool) -> Answer | None:
        """Groups, and who got them first over this connection, so that they can be taken back if it is gone.

        A request that was answered with nothing gets nothing again: its worker may have gone on to the next one and
        would never hear of groups that a late copy of it was given.
        """
        if request_id in self._empty:
            return Answer(m.Leased(groups=[]))
        reply = self._store.lease(request.worker, request.max_groups, self._clock(), request_id, request.task)
        if self._store.granted(request_id):
            self._serve_last(request.worker)
            self._leased_to.setdefault(request_id, set()).add(identity)
            if len(self._leased_to) > REMEMBERED:
                self._leased_to.popitem(last=False)
            return Answer(reply)
        if not reply.finished and not last:
            return None
        self._empty[request_id] = None
        if len(self._empty) > REMEMBERED:
            self._empty.popitem(last=False)
        return Answer(reply)

    def _serve_last(self, worker: str) -> None:
        """The worker got groups: it comes behind all others that wait for some."""
        self._turn += 1
        self._served.pop(worker, None)
        self._served[worker] = self._turn
        if len(self._served) > REMEMBERED:
            self._served.popitem(last=False)

    def _reserve(self, request: m.Reserve, last: bool) -> Answer | None:
        reply = self._store.reserve(request.step, self._clock())
        return None if isinstance(reply, m.NotReady) and not last else Answer(reply)

    def _eval_result(self, request: m.EvalResult, last: bool) -> Answer | None:
        reply = self._store.eval_result(request.eval_id)
        return None if isinstance(reply, m.NotReady) and not last else Answer(reply)

    def _read(self, request: m.Read, last: bool) -> Answer | None:
        reply = self._store.read(request.consumer, request.after, request.max_groups)
        waits = isinstance(reply, m.Delivered) and not reply.groups and not reply.finished
        return None if waits and not last else Answer(reply)

    def _engines(self, request: m.Engines, last: bool) -> Answer | None:
        reply = self._store.engines()
        return Answer(reply) if reply.revision > request.after or last else None

    def _shards(self, request: m.Shards, last: bool) -> Answer | None:
        reply = self._store.shards.list()
        return Answer(reply) if reply.revision > request.after or last else None

    def _sweep(self, request: m.Sweep, last: bool) -> Answer | None:
        reply = self._store.shards.sweep(request.shard_id, request.groups)
        return Answer(reply) if isinstance(reply, m.Refused) or reply.gone or last else None

    def _register_shard(self, request: m.RegisterShard) -> Answer:
        record = m.ShardRecord(shard_id=request.shard_id, name=request.name, url=request.url)
        log.info("payload shard %s at %s", record.shard_id, record.url)
        return Answer(self._store.shards.register(record, self._clock()))


def checked_media(keys: Sequence[m.MediaKey], frames: Sequence[Frame]) -> dict[m.MediaKey, Frame]:
    """Media by group and hash. Raises ProtocolError for bytes that have another hash."""
    for (_, sha256), frame in zip(keys, frames, strict=True):
        if hashlib.sha256(frame).hexdigest() != sha256:
            raise ProtocolError(f"the bytes of a medium do not have the hash {sha256[:80]}")
    return dict(zip(keys, frames, strict=True))
