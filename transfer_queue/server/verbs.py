"""The verbs of the queue: how each request is handled, and which transitions can change the answer of a parked one.

What a handler decides, and what the transitions of that decision do to the state, stand together in ``state/``. To add
a verb: its request and reply in ``messages/``, a row in VERBS with the roles that may use it, and a line in
``client/verbs.py``.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from rl_async import messages as m
from rl_async.transfer_queue.auth.roles import EVERYBODY, Role, only
from rl_async.transfer_queue.journal.payloads import FREEING
from rl_async.transfer_queue.server.gate import Response
from rl_async.transfer_queue.server.payloads import fetch, put
from rl_async.transfer_queue.server.serving import Incoming, Q, Serving
from rl_async.transfer_queue.state import observe
from rl_async.transfer_queue.state import transitions as t
from rl_async.transfer_queue.state.store import Store

log = logging.getLogger("rl_async.queue")

MAX_WAIT_S = 60.0  # of a long poll; longer waits are cut to this


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
    idle: Callable[[Store, Q], bool] = lambda *_: False,
) -> Verb:
    """A long poll that ``waits`` while its reply has nothing to say, or is ``idle``, which needs no reply to know."""

    def answer(queue: Serving, incoming: Incoming[Q], last: bool) -> Response | None:
        if not last and idle(queue.store, incoming.request):
            return None
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
    return msgspec.structs.replace(reply, why=why, unattended_s=unattended_s)


def _equal_shares(queue: Serving, parked: Sequence[Incoming[m.Lease]]) -> Iterable[Incoming[m.Lease]]:
    """Each parked worker with an equal share of the groups that may be leased, the longest unserved first; nobody else
    once there are none, except to hear that the run is over."""
    book = queue.store.book
    if not book.leasable() and not book.finished:
        return
    in_turn = sorted(parked, key=lambda incoming: queue.leasing.turn(incoming.request.worker))
    for place, incoming in enumerate(in_turn):
        leasable = book.leasable()
        if not leasable and not book.finished:
            return
        share = max(1, -(-leasable // (len(in_turn) - place)))
        modest = msgspec.structs.replace(incoming.request, max_groups=min(incoming.request.max_groups, share))
        yield incoming._replace(request=modest)


# --- registries -----------------------------------------------------------------------------------------------------


def _register_shard(store: Store, request: m.RegisterShard, now: float) -> m.Reply:
    log.info("payload shard %s at %s", request.shard_id, request.url)
    record = m.ShardRecord(shard_id=request.shard_id, name=request.name, url=request.url)
    return store.shards.register(record, now)


def _sweep_arrived(store: Store, request: m.Sweep, now: float) -> float:
    """Note the shard's sign of life; it must give the next one before it would count as lost."""
    store.shards.hear(request.shard_id, now)
    return min(MAX_WAIT_S, store.settings.lease_s / 4)


def _list_engines(queue: Serving, incoming: Incoming[m.ListEngines], last: bool) -> Response | None:
    now, after = queue.clock(), incoming.request.after
    if not last and not queue.announcing.has_news(after, now):
        return None
    reply = queue.store.engine_list()
    if reply.revision > after:
        queue.announcing.answered(now)
    return Response(reply)


def _engines_in_order(queue: Serving, parked: Sequence[Incoming[m.ListEngines]]) -> Iterable[Incoming[m.ListEngines]]:
    """All readers of the registry, if it is time for an announcement."""
    if not queue.announcing.is_due(queue.clock()):
        return ()
    queue.announcing.announce()
    return parked


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

ENGINES_CHANGE: frozenset[type[t.Transition]] = frozenset({t.EnginesChanged, t.EngineChanged, t.EngineRemoved})

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
    Verb(m.Put, GENERATES, put, payload=True),
    _verb(
        m.Fail, GENERATES, lambda s, r, now: s.delivery.fail(r.worker, r.group_id, r.sample, r.attempt, r.error, now)
    ),
    # the trainer
    _poll(
        m.Reserve,
        TRAINS,
        lambda s, r, now: _attended(s, s.batches.reserve(r.step, now), now),
        *(t.GroupReady, t.GroupDropped, t.DeadLettered, t.BatchReserved),
        idle=lambda s, r: s.batches.is_short(r.step),  # asked at every group that becomes ready
    ),
    Verb(m.Fetch, FETCHES, fetch),
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
        lambda s, r, now: _attended(s, s.evals.result(r.eval_id, r.so_far), now),
        *(t.GroupReady, t.EvalClosed),
    ),
    _verb(m.Finish, TRAINS, lambda s, r, _: s.finish()),
    # registries of engines and payload shards
    Verb(m.ListEngines, EVERYBODY, _list_engines, ENGINES_CHANGE, retry=_engines_in_order),
    _verb(m.RegisterEngine, OPERATES, lambda s, r, _: s.engines.register(r.engine_id, r.url, r.kind)),
    _verb(m.RemoveEngine, TRAINS | OPERATES, _remove_engine),
    _verb(
        m.Confirm, TRAINS, lambda s, r, _: s.book.fence(r.version.lineage) or s.engines.confirm(r.engine_id, r.version)
    ),
    _verb(m.Withdraw, TRAINS, lambda s, r, _: s.engines.withdraw(r.engine_ids)),
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
