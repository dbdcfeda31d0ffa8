"""The methods of both clients: one table of verbs, driven by an event loop or by a blocking thread.

A verb starts a conversation (``conversations.py``); the client that it is called on carries the conversation out. So
``lease`` is ``async`` on a ``QueueClient`` and blocks on a ``SyncQueueClient``, and both have its arguments and its
result from the request. A new verb is one line here.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    NotRequired,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    overload,
)

from rl_async import messages as m
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client import conversations
from rl_async.transfer_queue.client.announced import announced_rows, decode_rows
from rl_async.transfer_queue.client.conversations import SHARD_S, Conversation
from rl_async.transfer_queue.client.session import PATIENCE_S, Session

P = ParamSpec("P")
T = TypeVar("T")


class _Awaiting(Protocol):
    def run(self, conversation: Conversation[T]) -> Coroutine[Any, Any, T]: ...


class _Blocking(Protocol):
    def run(self, conversation: Conversation[T]) -> T: ...


class ClientVerb(Generic[P, T]):
    """A method that runs a conversation: it returns a coroutine on a client whose ``run`` does, else the result."""

    def __init__(self, start: Callable[Concatenate[Any, P], Conversation[T]], doc: str | None) -> None:
        self._start, self.__doc__ = start, doc

    @overload
    def __get__(self, client: _Awaiting, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: _Blocking, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: None, owner: Any) -> "ClientVerb[P, T]": ...
    def __get__(self, client: Any, owner: Any) -> Any:
        if client is None:
            return self
        start, run = self._start, client.run

        def call(*arguments: Any, **named: Any) -> Any:
            return run(start(client, *arguments, **named))

        return call


def _verb(request: Callable[P, m.Request[T]]) -> ClientVerb[P, T]:
    """A method with the fields of a request as its arguments, which returns the request's reply."""
    kind: Any = request
    replies = m.replies_of(kind)
    return ClientVerb(lambda _, *fields, **named: conversations.ask(kind(*fields, **named), replies), kind.__doc__)


def _worker_verb(request: Callable[Concatenate[str, P], m.Request[T]]) -> ClientVerb[P, T]:
    """The same for a request whose first field is the name of the client's worker."""
    kind: Any = request
    replies = m.replies_of(kind)
    return ClientVerb(
        lambda client, *fields, **named: conversations.ask(kind(client.worker, *fields, **named), replies), kind.__doc__
    )


def _trainer_verb(request: Callable[P, m.Request[T]]) -> ClientVerb[P, T]:
    """The same for a request with a lineage, which is the client's unless it is given."""
    kind: Any = request
    replies = m.replies_of(kind)
    return ClientVerb(
        lambda client, *fields, **named: conversations.ask(kind(*fields, **(client.for_trainer() | named)), replies),
        kind.__doc__,
    )


def _conversation(start: Callable[Concatenate[Any, P], Conversation[T]]) -> ClientVerb[P, T]:
    """A method that takes several requests; its function gets the client first."""
    return ClientVerb(start, start.__doc__)


def _snapshot(client: "ClientVerbs") -> Conversation[bytes]:
    """What a checkpoint must keep of the queue."""
    taken = yield from conversations.ask(m.Snapshot(lineage=client.lineage), m.replies_of(m.Snapshot))
    return taken.snapshot


def _put(client: "ClientVerbs", parcels: Sequence[conversations.Parcel]) -> Conversation[list[m.Refused | None]]:
    """Hand over samples; for each, None if it was taken, else why not."""
    return conversations.put(client.worker, parcels, client.sending, client.timeout_s)


def _fetch(client: "ClientVerbs", rows: Sequence[m.RowKey]) -> Conversation[list[m.Trajectory]]:
    """The trajectories of these rows. Raises RowsLost if some were lost with a payload shard."""
    found = yield from conversations.fetch(rows, client.timeout_s, client.lineage)
    return decode_rows(found)


def _fetch_announced(client: "ClientVerbs", headers: Sequence[m.TrajectoryHeader]) -> Conversation[list[m.Trajectory]]:
    """The trajectories of these headers, just as they were put.

    Raises RowsLost if some were lost with a payload shard, RowsChanged if some came with other bytes.
    """
    keys = [header.key for header in headers]
    found = yield from conversations.fetch(keys, client.timeout_s, client.lineage)
    return announced_rows(headers, found)


def _fetch_media(client: "ClientVerbs", rows: Sequence[m.Trajectory]) -> Conversation[dict[str, bytes]]:
    """The bytes, by SHA-256, of all media that these rows refer to."""
    return conversations.fetch_media(rows, client.timeout_s, client.lineage)


class ClientSettings(TypedDict):
    """Keyword arguments of the constructors of both clients."""

    role: str
    name: str
    timeout_s: NotRequired[float]  # for an answer, beyond the wait that is asked for
    patience_s: NotRequired[float]  # without an answer, beyond that wait, until it reconnects; doubled each time
    shard_s: NotRequired[float]  # for a payload shard's answer, before another is tried
    keys: NotRequired[ClientKeys | None]
    lineage: NotRequired[int | None]  # of the trainer that this client belongs to


class ClientVerbs:
    """What a client can do, and the settings that both clients have.

    All verbs raise QueueLost when no answer came within ``timeout_s`` beyond the wait asked for, and ProtocolError when
    the queue refuses or the answer makes no sense. A client with a ``lineage`` raises TrainerReplaced once a trainer of
    a newer one has resumed.
    """

    def __init__(
        self,
        address: str,
        *,
        role: str,
        name: str,
        timeout_s: float = 60.0,
        patience_s: float = PATIENCE_S,
        shard_s: float = SHARD_S,
        keys: ClientKeys | None = None,
        lineage: int | None = None,
    ) -> None:
        self._session = Session(address, role, name, keys)
        self._patience_s, self.timeout_s, self.lineage = patience_s, timeout_s, lineage
        self._shard_settings: ClientSettings = {
            "role": role,
            "name": name,
            "timeout_s": shard_s,
            "patience_s": patience_s,
            "keys": keys,
        }
        self.sending = conversations.Sending()

    @property
    def worker(self) -> str:
        """The name under which this client leases, unique to it."""
        return self._session.worker

    def for_trainer(self) -> dict[str, int]:
        """The field ``lineage`` of a request that may have one."""
        return {} if self.lineage is None else {"lineage": self.lineage}

    # Agent workers.
    lease = _worker_verb(m.Lease)
    renew = _worker_verb(m.Renew)
    fail = _worker_verb(m.Fail)
    put_parcels = _conversation(_put)

    # The trainer.
    reserve = _trainer_verb(m.Reserve)
    commit = _trainer_verb(m.Commit)
    publish = _verb(m.Publish)
    retire = _trainer_verb(m.Retire)
    tighten = _trainer_verb(m.Tighten)
    snapshot = _conversation(_snapshot)
    resume = _verb(m.Resume)
    evaluate = _trainer_verb(m.Evaluate)
    eval_result = _trainer_verb(m.AwaitEvaluation)
    finish = _trainer_verb(m.Finish)

    # Rows, for the trainer and for other readers.
    fetch = _conversation(_fetch)
    fetch_announced = _conversation(_fetch_announced)
    fetch_media = _conversation(_fetch_media)
    subscribe = _verb(m.Subscribe)
    read = _verb(m.Read)
    acknowledge = _verb(m.Acknowledge)
    unsubscribe = _verb(m.Unsubscribe)

    # Engines and payload shards.
    engines = _trainer_verb(m.ListEngines)
    register_engine = _verb(m.RegisterEngine)
    remove_engine = _trainer_verb(m.RemoveEngine)
    confirm = _verb(m.Confirm)
    withdraw = _trainer_verb(m.Withdraw)
    shards = _verb(m.ListShards)
    register_shard = _verb(m.RegisterShard)
    sweep = _verb(m.Sweep)

    # Producers of tasks, people and monitoring.
    submit = _verb(m.Submit)
    requeue = _verb(m.Requeue)
    drain = _verb(m.Drain)
    status = _verb(m.Status)
    inspect = _verb(m.Inspect)
    group_list = _verb(m.ListGroups)
    peek = _verb(m.Peek)
