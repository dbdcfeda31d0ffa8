"""Requests to the queue and to its payload shards, in the order in which data flows.

``lineage`` says for which trainer a request is made. The queue refuses that of an older one than the newest that has
resumed: such a trainer has been replaced. None, where it is allowed, means that no trainer asks.

A request names its replies in its base class: ``Request[Done]`` is answered Done, and Refused is then an error at the
client, whereas ``Request[Done | Refused]`` gives the refusal to the caller. The queue's handlers are the table in
``transfer_queue/server/verbs.py``, the clients' methods the one in ``transfer_queue/client/verbs.py``.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, Generic, TypeVar, get_args

import msgspec

from rl_async.messages.data import MediaKey, RowKey, SampleKey, StoredKey, Task, TrajectoryHeader, Version
from rl_async.messages.replies import (
    Delivered,
    Done,
    Elsewhere,
    EngineList,
    FetchedRows,
    GroupList,
    Inspection,
    Leased,
    NotReady,
    Peeked,
    Refused,
    Renewed,
    Reserved,
    Resumed,
    ShardList,
    SnapshotTaken,
    StatusReport,
    Subscription,
    Swept,
    Taken,
    Welcome,
)

R = TypeVar("R")


class Request(msgspec.Struct, Generic[R], tag=True, gc=False):
    """Base of all requests; ``R`` is what the client returns. The envelope around a request carries its id."""


class LongPoll(Request[R], Generic[R]):
    """Base of requests that the queue may hold back for up to ``wait_s`` seconds until it has something to say."""

    @property
    def wait_s(self) -> float:
        """Each subclass declares it as a field, at the position where callers pass it."""
        raise NotImplementedError


class Hello(Request[Welcome], kw_only=True):
    """First message of every connection. Any role -> queue.

    ``key`` is the client's secret key where the socket is a file that only this user can open; empty on other sockets.
    """

    schema: int
    role: str
    name: str
    key: str = ""

    def __repr__(self) -> str:
        return f"Hello(schema={self.schema}, role={self.role!r}, name={self.name!r})"  # a secret belongs in no log

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("schema", self.schema), ("role", self.role), ("name", self.name)]


class Lease(LongPoll[Leased]):
    """Ask for up to ``max_groups`` groups to generate. Agent worker -> queue.

    With a ``task``, a producer brings its own: it gets one group of it, as soon as one may be admitted. A gateway says
    in ``idle_s`` for how many seconds no agent program has played or asked for an episode.
    """

    worker: str
    max_groups: int
    wait_s: float
    task: Task | None = None
    idle_s: float | None = None


class Renew(Request[Renewed]):
    """Keep this worker's leases alive. Agent worker -> queue.

    Leases that ``held`` has not listed for a lease time end: the worker has forgotten them. None: all are held.
    """

    worker: str
    held: list[SampleKey] | None = None


class Put(Request[Taken]):
    """Hand over finished samples, each with all rows of its episode from segment 0. Agent worker -> queue.

    ``lengths`` has the bytes of each row. The payload frames that follow hold the rows one after another, in the same
    order (``wire.join``), and then the bytes of ``media``, a frame each. Media that the group already has may be left
    out. If rows go to payload shards, neither lengths nor payload follow.
    """

    worker: str
    samples: list[list[TrajectoryHeader]]
    lengths: list[int] = []
    media: list[MediaKey] = []


class Fail(Request[Done | Refused]):
    """Report that one attempt at a sample failed. Agent worker -> queue."""

    worker: str
    group_id: int
    sample: int
    attempt: int
    error: str


class Reserve(LongPoll[Reserved | NotReady]):
    """Fix the batch of ``step``; the answer is the same however often it is asked. Trainer -> queue."""

    step: int
    wait_s: float
    lineage: int = 0


class Fetch(Request[FetchedRows | Elsewhere | Refused]):
    """Read the payloads of rows, or of their media (``media_sample``). Trainer ranks, consumers -> queue."""

    rows: list[RowKey]
    lineage: int | None = None


class StoreRows(Request[Done], tag="Store"):
    """Keep the rows of finished samples. Agent worker -> payload shard, before the Put that names the shard.

    ``lengths`` has the bytes of each row, by sample; the payload is the rows one after another (``wire.join``).
    """

    samples: list[SampleKey]
    lengths: list[list[int]]


class LoadRows(Request[FetchedRows | Refused], tag="Load"):
    """Read the payloads of rows, or of their media. Trainer ranks, consumers -> payload shard."""

    rows: list[StoredKey]


class RegisterShard(Request[Done]):
    """Announce a payload shard. One that restarted has a new id under the same name. Shard -> queue."""

    shard_id: str
    name: str
    url: str


class Sweep(LongPoll[Swept | Refused]):
    """Ask which of these groups can be deleted; also the shard's heartbeat. Shard -> queue."""

    shard_id: str
    groups: list[int]
    wait_s: float


class ListShards(LongPoll[ShardList], tag="Shards"):
    """Read the registry of payload shards, at once or when its revision passes ``after``. Workers, people -> queue."""

    after: int
    wait_s: float


class Commit(Request[Done]):
    """Report that the batch of ``step`` was trained. Trainer rank 0, after a barrier -> queue."""

    step: int
    lineage: int = 0


class Publish(Request[Done]):
    """Report that ``engines`` confirmed ``version``; the groups that trained it free their slots. Trainer -> queue."""

    version: Version
    engines: Sequence[str]


class Confirm(Request[Done | Refused]):
    """Report that a late or restarted engine has caught up; Refused if it was removed meanwhile. Trainer -> queue."""

    engine_id: str
    version: Version


class Withdraw(Request[Done]):
    """Take engines out of traffic: they have confirmed nothing, until they do again. Trainer -> queue."""

    engine_ids: Sequence[str]
    lineage: int = 0


class Snapshot(Request[SnapshotTaken]):
    """Read what a checkpoint must hold so that unfinished groups can be admitted again. Trainer -> queue."""

    lineage: int | None = None


class Resume(Request[Resumed]):
    """Go back to the checkpoint after ``step`` completed steps. Trainer -> queue.

    A queue that outlived the trainer rolls back by itself; a fresh one starts from ``snapshot``.
    """

    step: int
    lineage: int
    snapshot: bytes = b""


class Retire(Request[Done]):
    """Forget the steps before ``step``, whose checkpoint is durable. Trainer -> queue."""

    step: int
    lineage: int = 0


class Tighten(Request[Done]):
    """Admit only what keeps staleness within ``max_staleness`` or the configured bound, whichever is smaller.

    Holds until the next Tighten or Resume. Trainer -> queue.
    """

    max_staleness: int
    lineage: int = 0


class Evaluate(Request[Done]):
    """Admit the held-out tasks once, outside the slots, in partition ``eval``. Trainer, ``rl-async eval`` -> queue."""

    eval_id: int
    lineage: int | None = None


class AwaitEvaluation(LongPoll[Reserved | NotReady], tag="EvalResult"):
    """Read the trajectories of an evaluation once all are finished, or at once those that are ``so_far``.

    Trainer, ``rl-async eval`` -> queue.
    """

    eval_id: int
    wait_s: float
    lineage: int | None = None
    so_far: bool = False


class RegisterEngine(Request[Done]):
    """Announce an engine process that answers its health probe. Launcher -> queue."""

    engine_id: str
    url: str
    kind: str


class RemoveEngine(Request[Done]):
    """Announce that an engine process is gone. Launcher or weight-sync coordinator -> queue."""

    engine_id: str
    reason: str
    lineage: int | None = None


class ListEngines(LongPoll[EngineList], tag="Engines"):
    """Read the registry of engines, at once or when its revision passes ``after``. Any role -> queue."""

    after: int = -1
    wait_s: float = 0.0
    lineage: int | None = None


class Status(Request[StatusReport]):
    """Read the counts for the live view and for diagnosis. Launcher, trainer -> queue."""


class Submit(Request[Done | Refused]):
    """Admit these tasks, in order, before those of the queue's own source; Refused (``full``) if too many wait.

    A producer of tasks -> queue.
    """

    tasks: Sequence[Task]


class Requeue(Request[Done | Refused]):
    """Admit the task of a dead letter once more, as a new group and before all others. A person -> queue."""

    group_id: int


class Drain(Request[Done]):
    """Stop admitting training groups, or resume with ``on=False``; admitted groups continue. A person -> queue."""

    on: bool = True


class Inspect(Request[Inspection]):
    """Read everything that ``rl-async queue status`` and the metrics show. Any role -> queue."""


class ListGroups(Request[GroupList]):
    """Read groups with an id above ``after``, in order, at most ``limit``. Any role -> queue."""

    after: int = -1
    limit: int = 1000
    state: str = ""  # waiting | leased | ready | reserved | committed; empty: any


class Peek(Request[Peeked | Refused]):
    """Read one group with the headers of its finished rows; Fetch has the rows. Any role -> queue."""

    group_id: int


class Subscribe(Request[Subscription]):
    """Create a reader of trained groups, unless one of this name exists. A logger or evaluator -> queue."""

    consumer: str
    oldest: bool = False  # start at the oldest group still here instead of at the next one to be trained


class Read(LongPoll[Delivered]):
    """Read trained groups, in order of commit, after position ``after`` or the last acknowledged. Consumer -> queue.

    Fetch has the rows.
    """

    consumer: str
    wait_s: float = 0.0
    after: int = -1
    max_groups: int = 16


class Acknowledge(Request[Done]):
    """Release everything up to ``position`` for this consumer. Consumer -> queue."""

    consumer: str
    position: int


class Unsubscribe(Request[Done]):
    """Forget a consumer and what was kept for it. Any role -> queue."""

    consumer: str


class Finish(Request[Done]):
    """End the run: workers that ask for groups are told so, and nothing more is admitted. Trainer -> queue."""

    lineage: int = 0


REQUESTS: tuple[type[Request[Any]], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Request) and kind not in (Request, LongPoll)
)
RequestType: Any = reduce(or_, REQUESTS)


def replies_of(kind: type[Request[Any]]) -> tuple[type, ...]:
    """The reply classes of a request, from its base class."""
    (wanted,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    return get_args(wanted) or (wanted,)
