"""The verbs of the queue: how each request is handled, and which transitions can change the answer of a parked one.

What a handler decides, and what the transitions of that decision do to the state, stand together in ``state/``. To add
a verb: its request and reply in ``messages/``, a row in VERBS with the roles that may use it, and a line in
``client/verbs.py``.
"""

import hashlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from rl_async import messages as m
from rl_async.configs.derived.rewards import unbounded
from rl_async.errors import ProtocolError
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.roles import EVERYBODY, Role, only
from rl_async.transfer_queue.journal.interface import Journal
from rl_async.transfer_queue.journal.payloads import FREEING
from rl_async.transfer_queue.server.gate import Response
from rl_async.transfer_queue.server.leasing import Leasing
from rl_async.transfer_queue.state import observe
from rl_async.transfer_queue.state import transitions as t
from rl_async.transfer_queue.state.store import Store

log = logging.getLogger("rl_async.queue")

MAX_WAIT_S = 60.0  # of a long poll; longer waits are cut to this
Q = TypeVar("Q", bound=m.Request[Any])


class Serving(NamedTuple):
    """What the handlers of verbs work on."""

    store: Store
    journal: Journal
    leasing: Leasing
    rates: observe.Rates
    clock: Callable[[], float]


class Incoming(NamedTuple, Generic[Q]):
    """One request, whose connection is ``identity``, and its payload frames."""

    identity: bytes
    request_id: bytes
    request: Q
    payload: Sequence[Frame] = ()


def _in_order(queue: Serving, parked: Sequence[Incoming[Any]]) -> Iterable[Incoming[Any]]:
    return parked


def _any_wait(store: Store, request: Any, now: float) -> float:
    return MAX_WAIT_S


class Verb(NamedTuple):
    """One row of the table. A request from a client whose key has none of ``roles`` is refused.

    ``handle`` gets the request and whether it must answer now; None parks a long poll until a transition among
    ``wakes``, and then the parked ones are tried again as ``retry`` yields them. ``arrive`` is called once when a long
    poll arrives; it returns the most seconds that the poll may wait.
    """

    request: type[m.Request[Any]]
    roles: frozenset[Role]
    handle: Callable[[Serving, Incoming[Any], bool], Response | None]
    wakes: frozenset[type[t.Transition]] = frozenset()
    arrive: Callable[[Store, Any, float], float] = _any_wait
    retry: Callable[[Serving, Sequence[Incoming[Any]]], Iterable[Incoming[Any]]] = _in_order
    payload: bool = False  # whether frames may follow the request


def _fenced(verb: Verb) -> Verb:
    """The verb, refusing a trainer that another has replaced; a parked request of it is answered when that resumes."""

    def handle(queue: Serving, incoming: Incoming[Any], last: bool) -> Response | None:
        refused = queue.store.book.fence(incoming.request.lineage)
        return verb.handle(queue, incoming, last) if refused is None else Response(refused)

    return verb._replace(handle=handle, wakes=verb.wakes | {t.RolledBack})


def _verb(kind: type[Q], roles: frozenset[Role], handle: Callable[[Store, Q, float], m.Reply]) -> Verb:
    """A verb that needs nothing but the store, its request and the time."""
    return Verb(kind, roles, lambda queue, incoming, _: Response(handle(queue.store, incoming.request, queue.clock())))


def _once(kind: type[Q], roles: frozenset[Role], handle: Callable[[Store, Q, bytes], m.Reply]) -> Verb:
    """A verb that takes effect once for each request id."""
    return Verb(
        kind, roles, lambda queue, incoming, _: Response(handle(queue.store, incoming.request, incoming.request_id))
    )


def _poll(
    kind: type[Q],
    roles: frozenset[Role],
    handle: Callable[[Store, Q, float], m.Reply],
    *wakes: type[t.Transition],
    waits: Callable[[Q, Any], bool] = lambda _, reply: isinstance(reply, m.NotReady),
    arrive: Callable[[Store, Any, float], float] = _any_wait,
) -> Verb:
    """A long poll that ``waits`` while its reply has nothing to say."""

    def answer(queue: Serving, incoming: Incoming[Q], last: bool) -> Response | None:
        reply = handle(queue.store, incoming.request, queue.clock())
        waiting = not last and not isinstance(reply, m.Refused) and waits(incoming.request, reply)
        return None if waiting else Response(reply)

    return Verb(kind, roles, answer, frozenset(wakes), arrive)


# --- leases ---------------------------------------------------------------------------------------------------------


def _lease(queue: Serving, incoming: Incoming[m.Lease], last: bool) -> Response | None:
    own = incoming.request.task
    if own is not None and (refused := queue.store.tasks.refused([own])):
        return Response(refused)
    reply = queue.leasing.lease(incoming.request_id, incoming.identity, incoming.request, queue.clock(), last=last)
    return None if reply is None else Response(reply)


def _lease_arrived(store: Store, request: m.Lease, now: float) -> float:
    """Renew the worker's leases: only the arrival of its question is a sign of life, not that it is still parked."""
    store.delivery.renew(request.worker, now)
    store.attendance.hear(request.worker, now, request.idle_s)
    return MAX_WAIT_S


def _renew(store: Store, request: m.Renew, now: float) -> m.Reply:
    store.attendance.hear(request.worker, now)
    return store.delivery.renew(request.worker, now, request.held)


def _attended(store: Store, reply: m.Reply, now: float) -> m.Reply:
    """Add to a reply that there is nothing yet for how long no program has asked, if that is why."""
    unattended_s = store.attendance.unattended_s(now)
    if not isinstance(reply, m.NotReady) or not unattended_s:
        return reply
    why = f"{reply.why}; no agent program has asked a gateway for an episode for {unattended_s:.0f} s"
    return m.NotReady(why=why, unattended_s=unattended_s)


def _equal_shares(queue: Serving, parked: Sequence[Incoming[m.Lease]]) -> Iterable[Incoming[m.Lease]]:
    """Each parked worker with an equal share of the groups that may be leased, the longest unserved first."""
    in_turn = sorted(parked, key=lambda incoming: queue.leasing.turn(incoming.request.worker))
    for place, incoming in enumerate(in_turn):
        share = max(1, -(-queue.store.book.leasable() // (len(in_turn) - place)))
        modest = msgspec.structs.replace(incoming.request, max_groups=min(incoming.request.max_groups, share))
        yield incoming._replace(request=modest)


# --- payloads -------------------------------------------------------------------------------------------------------


def _put(queue: Serving, incoming: Incoming[m.Put], last: bool) -> Response:
    request, payload, store = incoming.request, incoming.payload, queue.store
    if not all(request.samples):
        raise ProtocolError("a Put of a sample without rows")
    hashes = {sha256 for headers in request.samples for header in headers for sha256 in header.media}
    places = {sha256: m.media_sample(sha256) for sha256 in hashes}
    now = queue.clock()
    if store.settings.replicas:
        if payload:
            return Response(m.Refused(code=wire.SHARDED, reason="the payloads of this queue go to its shards"))
        taken = [_take_headers(store, request.worker, headers, now) for headers in request.samples]
        return Response(m.Taken(refused=taken))
    rows = sum(map(len, request.samples))
    if rows + len(request.media) != len(payload) or not all(map(len, payload)):
        raise ProtocolError(
            f"a Put of {[len(headers) for headers in request.samples]} rows and {len(request.media)} media with "
            f"{len(payload)} payload frames, none of which may be empty"
        )
    frames = iter(payload)
    samples = [(headers, list(itertools.islice(frames, len(headers)))) for headers in request.samples]
    media = _checked_media(request.media, list(frames))
    return Response(m.Taken(refused=[_take(queue, request.worker, *sample, media, places) for sample in samples]))


def _take_headers(store: Store, worker: str, headers: Sequence[m.TrajectoryHeader], now: float) -> m.Refused | None:
    """Take a sample whose payload is with shards; None, or why not."""
    if refused := _unbounded(store, worker, headers, now):
        return refused
    reply = store.shards.misplaced(headers) or store.delivery.put(worker, headers, now)
    return reply if isinstance(reply, m.Refused) else None


def _unbounded(store: Store, worker: str, headers: Sequence[m.TrajectoryHeader], now: float) -> m.Refused | None:
    """Refuse a sample with a reward beyond the bound; its attempt has failed, so it is generated again."""
    limit, bounded = store.settings.reward_limit, store.settings.reward_parts
    for header in headers:
        others = {name: part for name, part in header.reward_parts.items() if name not in bounded}
        parts = {name: part for name, part in header.reward_parts.items() if name in bounded}
        problem = unbounded({"the reward": header.reward} | parts, limit) or unbounded(others, sys.float_info.max)
        if problem:
            failed = store.delivery.fail(worker, header.group_id, header.sample, header.attempt, problem, now)
            return failed if isinstance(failed, m.Refused) else m.Refused(code="reward", reason=problem)
    return None


def _take(
    queue: Serving,
    worker: str,
    headers: Sequence[m.TrajectoryHeader],
    rows: Sequence[Frame],
    media: dict[m.MediaKey, Frame],
    places: dict[str, int],
) -> m.Refused | None:
    """Take a sample with its payload and the media that its group lacks; ``places`` are their sample numbers."""
    if refused := _unbounded(queue.store, worker, headers, queue.clock()):
        return refused
    journal, group = queue.journal, headers[0].group_id
    wanted = dict.fromkeys(sha256 for header in headers for sha256 in header.media)
    new = [sha256 for sha256 in wanted if not journal.has(group, places[sha256])]
    if missing := [sha256 for sha256 in new if (group, sha256) not in media]:
        return m.Refused(code=wire.MEDIA, reason=" ".join(missing))
    headers = [
        msgspec.structs.replace(header, nbytes=memoryview(row).nbytes, shards=[])
        for header, row in zip(headers, rows, strict=True)
    ]
    headers[0].nbytes += sum(memoryview(media[group, sha256]).nbytes for sha256 in new)
    reply = queue.store.delivery.put(worker, headers, queue.clock())
    if isinstance(reply, m.Refused):
        return reply
    if group in queue.store.book.groups:  # else its last sample has shown that it is not worth keeping
        journal.put(group, headers[0].sample, rows)
        for sha256 in new:
            journal.put(group, places[sha256], [media[group, sha256]])
    return None


def _checked_media(keys: Sequence[m.MediaKey], frames: Sequence[Frame]) -> dict[m.MediaKey, Frame]:
    """Media by group and hash. Raises ProtocolError for bytes that have another hash."""
    for (_, sha256), frame in zip(keys, frames, strict=True):
        if hashlib.sha256(frame).hexdigest() != sha256:
            raise ProtocolError(f"the bytes of a medium do not have the hash {sha256[:80]}")
    return dict(zip(keys, frames, strict=True))


def _fetch(queue: Serving, incoming: Incoming[m.Fetch], last: bool) -> Response:
    wanted = incoming.request.rows
    if len(set(wanted)) != len(wanted):
        return Response(m.Refused(code="rows", reason="a row is requested twice"))
    if queue.store.settings.replicas:
        return Response(queue.store.shards.places(wanted))
    rows = [queue.journal.get(key) for key in wanted]
    missing = [key for key, row in zip(wanted, rows) if row is None]
    if missing:
        return Response(m.Refused(code="unknown_row", reason=f"no row (group, sample, segment) {missing[:8]}"))
    found = [row for row in rows if row is not None]
    return Response(m.FetchedRows(lengths=[memoryview(row).nbytes for row in found]), wire.join(found))


# --- registries -----------------------------------------------------------------------------------------------------


def _register_shard(store: Store, request: m.RegisterShard, now: float) -> m.Reply:
    log.info("payload shard %s at %s", request.shard_id, request.url)
    record = m.ShardRecord(shard_id=request.shard_id, name=request.name, url=request.url)
    return store.shards.register(record, now)


def _sweep_arrived(store: Store, request: m.Sweep, now: float) -> float:
    """Note the shard's sign of life; it must give the next one before it would count as lost."""
    store.shards.hear(request.shard_id, now)
    return min(MAX_WAIT_S, store.settings.lease_s / 4)


def _remove_engine(store: Store, request: m.RemoveEngine, now: float) -> m.Reply:
    log.info("engine %s leaves: %s", request.engine_id, request.reason)
    return store.engines.remove(request.engine_id)


# --- the table ------------------------------------------------------------------------------------------------------

_LEASE_WAKES: frozenset[type[t.Transition]] = frozenset(
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
)

GENERATES = only("worker", "operator")  # an operator imports what another queue exported
TRAINS = only("trainer")
FETCHES = only("trainer", "reader", "operator")
READS = only("reader", "operator")
OPERATES = only("operator")
KEEPS = only("shard")

_VERBS = (
    # agent workers
    Verb(m.Lease, GENERATES, _lease, _LEASE_WAKES, _lease_arrived, _equal_shares),
    _verb(m.Renew, GENERATES, _renew),
    Verb(m.Put, GENERATES, _put, payload=True),
    _verb(
        m.Fail, GENERATES, lambda s, r, now: s.delivery.fail(r.worker, r.group_id, r.sample, r.attempt, r.error, now)
    ),
    # the trainer
    _poll(
        m.Reserve,
        TRAINS,
        lambda s, r, now: _attended(s, s.batches.reserve(r.step, now), now),
        *(t.GroupReady, t.GroupDropped, t.DeadLettered, t.BatchReserved),
    ),
    Verb(m.Fetch, FETCHES, _fetch),
    _verb(m.Commit, TRAINS, lambda s, r, _: s.batches.commit(r.step)),
    _verb(m.Publish, TRAINS, lambda s, r, _: s.publish(r.version, r.engines)),
    _verb(m.Retire, TRAINS, lambda s, r, _: s.retire(r.step)),
    _verb(m.Tighten, TRAINS, lambda s, r, _: s.batches.tighten(r.max_staleness)),
    _verb(m.Snapshot, TRAINS, lambda s, r, _: m.SnapshotTaken(snapshot=s.batches.snapshot())),
    _verb(m.Resume, TRAINS, lambda s, r, _: s.resume(r.step, r.lineage, r.snapshot)),
    _verb(m.Evaluate, TRAINS, lambda s, r, _: s.evals.open(r.eval_id)),
    _poll(
        m.AwaitEvaluation,
        TRAINS,
        lambda s, r, now: _attended(s, s.evals.result(r.eval_id), now),
        *(t.GroupReady, t.EvalClosed),
    ),
    _verb(m.Finish, TRAINS, lambda s, r, _: s.finish()),
    # registries of engines and payload shards
    _poll(
        m.ListEngines,
        EVERYBODY,
        lambda s, r, _: s.engine_list(),
        t.EnginesChanged,
        waits=lambda r, reply: reply.revision <= r.after,
    ),
    _verb(m.RegisterEngine, OPERATES, lambda s, r, _: s.engines.register(r.engine_id, r.url, r.kind)),
    _verb(m.RemoveEngine, TRAINS | OPERATES, _remove_engine),
    _verb(
        m.Confirm, TRAINS, lambda s, r, _: s.book.fence(r.version.lineage) or s.engines.confirm(r.engine_id, r.version)
    ),
    _poll(
        m.ListShards,
        EVERYBODY,
        lambda s, r, _: s.shards.list(),
        *(t.ShardsChanged, t.ShardLost, t.RolledBack),
        waits=lambda r, reply: reply.revision <= r.after,
    ),
    _verb(m.RegisterShard, KEEPS, _register_shard),
    _poll(
        m.Sweep,
        KEEPS,
        lambda s, r, _: s.shards.sweep(r.shard_id, r.groups),
        t.ShardLost,
        *FREEING,
        waits=lambda _, reply: not reply.gone,
        arrive=_sweep_arrived,
    ),
    # other readers of what is trained
    _verb(m.Subscribe, READS, lambda s, r, _: s.consumers.subscribe(r.consumer, r.oldest)),
    _poll(
        m.Read,
        READS,
        lambda s, r, _: s.consumers.read(r.consumer, r.after, r.max_groups),
        *(t.BatchCommitted, t.RolledBack, t.RunFinished),
        waits=lambda _, reply: not reply.groups and not reply.finished,
    ),
    _verb(m.Acknowledge, READS, lambda s, r, _: s.consumers.acknowledge(r.consumer, r.position)),
    _verb(m.Unsubscribe, READS, lambda s, r, _: s.consumers.unsubscribe(r.consumer)),
    # producers of tasks, people and monitoring
    _once(m.Submit, GENERATES, lambda s, r, request_id: s.tasks.submit(r.tasks, request_id)),
    _once(m.Requeue, OPERATES, lambda s, r, request_id: s.tasks.requeue(r.group_id, request_id)),
    _verb(m.Drain, OPERATES, lambda s, r, _: s.tasks.drain(r.on)),
    _verb(m.Status, EVERYBODY, lambda s, _, now: s.status(now)),
    Verb(m.Inspect, READS, lambda q, _, __: Response(q.store.inspect(q.clock(), q.rates.per_second(q.clock())))),
    _verb(m.ListGroups, READS, lambda s, r, now: observe.group_list(s.book, r.after, r.limit, r.state, now)),
    _verb(m.Peek, READS, lambda s, r, now: observe.peek(s.book, r.group_id, now)),
)

# Resume names the lineage that it begins.
VERBS = tuple(
    _fenced(verb) if "lineage" in verb.request.__struct_fields__ and verb.request is not m.Resume else verb
    for verb in _VERBS
)

SHARD_VERBS = {m.StoreRows: GENERATES, m.LoadRows: FETCHES}  # what payload shards answer, and to whom
