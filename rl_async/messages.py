"""Every message that crosses a process boundary, in the order in which data flows.

Each struct names its producer and its consumer. Nothing else is sent on the queue's sockets. Change a field that an
older process would misread, and raise SCHEMA.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rl_async.errors import ProtocolError

SCHEMA = 7

RowKey = tuple[int, int, int]  # (group, sample, segment)
SampleKey = tuple[int, int, int]  # (group, sample, attempt)
MediaKey = tuple[int, str]  # (group, sha256 of the bytes)
StoredKey = tuple[int, int, int, int]  # (group, sample, attempt, segment)


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names a set of weights: ``step`` counts completed trainer steps, ``lineage`` counts resumes from a checkpoint.

    Written ``lineage.step`` wherever an engine wants a string.
    """

    lineage: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """The inverse of ``str``. Raises ValueError on anything else."""
        lineage, _, step = text.partition(".")
        return cls(int(lineage), int(step))


class VersionRun(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens number ``start`` to ``end`` (exclusive, counting sampled tokens only) came from ``version``."""

    version: Version
    start: int
    end: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with what is needed to act on it and to score it. Task source -> queue -> agent worker."""

    task_id: str
    data_source: str
    prompt: list[dict[str, Any]]  # chat messages: role, content
    ground_truth: str
    ability: str = ""
    agent: str = ""  # the loop's name; empty: the config's
    tools: list[str] | None = None  # None: the config's
    extra: dict[str, Any] = {}
    priority: float = 0.0  # queue.sampling=priority trains higher ones first
    source: str = ""  # the data set of data.path that it is from; empty: a producer made it


class Sampling(msgspec.Struct, frozen=True):
    """The distribution from which tokens were drawn. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0

    @property
    def truncating(self) -> bool:
        """Whether some tokens had no chance at all, so that their true log-probability is minus infinity."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class ToolCall(msgspec.Struct, kw_only=True):
    """One call that the model asked for, and what came of it. Agent loop -> viewer, reward."""

    name: str
    arguments: str  # JSON as the model wrote it
    result: str = ""
    error: str = ""  # empty: the call succeeded
    seconds: float = 0.0


class Turn(msgspec.Struct, kw_only=True):
    """One message of the conversation as text, with its place among the tokens. Agent loop -> viewer."""

    role: str  # system | user | assistant | tool
    text: str
    start: int = 0
    end: int = 0  # token_ids[start:end]
    tool_calls: list[ToolCall] = []
    reward: float | None = None
    seconds: float = 0.0


class TrajectoryHeader(msgspec.Struct, kw_only=True):
    """What admission, batching and status need of a trajectory; the queue never reads more. Agent worker -> queue."""

    group_id: int
    sample: int
    attempt: int
    partition: str  # train | eval
    episode_id: str
    segment: int
    tokens: int
    sampled: int
    reward: float
    finish_reason: str
    versions: list[VersionRun]
    reward_parts: dict[str, float] = {}
    scored: bool = True  # false: a scorer failed, so that there is no reward to learn from
    baseline: bool = False  # a greedy episode that the others are compared with; never trained
    tokens_sha256: str  # of the payload's token ids, for the audit
    nbytes: int = 0  # of the payload; filled by whoever keeps it
    shards: list[str] = []  # that keep the payload, by id; empty: the queue itself does
    media: list[str] = []  # sha256 of each that the row refers to

    @property
    def key(self) -> RowKey:
        """Names the row within its run."""
        return self.group_id, self.sample, self.segment


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """An image or the like that a row refers to. Its bytes are kept once for all rows of a group."""

    sha256: str  # of the bytes, as 64 hexadecimal digits
    mime: str
    position: int  # of the token that stands for it, or of the first

    @classmethod
    def of(cls, data: bytes, mime: str, position: int) -> "Media":
        """What refers to these bytes."""
        return cls(sha256=hashlib.sha256(data).hexdigest(), mime=mime, position=position)


def media_sample(sha256: str) -> int:
    """Under which number the bytes of a medium are kept beside a group's samples: below 0, from 60 bits of the hash.

    Raises ProtocolError if it is no hash.
    """
    if len(sha256) != 64 or sha256.strip("0123456789abcdef"):
        raise ProtocolError(f"{sha256[:80]!r} is no SHA-256: 64 digits from 0 to f")
    return -1 - int(sha256[:15], 16)


def has_signal(group: Sequence[TrajectoryHeader]) -> bool:
    """Whether two scored members of one group differ in reward; one that is not a number differs from all.

    Without a difference every group-relative advantage is 0 (DAPO, arXiv:2503.14476, section 3.2). The queue refills
    by it, and the trainer counts by it.
    """
    rewards = [header.reward for header in group if header.scored]
    return any(reward != rewards[0] for reward in rewards)


class Trajectory(msgspec.Struct, kw_only=True):
    """One row to train on, exactly as it was sampled. Agent worker -> queue (opaque payload) -> trainer.

    An episode is one row, or several that count from segment 0 and share its reward: conversations side by side, or a
    history that was branched or rewritten.

    token_ids int32[T]; loss_mask bool[T], true only where the policy sampled; logprobs float32[T] under the sampling
    distribution, 0 where the mask is false.
    """

    task_id: str
    group_id: int
    sample: int
    attempt: int
    episode_id: str
    segment: int = 0
    partition: str = "train"
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: list[VersionRun]
    sampling: Sampling
    reward: float
    reward_parts: dict[str, float] = {}
    scored: bool = True  # false: a scorer failed, so that there is no reward to learn from
    baseline: bool = False  # a greedy episode that the others are compared with; never trained
    finish_reason: str = "stop"  # stop | length | max_turns | tool_calls | abort | error
    error: str = ""  # why the episode or its scoring failed; empty: it did not
    turns: list[Turn] = []
    timings: dict[str, float] = {}  # seconds: generate, tools, reward, total
    media: list[Media] = []
    ground_truth: str = ""

    @property
    def key(self) -> RowKey:
        """Names the row within its run."""
        return self.group_id, self.sample, self.segment

    def header(self) -> TrajectoryHeader:
        """The control header that travels in front of this trajectory.

        Raises ProtocolError naming the field if the arrays are not one number per token each.
        """
        for name, array in (("token_ids", self.token_ids), ("loss_mask", self.loss_mask), ("logprobs", self.logprobs)):
            if not isinstance(array, np.ndarray) or array.shape != (len(self.token_ids),):
                shape = getattr(array, "shape", None)
                what = type(array).__name__ if shape is None else f"an array of shape {list(shape)}"
                raise ProtocolError(
                    f"{name} of group {self.group_id} sample {self.sample} is {what}, not an array with one number "
                    f"for each of its {len(self.token_ids)} tokens"
                )
        return TrajectoryHeader(
            group_id=self.group_id,
            sample=self.sample,
            attempt=self.attempt,
            partition=self.partition,
            episode_id=self.episode_id,
            segment=self.segment,
            tokens=len(self.token_ids),
            sampled=int(np.count_nonzero(self.loss_mask)),
            reward=self.reward,
            finish_reason=self.finish_reason,
            versions=self.versions,
            reward_parts=self.reward_parts,
            scored=self.scored,
            baseline=self.baseline,
            tokens_sha256=self.tokens_sha256(),
            media=[medium.sha256 for medium in self.media],
        )

    def tokens_sha256(self) -> str:
        """Hash of the token ids, as hexadecimal digits: the same wherever the same tokens are."""
        return hashlib.sha256(np.ascontiguousarray(self.token_ids, dtype="<i4").data).hexdigest()


class RuleRun(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens number ``start`` to ``end`` (exclusive) were masked, or given weight 0, by ``rule``."""

    rule: str  # of configs/correction.py's RULES
    start: int
    end: int


class Explanation(msgspec.Struct, kw_only=True):
    """What the correction made of a row's sampled tokens; stands as ``correction`` beside a recorded trajectory's own
    fields. Trainer -> viewer."""

    weights: list[float]  # of each sampled token, rounded; 0 where it did not train
    rules: list[RuleRun]


# --- requests to the queue ------------------------------------------------------------------------------------------


class Request(msgspec.Struct, kw_only=True, tag=True):
    """Base of all requests. The envelope around them carries the request id."""


class Hello(Request):
    """First message of every connection. Any role -> queue."""

    schema: int
    role: str
    name: str


class Lease(Request):
    """Ask for work; answered when there is some or after ``wait_s``. Agent worker -> queue.

    With ``task`` a producer brings its own: it gets one group, of this task, as soon as one may be admitted.
    """

    worker: str
    max_groups: int
    wait_s: float
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


class Reserve(Request):
    """Fix the batch of a step; answers the same however often it is asked. Trainer -> queue."""

    step: int
    wait_s: float


class Fetch(Request):
    """The payloads of some rows of a reserved or evaluated batch. Trainer ranks -> queue."""

    rows: list[RowKey]


class Store(Request):
    """Keep the rows of finished samples. Agent worker -> payload shard, before the Put that names the shard.

    ``lengths`` has the bytes of each row, by sample; the payload is the rows one after another (``wire.join``).
    """

    samples: list[SampleKey]
    lengths: list[list[int]]


class Load(Request):
    """The payloads of some rows. Trainer ranks -> payload shard."""

    rows: list[StoredKey]


class RegisterShard(Request):
    """A payload shard is ready. One that was started again has a new id, under the same name. Shard -> queue."""

    shard_id: str
    name: str
    url: str


class Sweep(Request):
    """Which of these groups are of no use any more, now or within ``wait_s``; a sign of life. Shard -> queue."""

    shard_id: str
    groups: list[int]
    wait_s: float


class Shards(Request):
    """Where the payload shards are, at once or when the revision passes ``after``. Workers, people -> queue."""

    after: int
    wait_s: float


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


class EvalResult(Request):
    """The finished trajectories of an evaluation, when all are there, else NotReady after ``wait_s``."""

    eval_id: int
    wait_s: float


class RegisterEngine(Request):
    """An engine process answers its health probe. Launcher -> queue."""

    engine_id: str
    url: str
    kind: str


class RemoveEngine(Request):
    """An engine process is gone. Launcher or weight-sync coordinator -> queue."""

    engine_id: str
    reason: str


class Engines(Request):
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


class Read(Request):
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


# --- replies of the queue -------------------------------------------------------------------------------------------


class Reply(msgspec.Struct, kw_only=True, tag=True):
    """Base of all replies."""


class Welcome(Reply):
    """The hello was accepted."""

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


class LeasedGroup(msgspec.Struct, kw_only=True):
    """Samples of one group to generate. The attempt number fences: an older one is refused."""

    group_id: int
    partition: str
    attempt: int
    samples: list[int]
    task: Task
    min_version: Version  # engines older than this must not serve it


class Leased(Reply):
    """Work; empty when none came within the wait. ``finished`` ends the worker."""

    groups: list[LeasedGroup]
    finished: bool = False


class NotReady(Reply):
    """Nothing yet; ask again. ``why`` names what is being waited for and for how long."""

    why: str


class Reserved(Reply):
    """The batch of a step or an evaluation: headers ordered by (group, sample, segment)."""

    step: int
    headers: list[TrajectoryHeader]
    tasks: dict[int, Task] = {}  # by group, for records and replays


class Taken(Reply):
    """Of each sample of a Put, in order: None if it was taken, now or before, else why it is not wanted."""

    refused: list[Refused | None]


class Rows(Reply):
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
    """These groups are of no use any more."""

    gone: list[int]


class SnapshotTaken(Reply):
    """Opaque to the trainer; stored with the checkpoint."""

    snapshot: bytes


class Resumed(Reply):
    """``kept`` groups are still here with their trajectories; ``readmitted`` groups are generated again."""

    kept: int
    readmitted: int


class EngineRecord(msgspec.Struct, kw_only=True):
    """One engine of the registry. ``version`` is the last one it confirmed; without one it gets no traffic."""

    engine_id: str
    url: str
    kind: str
    version: Version | None = None


class EngineList(Reply):
    """The registry; ``published`` is the newest version that every routable engine has confirmed."""

    revision: int
    engines: list[EngineRecord]
    published: Version


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
    counters: dict[str, int]  # dropped, dead_letters, redelivered, fenced, malformed, ...
    oldest_lease_s: float
    workers: int
    finished: bool


class LeaseRecord(msgspec.Struct, kw_only=True):
    """Who has been generating a group, and for how many seconds."""

    group_id: int
    worker: str
    age_s: float


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


class GroupRecord(msgspec.Struct, kw_only=True):
    """One line of a listing."""

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
    """One group; headers ordered by (sample, segment)."""

    group: GroupRecord
    task: Task
    headers: list[TrajectoryHeader]


class Subscription(Reply):
    """Where the consumer stands: it reads what comes behind ``position``; ``skipped`` groups were given up before."""

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


ReplyType = (
    Welcome
    | Done
    | Refused
    | Malformed
    | Leased
    | NotReady
    | Reserved
    | Taken
    | Rows
    | Elsewhere
    | ShardList
    | Swept
    | SnapshotTaken
    | Resumed
    | EngineList
    | StatusReport
    | Inspection
    | GroupList
    | Peeked
    | Subscription
    | Delivered
)
