"""Requests to the queue and to its payload shards, in the order in which data flows."""

import msgspec

from rl_async.messages.data import MediaKey, RowKey, SampleKey, StoredKey, Task, TrajectoryHeader, Version


class Request(msgspec.Struct, kw_only=True, tag=True):
    """Base of all requests. The envelope around them carries the request id."""


class LongPoll(Request, kw_only=True):
    """Base of those that the queue may answer late, on purpose: within ``wait_s``."""

    wait_s: float


class Hello(Request):
    """First message of every connection. Any role -> queue."""

    schema: int
    role: str
    name: str


class Lease(LongPoll):
    """Ask for work; answered when there is some or after ``wait_s``. Agent worker -> queue.

    With ``task`` a producer brings its own: it gets one group, of this task, as soon as one may be admitted.
    """

    worker: str
    max_groups: int
    task: Task | None = None


class Renew(Request):
    """Keep this worker's leases alive. Agent worker -> queue."""

    worker: str


class Put(Request):
    """Finished samples, each with all rows of its episode from segment 0. Agent worker -> queue.

    The payload frames behind this one are the rows, in the same order, and then the bytes of ``media``, of which those
    may be left out that the group has already. The answer is Taken.
    """

    worker: str
    samples: list[list[TrajectoryHeader]]
    media: list[MediaKey] = []


class Fail(Request):
    """One sample could not be produced. Agent worker -> queue."""

    worker: str
    group_id: int
    sample: int
    attempt: int
    error: str


class Reserve(LongPoll):
    """Fix the batch of a step; answers the same however often it is asked. Trainer -> queue."""

    step: int


class Fetch(Request):
    """The payloads of some rows, or of their media (``media_sample``). Trainer ranks, consumers -> queue."""

    rows: list[RowKey]


class Store(Request):
    """Keep the rows of finished samples. Agent worker -> payload shard, before the Put that names the shard.

    ``lengths`` has the bytes of each row, by sample; the payload is the rows one after another (``wire.join``).
    """

    samples: list[SampleKey]
    lengths: list[list[int]]


class Load(Request):
    """The payloads of some rows, or of their media. Trainer ranks, consumers -> payload shard."""

    rows: list[StoredKey]


class RegisterShard(Request):
    """A payload shard is ready. One that was started again has a new id, under the same name. Shard -> queue."""

    shard_id: str
    name: str
    url: str


class Sweep(LongPoll):
    """Which of these groups are of no use any more, now or within ``wait_s``; a sign of life. Shard -> queue."""

    shard_id: str
    groups: list[int]


class Shards(LongPoll):
    """Where the payload shards are, at once or when the revision passes ``after``. Workers, people -> queue."""

    after: int


class Commit(Request):
    """The batch of ``step`` was trained. Trainer rank 0, after a barrier -> queue."""

    step: int


class Publish(Request):
    """These engines confirmed ``version``; the groups that trained it give back their slots. Trainer -> queue."""

    version: Version
    engines: list[str]


class Confirm(Request):
    """A late or restarted engine has caught up with ``version``. Trainer -> queue."""

    engine_id: str
    version: Version


class Snapshot(Request):
    """What a checkpoint must hold so that this queue's unfinished work can be admitted again. Trainer -> queue."""


class Resume(Request):
    """Go back to the checkpoint after ``step`` completed steps. Trainer -> queue.

    A queue that outlived the trainer rolls back by itself; a fresh one starts from ``snapshot``.
    """

    step: int
    lineage: int
    snapshot: bytes = b""


class Retire(Request):
    """The checkpoint after ``step`` completed steps is durable: forget what came before. Trainer -> queue."""

    step: int


class Tighten(Request):
    """Admit only what keeps staleness within ``max_staleness``, or within the configured bound if that is smaller.

    Holds until the next one, or a resume. Trainer -> queue.
    """

    max_staleness: int


class Evaluate(Request):
    """Admit the held-out tasks once, outside the slots, in partition ``eval``. Trainer, ``rl-async eval`` -> queue."""

    eval_id: int


class EvalResult(LongPoll):
    """The finished trajectories of an evaluation, when all are there, else NotReady after ``wait_s``."""

    eval_id: int


class RegisterEngine(Request):
    """An engine process answers its health probe. Launcher -> queue."""

    engine_id: str
    url: str
    kind: str


class RemoveEngine(Request):
    """An engine process is gone. Launcher or weight-sync coordinator -> queue."""

    engine_id: str
    reason: str


class Engines(LongPoll, kw_only=True):
    """The registry, at once or when its revision passes ``after``, at the latest after ``wait_s``. Any -> queue."""

    after: int = -1
    wait_s: float = 0.0


class Status(Request):
    """Counts for the live view and for diagnosis. Launcher, trainer -> queue."""


class Submit(Request):
    """Tasks to admit before those of the queue's own source, in order. A producer of tasks -> queue."""

    tasks: list[Task]


class Requeue(Request):
    """Admit the task of a dead letter once more, as a new group and before all others. A person -> queue."""

    group_id: int


class Drain(Request):
    """Admit no more training groups, or (``on`` false) admit again; those that are here go on. A person -> queue."""

    on: bool = True


class Inspect(Request):
    """All that ``rl-async queue status`` and the metrics show. Anybody -> queue."""


class ListGroups(Request):
    """Groups with an id above ``after``, in order, at most ``limit``. Anybody -> queue."""

    after: int = -1
    limit: int = 1000
    state: str = ""  # waiting | leased | ready | reserved | committed; empty: any


class Peek(Request):
    """One group with the headers of what is here of it; Fetch has the rows. Changes nothing. Anybody -> queue."""

    group_id: int


class Subscribe(Request):
    """Make a reader of what is trained, unless there is one of this name. A logger or evaluator -> queue."""

    consumer: str
    oldest: bool = False  # it also reads what was trained before, as far as that is here


class Read(LongPoll, kw_only=True):
    """Groups that were trained, in order of commit, behind ``after`` or what the consumer acknowledged.

    Answered when there are some or after ``wait_s``; Fetch has the rows. Consumer -> queue.
    """

    consumer: str
    after: int = -1
    max_groups: int = 16
    wait_s: float = 0.0


class Acknowledge(Request):
    """The consumer needs nothing up to ``position`` any more. Consumer -> queue."""

    consumer: str
    position: int


class Unsubscribe(Request):
    """Forget a consumer. Anybody -> queue."""

    consumer: str


class Finish(Request):
    """The run is over: workers asking for work are told so, and nothing more is admitted. Trainer -> queue."""


RequestType = (
    Hello
    | Lease
    | Renew
    | Put
    | Fail
    | Reserve
    | Fetch
    | Store
    | Load
    | RegisterShard
    | Sweep
    | Shards
    | Commit
    | Publish
    | Confirm
    | Snapshot
    | Resume
    | Retire
    | Tighten
    | Evaluate
    | EvalResult
    | RegisterEngine
    | RemoveEngine
    | Engines
    | Status
    | Submit
    | Requeue
    | Drain
    | Inspect
    | ListGroups
    | Peek
    | Subscribe
    | Read
    | Acknowledge
    | Unsubscribe
    | Finish
)
