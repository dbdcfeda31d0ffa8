"""Replies of the queue and of its payload shards."""

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from rl_async.messages.data import SampleKey, Task, TrajectoryHeader, Version


class Reply(msgspec.Struct, kw_only=True, tag=True, gc=False):
    """Base of all replies, tagged by class name."""


class Welcome(Reply):
    """The queue accepted the hello of a connection."""

    schema: int
    run_id: str


class Done(Reply):
    """The request took effect (or had taken effect before)."""


class Refused(Reply):
    """The request was understood and does not apply; nothing changed."""

    code: str  # e.g. fenced, unknown_group, wrong_step, schema
    reason: str


class Malformed(Reply):
    """The request was not understood; it was counted and dropped."""

    reason: str


class LeasedGroup(msgspec.Struct, kw_only=True, gc=False):
    """Samples of one group to generate. The attempt number fences: an older one is refused."""

    group_id: int
    partition: str
    attempt: int
    samples: list[int]
    task: Task
    min_version: Version  # engines older than this must not serve it
    traced: list[int] = []  # the samples whose episodes have a trace

    def trace(self, sample: int) -> str:
        """Return the name under which spans of a sample's episode are added; empty if it has no trace."""
        return f"{self.group_id}.{sample}.{self.attempt}" if sample in self.traced else ""


class Leased(Reply):
    """Work; empty when none came within the wait. ``finished`` ends the worker."""

    groups: list[LeasedGroup]
    finished: bool = False


class NotReady(Reply):
    """Nothing yet; ask again. ``why`` names what is being waited for and for how long.

    ``unattended_s``: as in StatusReport. Of an evaluation, ``finished`` of ``groups`` are.
    """

    why: str
    unattended_s: float = 0.0
    finished: int = 0
    groups: int = 0


class Reserved(Reply):
    """The batch of a step or an evaluation: headers ordered by (group, sample, segment)."""

    step: int
    headers: list[TrajectoryHeader]
    tasks: dict[int, Task] = {}  # by group, for records and replays
    failed: list[tuple[int, int]] = []  # (group, sample) of an evaluation that were given up


class Renewed(Reply):
    """The leases are kept, except ``gone``: samples that others play by now, so that their rows would be refused."""

    gone: list[SampleKey] = []


class Taken(Reply):
    """Of each sample of a Put, in order: None if it was taken, now or before, else why it is not wanted."""

    refused: list[Refused | None]


class FetchedRows(Reply, tag="Rows"):
    """The rows that were asked for, in the same order; a payload frame behind this one holds one or several."""

    lengths: list[int]  # bytes of each row


class Elsewhere(Reply):
    """The rows that were asked for are with payload shards: attempt and shards of each, in the same order."""

    attempts: list[int]
    shards: list[list[str]]  # ids of those that live
    urls: dict[str, str]  # by id


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One payload shard. Its id is new each time it starts with nothing."""

    shard_id: str
    name: str
    url: str


class ShardList(Reply):
    """The payload shards, each payload being kept by ``replicas`` of them; 0: the queue keeps them itself."""

    revision: int
    replicas: int
    shards: list[ShardRecord]


class Swept(Reply):
    """The shard may delete these groups."""

    gone: list[int]


class SnapshotTaken(Reply):
    """Opaque to the trainer; stored with the checkpoint."""

    snapshot: bytes


class Resumed(Reply):
    """``kept`` groups are still here with their trajectories; ``readmitted`` groups are generated again."""

    kept: int
    readmitted: int


LENT = "lent-"  # what the names of engines begin with that run on the trainer's devices while it waits


class EngineRecord(msgspec.Struct, kw_only=True):
    """One engine of the registry. ``version`` is the last one it confirmed; without one it gets no traffic."""

    engine_id: str
    url: str
    kind: str
    version: Version | None = None

    @property
    def is_lent(self) -> bool:
        """Whether it runs on devices that the trainer lends."""
        return self.engine_id.startswith(LENT)


class EngineList(Reply):
    """The registry; ``published`` is the newest version that every routable engine has confirmed."""

    revision: int
    engines: list[EngineRecord]
    published: Version


# Before a cause, the name of the counter of attempts at training samples that failed by it.
FAILED = "failed/"


class StatusReport(Reply):
    """Groups by state, slots, leases, counters, and the age of what is waited for longest."""

    published: Version
    waiting: int
    leased: int
    ready: int
    reserved: int
    committed: int
    slots_used: int
    slots: int
    max_staleness: int  # for which groups are admitted now; the configured one unless the trainer tightened it
    admitted: int
    payload_bytes: int
    counters: dict[str, int]  # dropped, dead_letters, redelivered, fenced, malformed, ...; FAILED and a cause
    oldest_lease_s: float
    workers: int
    finished: bool
    unattended_s: float = 0.0  # for which no agent program has played or asked, where only gateways lease
    last_failure: str = ""  # the beginning of the newest dead letter's error
    scored: int = 0  # samples with and without a reward, since the queue was started
    unscored: int = 0
    # Of the journal and the ledger, the slowest of about a minute.
    flush_s: float = 0.0


class LeaseRecord(msgspec.Struct, kw_only=True):
    """Who has been generating a group, and for how many seconds."""

    group_id: int
    worker: str
    age_s: float


class WorkerRecord(msgspec.Struct, kw_only=True):
    """A worker that was heard of within the lease time, with the samples that it generates."""

    worker: str
    samples: int
    groups: int  # of which they are
    oldest_s: float  # since it took the first of these groups; 0 without one


class DeadLetter(msgspec.Struct, kw_only=True):
    """A training group that was given up because one of its samples failed too often."""

    group_id: int
    task: Task
    error: str


class ConsumerRecord(msgspec.Struct, kw_only=True):
    """A reader of what is trained: it acknowledged ``position``, ``behind`` groups are to be read."""

    name: str
    position: int
    behind: int
    skipped: int  # groups that were given up before it acknowledged them


class Inspection(Reply):
    """The status with what is not counted but listed. Ages count from the change of state, or the queue's start."""

    status: StatusReport
    group_size: int  # samples of a training group
    draining: bool
    submitted: int  # tasks handed over that are not admitted yet
    oldest_lease: LeaseRecord | None
    ages_s: dict[str, float]  # of the group that has been longest in its state, by state
    rates: dict[str, float]  # per second over the last minute: groups_ready, groups_reserved, rows, bytes
    dead_letters: list[DeadLetter]  # the newest, oldest first
    shards: list[ShardRecord] = []  # payload shards that live
    consumers: list[ConsumerRecord] = []
    kept_bytes: int = 0  # for consumers only
    workers: list[WorkerRecord] = []  # by name, at most 1000


class GroupRecord(msgspec.Struct, kw_only=True):
    """One group of a GroupList, or the one peeked at."""

    group_id: int
    partition: str
    state: str
    task_id: str
    samples: int
    here: int  # of these
    workers: list[str]  # that generate the others
    age_s: float  # in this state
    nbytes: int


class GroupList(Reply):
    """Groups by id; ``more`` follow the last one."""

    groups: list[GroupRecord]
    more: bool


class Peeked(Reply):
    """One group with its finished rows; headers ordered by (sample, segment)."""

    group: GroupRecord
    task: Task
    headers: list[TrajectoryHeader]


class Subscription(Reply):
    """The consumer's place: it reads what comes after ``position``; ``skipped`` groups were given up before."""

    position: int
    skipped: int


class DeliveredGroup(msgspec.Struct, kw_only=True):
    """One group that was trained; headers ordered by (sample, segment)."""

    position: int  # counts the groups that were committed, from 1
    step: int
    group_id: int
    task: Task
    headers: list[TrajectoryHeader]


class Delivered(Reply):
    """Groups for a consumer, none if none came within the wait. ``finished``: nor will any."""

    groups: list[DeliveredGroup]
    skipped: int  # groups given up before the consumer acknowledged them, since it subscribed
    finished: bool = False


ReplyType: Any = reduce(or_, Reply.__subclasses__())
