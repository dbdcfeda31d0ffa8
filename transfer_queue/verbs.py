"""The verbs of the queue: how each request is handled, and which transitions can change the answer of a parked one.

Handlers get the queue that they work on (``Serving``) and one request (``Incoming``). They call methods of the store,
which hold the decisions beside the effects of their transitions on the state. To add a verb: its request and reply in
``rl_async/messages.py``, a row in ``_VERBS`` with the roles that may use it, and a line in ``client.py``.
"""

import hashlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from rl_async import messages as m
from rl_async.configs.derived import unbounded
from rl_async.errors import ProtocolError
from rl_async.messages import Frame
from rl_async.process.http_auth import ROLES, Role
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.delivery import Delivery
from rl_async.transfer_queue.images import images_by_hash
from rl_async.transfer_queue.journal import FREEING, Journal
from rl_async.transfer_queue.registry import Engines
from rl_async.transfer_queue.store import Rates, Store, group_list, peek

# Each answer postpones the next announcement by this. It takes 60 us of processor time, the reader's next question
# included, and several times as long where cores are shared. Until all readers have asked again, other requests wait
# behind theirs, so that most of the time must be left between two announcements.
ANSWER_S = 1e-3


class Announcing:
    """The announced revision of the registry. The newest one may be ahead of it for a moment."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._revision, self._next = engines.revision, 0.0

    def has_news(self, after: int, now: float) -> bool:
        """Whether to answer a reader that knows revision ``after``, or none, which is negative."""
        announced = self._engines.revision if now >= self._next else self._revision
        return after < 0 or after < announced

    def is_due(self, now: float) -> bool:
        """Whether it is time to tell waiting readers of changes."""
        return self._revision != self._engines.revision and now >= self._next

    def announce(self) -> None:
        """Note that all waiting readers are answered now."""
        self._revision = self._engines.revision

    def answered(self, now: float) -> None:
        """Note that a reader was told of a change."""
        self._next = max(self._next, now) + ANSWER_S


log = logging.getLogger("rl_async.queue")

# The newest requests, and workers, that are remembered.
REMEMBERED = 4096


class Leasing:
    """Leases groups to requests and remembers which connections got them."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        # Connections by request.
        self._sent_to: OrderedDict[bytes, set[bytes]] = OrderedDict()
        # Requests that were answered without groups.
        self._empty: OrderedDict[bytes, None] = OrderedDict()
        # The turn of each worker's last groups.
        self._served: OrderedDict[str, int] = OrderedDict()
        self._turn = 0

    def turn(self, worker: str) -> int:
        """The turn of the worker's last groups, from 1; 0 before its first."""
        return self._served.get(worker, 0)

    def lease(self, request_id: bytes, identity: bytes, request: m.Lease, now: float, *, last: bool) -> m.Leased | None:
        """Lease groups to the request. Returns None to keep it waiting, but not at the ``last`` try.

        A request that was answered without groups gets none again: its worker may have gone on to the next one and
        would never hear of groups that went to a late copy.
        """
        if request_id in self._empty:
            return m.Leased(groups=[])
        reply = self._delivery.lease(request.worker, request.max_groups, now, request_id, request.task)
        if self._delivery.grants.get(request_id) is not None:
            self._turn += 1
            _remember(self._served, request.worker, self._turn)
            self._sent_to.setdefault(request_id, set()).add(identity)
            _trim(self._sent_to)
            return reply
        if not reply.finished and not last:
            return None
        _remember(self._empty, request_id, None)
        return reply

    def undelivered(self, request_id: bytes, identity: bytes) -> None:
        """Take back the leases of an answer that reached none of the connections that asked for it."""
        sent_to = self._sent_to.get(request_id, set())
        sent_to.discard(identity)
        if request_id in self._sent_to and not sent_to:
            del self._sent_to[request_id]
            log.info("an answer with leases reached no worker; the leases are taken back")
            self._delivery.undelivered(request_id)


def _remember(memory: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    """Store ``value`` under ``key`` as the newest entry."""
    memory.pop(key, None)
    memory[key] = value
    _trim(memory)


def _trim(memory: "OrderedDict[Any, Any]") -> None:
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)


Q = TypeVar("Q", bound=m.Request[Any])


class Response(NamedTuple):
    """A reply with the payload frames that follow it."""

    reply: m.Reply
    payload: Sequence[Frame] = ()


class Serving(NamedTuple):
    """The queue as the handlers of verbs see it."""

    store: Store
    journal: Journal
    leasing: Leasing
    announcing: Announcing
    rates: Rates
    clock: Callable[[], float]


class Incoming(NamedTuple, Generic[Q]):
    """One request, whose connection is ``identity``, and its payload frames."""

    identity: bytes
    request_id: bytes
    request: Q
    payload: Sequence[Frame] = ()


# Those of the rows of one sample.
Headers = Sequence[m.TrajectoryHeader]


def put(queue: Serving, incoming: Incoming[m.Put], last: bool) -> Response:
    """Handle a Put: take in the samples that are wanted, all by one transition. Raises ProtocolError."""
    request, payload, store = incoming.request, incoming.payload, queue.store
    if not all(request.samples):
        raise ProtocolError("a Put of a sample without rows")
    hashes = {sha256 for headers in request.samples for header in headers for sha256 in header.media}
    places = {sha256: m.media_sample(sha256) for sha256 in hashes}
    if store.settings.replicas:
        if payload:
            return Response(m.Refused(code=wire.SHARDED, reason="the payloads of this queue go to its shards"))
        return Response(m.Taken(refused=_take(queue, request, store.shards.misplaced)))
    rows, media = _payload_of(request, payload)
    if places or media:
        return Response(m.Taken(refused=_put_with_media(queue, request, rows, media, places)))
    answers = _take(queue, request)
    _keep_rows(queue, request, answers, rows)
    return Response(m.Taken(refused=answers))


def _take(
    queue: Serving,
    request: m.Put,
    refusal: Callable[[Headers], m.Refused | None] | None = None,
    sized: Callable[[Headers], list[m.TrajectoryHeader]] = list,
) -> list[m.Refused | None]:
    """Take the samples without a ``refusal``, all at once; for each, return None or why it is not wanted.

    New samples are stored with the headers that ``sized`` returns.
    """
    store, worker, now = queue.store, request.worker, queue.clock()
    answers: list[m.Refused | None] = []
    for headers in request.samples:
        refused = _unbounded(store, worker, headers, now)
        answers.append(refusal(headers) if refused is None and refusal is not None else refused)
    wanted = [number for number, answer in enumerate(answers) if answer is None]
    samples = request.samples if len(wanted) == len(answers) else [request.samples[number] for number in wanted]
    taken = store.delivery.put_all(worker, samples, now, sized)
    for number, refused in zip(wanted, taken, strict=True):
        answers[number] = refused
    return answers


def _unbounded(store: Store, worker: str, headers: Headers, now: float) -> m.Refused | None:
    """Refuse a sample with a reward beyond the bound, and fail its attempt, so that it is generated again."""
    limit, bounded = store.settings.reward_limit, store.settings.reward_parts
    for header in headers:
        if abs(header.reward) <= limit and not header.reward_parts:
            continue
        others = {name: part for name, part in header.reward_parts.items() if name not in bounded}
        parts = {name: part for name, part in header.reward_parts.items() if name in bounded}
        problem = unbounded({"the reward": header.reward} | parts, limit) or unbounded(others, sys.float_info.max)
        if problem:
            failed = store.delivery.fail(worker, header.group_id, header.sample, header.attempt, problem, now)
            return failed if isinstance(failed, m.Refused) else m.Refused(code="reward", reason=problem)
    return None


def _keep_rows(queue: Serving, request: m.Put, answers: Sequence[m.Refused | None], rows: Sequence[Frame]) -> None:
    """Hand the rows of the samples that were taken to the journal.

    Groups that are gone already are left out: their last sample may have shown that they are not worth keeping.
    """
    put, groups, start = queue.journal.put, queue.store.book.groups, 0
    for headers, refused in zip(request.samples, answers, strict=True):
        end = start + len(headers)
        if refused is None and headers[0].group_id in groups:
            put(headers[0].group_id, headers[0].sample, rows[start:end])
        start = end


def _put_with_media(
    queue: Serving, request: m.Put, rows: Sequence[Frame], media: dict[m.MediaKey, Frame], places: dict[str, int]
) -> list[m.Refused | None]:
    """Take samples with their rows and the media that their groups lack; ``places`` are the media's sample numbers.

    Images of a group's task are part of the task, and not stored again.
    """
    journal, groups = queue.journal, queue.store.book.groups
    named = {headers[0].group_id for headers in request.samples if any(header.media for header in headers)}
    shown = {(group, sha256) for group in named & groups.keys() for sha256 in images_by_hash(groups[group].task.prompt)}
    # New media of the samples that are taken.
    coming: set[m.MediaKey] = set()

    def lacking(headers: Headers) -> set[m.MediaKey]:
        keys = {(headers[0].group_id, sha256) for header in headers for sha256 in header.media}
        return {key for key in keys - shown if not journal.has(key[0], places[key[1]])}

    def missing(headers: Headers) -> m.Refused | None:
        absent = sorted(sha256 for _, sha256 in lacking(headers) - media.keys())
        return m.Refused(code=wire.MEDIA, reason=" ".join(absent)) if absent else None

    def sized(headers: Headers) -> list[m.TrajectoryHeader]:
        new = lacking(headers) - coming
        coming.update(new)
        headers[0].nbytes += sum(len(media[key]) for key in new)
        return list(headers)

    answers = _take(queue, request, missing, sized)
    _keep_rows(queue, request, answers, rows)
    for headers, refused in zip(request.samples, answers, strict=True):
        group = headers[0].group_id
        if refused is None and group in groups:
            for key in {(group, sha256) for header in headers for sha256 in header.media} & coming:
                journal.put(group, places[key[1]], [media[key]])
    return answers


def _payload_of(request: m.Put, payload: Sequence[Frame]) -> tuple[Sequence[Frame], dict[m.MediaKey, Frame]]:
    """The rows of a Put and its media by group and hash; the headers get the rows' lengths.

    Raises ProtocolError if the payload does not match the request.
    """
    count = sum(map(len, request.samples))
    media = len(payload) - len(request.media)
    if count != len(request.lengths) or media < 0 or not all(map(len, payload)):
        raise ProtocolError(
            f"a Put of {count} rows with {len(request.lengths)} lengths, and of {len(request.media)} media with "
            f"{len(payload)} payload frames, none of which may be empty"
        )
    rows = wire.split(payload[:media], request.lengths)
    lengths = iter(request.lengths)
    for headers in request.samples:
        for header in headers:
            header.nbytes, header.shards = next(lengths), []
    found = list(zip(request.media, payload[media:], strict=True))
    for (_, sha256), frame in found:
        if hashlib.sha256(frame).hexdigest() != sha256:
            raise ProtocolError(f"the bytes of a medium do not have the hash {sha256[:80]}")
    return rows, dict(found)


def fetch(queue: Serving, incoming: Incoming[m.Fetch], last: bool) -> Response:
    """Handle a Fetch: reply with the rows, or with their shards."""
    wanted = incoming.request.rows
    if len(set(wanted)) != len(wanted):
        return Response(m.Refused(code="rows", reason="a row is requested twice"))
    if queue.store.settings.replicas:
        return Response(queue.store.shards.places(wanted))
    rows = [queue.journal.get(key) or image for key, image in zip(wanted, _images_of_tasks(queue.store, wanted))]
    missing = [key for key, row in zip(wanted, rows) if row is None]
    if missing:
        return Response(m.Refused(code="unknown_row", reason=f"no row (group, sample, segment) {missing[:8]}"))
    found = [row for row in rows if row is not None]
    return Response(m.FetchedRows(lengths=list(map(len, found))), wire.join(found))


def _images_of_tasks(store: Store, wanted: Sequence[m.RowKey]) -> list[bytes | None]:
    """Return the image of a group's task for each of these keys that stands for one, and None for other keys."""
    tasks = {group: store.task_of(group) for group, sample, _ in wanted if sample < 0}
    shown = {
        (group, m.media_sample(sha256), 0): image
        for group, task in tasks.items()
        if task is not None
        for sha256, image in images_by_hash(task.prompt).items()
    }
    return list(map(shown.get, wanted))


# Longer waits of a long poll are cut to this.
MAX_WAIT_S = 60.0


class Verb(NamedTuple):
    """One row of the table. A request from a client whose key has none of ``roles`` is refused.

    ``handle`` gets the request and whether it must answer now. It parks a long poll by returning None; after a
    transition among ``wakes`` the parked ones are tried again as ``retry`` yields them. ``arrive`` is called once when
    a long poll arrives; it returns the most seconds that the poll may wait. Only verbs with ``payload`` may be followed
    by frames.
    """

    request: type[m.Request[Any]]
    roles: frozenset[Role]
    handle: Callable[[Serving, Incoming[Any], bool], Response | None]
    wakes: frozenset[type[t.Transition]] = frozenset()
    arrive: Callable[[Store, Any, float], float] = lambda *_: MAX_WAIT_S
    retry: Callable[[Serving, Sequence[Incoming[Any]]], Iterable[Incoming[Any]]] = lambda _, parked: parked
    payload: bool = False


def _fenced(verb: Verb) -> Verb:
    """Make the verb refuse a trainer that another has replaced. Its parked requests are answered when that resumes."""

    def handle(queue: Serving, incoming: Incoming[Any], last: bool) -> Response | None:
        refused = queue.store.book.fence(incoming.request.lineage)
        return verb.handle(queue, incoming, last) if refused is None else Response(refused)

    return verb._replace(handle=handle, wakes=verb.wakes | {t.RolledBack})


def _verb(kind: type[Q], roles: frozenset[Role], handle: Callable[[Store, Q, float], m.Reply]) -> Verb:
    """A verb that needs only the store, its request and the time."""
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
    arrive: Callable[[Store, Any, float], float] = lambda *_: MAX_WAIT_S,
    idle: Callable[[Store, Q], bool] = lambda *_: False,
) -> Verb:
    """A long poll that is parked if its reply ``waits``, or without making a reply if it is ``idle``."""

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
    """Renew the worker's leases: only the arrival of its request is a sign of life, not that it is still parked."""
    store.delivery.renew(request.worker, now)
    store.attendance.hear(request.worker, now, request.idle_s)
    return MAX_WAIT_S


def _renew(store: Store, request: m.Renew, now: float) -> m.Reply:
    store.attendance.hear(request.worker, now)
    return store.delivery.renew(request.worker, now, request.held)


def _attended(store: Store, reply: m.Reply, now: float) -> m.Reply:
    """If NotReady is due to idle agent programs, add how long none has asked."""
    unattended_s = store.attendance.unattended_s(now)
    if not isinstance(reply, m.NotReady) or not unattended_s:
        return reply
    why = f"{reply.why}; no agent program has asked a gateway for an episode for {unattended_s:.0f} s"
    return msgspec.structs.replace(reply, why=why, unattended_s=unattended_s)


def _equal_shares(queue: Serving, parked: Sequence[Incoming[m.Lease]]) -> Iterable[Incoming[m.Lease]]:
    """Give each parked worker an equal share of the groups that may be leased, the longest unserved first.

    Once none are left, the others stay parked, unless the run is over.
    """
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
    """Yield all readers of the registry, if it is time for an announcement."""
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

EVERYBODY: frozenset[Role] = frozenset(ROLES)
# An operator imports groups that another queue exported.
GENERATES: frozenset[Role] = frozenset({"worker", "operator"})
TRAINS: frozenset[Role] = frozenset({"trainer"})
FETCHES: frozenset[Role] = frozenset({"trainer", "reader", "operator"})
READS: frozenset[Role] = frozenset({"reader", "operator"})
OPERATES: frozenset[Role] = frozenset({"operator"})
KEEPS: frozenset[Role] = frozenset({"shard"})

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
        # Every group that becomes ready calls it.
        idle=lambda s, r: s.batches.is_short(r.step),
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
    # readers of trained groups beside the trainer
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
    _verb(m.ListGroups, READS, lambda s, r, now: group_list(s.book, r.after, r.limit, r.state, now)),
    _verb(m.Peek, READS, lambda s, r, now: peek(s.book, r.group_id, now)),
)

# Resume names the lineage that it begins.
VERBS = tuple(
    _fenced(verb) if "lineage" in verb.request.__struct_fields__ and verb.request is not m.Resume else verb
    for verb in _VERBS
)

# The requests that payload shards answer, and the roles that may send them.
SHARD_VERBS = {m.StoreRows: GENERATES, m.LoadRows: FETCHES}
