"""Every message that crosses a process boundary, in the order in which data flows.

First what the queue is about (tasks, versions, trajectories and their headers), then replies and requests on the
queue's sockets. Each struct names its producer and its consumer. ``lineage`` says for which trainer a request is made:
the queue refuses an older one than the newest that has resumed, since that trainer has been replaced. If None, where
it is allowed, no trainer asks. A request names its replies in its base class: ``Request[Done]`` is answered Done, and
Refused is then an error at the client, whereas ``Request[Done | Refused]`` gives the refusal to the caller. To add a
request: its class here, with its replies, a row in ``transfer_queue/verbs.py`` and a line in
``transfer_queue/client.py``. When an older process would misread a message, raise SCHEMA.

Structs of which there are many are ``gc=False``: Python does not look for reference cycles through them, and they are
to have none. Looking took a fifth of the queue's time and a third of its readers'.
"""

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from rl_async.errors import ProtocolError

SCHEMA = 12


RowKey = tuple[int, int, int]  # (group, sample, segment)
SampleKey = tuple[int, int, int]  # (group, sample, attempt)
MediaKey = tuple[int, str]  # (group, sha256 of the bytes)
StoredKey = tuple[int, int, int, int]  # (group, sample, attempt, segment)

_INT32 = np.dtype("<i4")


class Version(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
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


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampled tokens number ``start`` to ``end`` (exclusive, counting sampled tokens only) came from ``version``."""

    version: Version
    start: int
    end: int


class Task(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """The distribution from which tokens were drawn. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken; the bound is vLLM's."""
        return self.temperature < 1e-5

    @property
    def truncating(self) -> bool:
        """Whether some tokens had no chance at all, so that their true log-probability is minus infinity."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


# Why a call is malformed: it never ends, is no JSON, names no function, has no object as arguments, or another shape.
CallProblem = Literal["unclosed", "bad_json", "no_name", "bad_arguments", "bad_structure"]
# The finish reason of an episode that ran out of time.
TIMEOUT = "timeout"
CALL_PROBLEMS: tuple[CallProblem, ...] = get_args(CallProblem)


class ToolCall(msgspec.Struct, kw_only=True, gc=False):
    """One call that the model asked for, and what came of it. Agent loop -> viewer, reward."""

    name: str
    arguments: str  # JSON; of a malformed call all of its text
    result: str = ""
    cut: int = 0  # characters of the whole result, of which the policy saw the beginning; 0: it saw all
    error: str = ""  # empty: the call succeeded
    problem: CallProblem | None = None  # of a malformed call
    reward: float | None = None  # part of its turn's reward
    reason: str = ""  # of the reward
    seconds: float = 0.0


class Turn(msgspec.Struct, kw_only=True, gc=False):
    """One message of the conversation as text, with its place among the tokens. Agent loop -> viewer."""

    role: str  # system | user | assistant | tool
    text: str
    start: int = 0
    end: int = 0  # token_ids[start:end]
    tool_calls: list[ToolCall] = []
    reward: float | None = None
    reason: str = ""  # of the reward
    seconds: float = 0.0


class Activity(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an episode did at a time. Agent loop -> viewer."""

    kind: Literal["generate", "tool", "environment", "reward"]
    name: str  # of the engine (the last one, if several sampled the turn), or of the tool
    began: float  # Unix time
    seconds: float


class TrajectoryHeader(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """What admission, batching and status need of a trajectory; the queue never reads more. Agent worker -> queue.

    It travels without the names of its fields, since there is one for each row.
    """

    group_id: int
    sample: int
    attempt: int
    partition: str  # train | eval
    episode_id: str
    segment: int
    role: str = ""  # in an episode of several roles, the one that the row is of
    tokens: int
    sampled: int
    reward: float
    finish_reason: str
    versions: list[VersionRun]
    reward_parts: dict[str, float] = {}
    turn_rewards: float = 0.0  # their sum over the row's turns
    scored: bool = True  # false: a scorer failed, so that there is no reward to learn from
    baseline: bool = False  # a greedy episode that the others are compared with; never trained
    tokens_hash: str  # of the payload's token ids, for the audit
    nbytes: int = 0  # of the payload; filled by whoever keeps it
    shards: list[str] = []  # that keep the payload, by id; empty: the queue itself does
    media: list[str] = []  # sha256 of each that the row refers to
    prompt_tokens: int = 0  # before the first sampled one
    prompt_crc32: int = 0  # of those
    payload_xxh3: int = 0  # XXH3 of the encoded row, 64 bits, for whoever reads it
    traced: bool = False  # the episode has a trace

    @property
    def prompt(self) -> tuple[int, bool, int, int]:
        """Equal for rows of a group that begin with the same prompt and are sampled at the same temperature."""
        return self.group_id, self.baseline, self.prompt_tokens, self.prompt_crc32

    @property
    def key(self) -> RowKey:
        """The (group, sample, segment) that names the row within its run."""
        return self.group_id, self.sample, self.segment


class Media(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An image or the like that a row refers to. Its bytes are kept once for all rows of a group."""

    sha256: str  # of the bytes, as 64 hexadecimal digits
    mime: str
    position: int  # of the token that stands for it, or of the first

    @classmethod
    def of(cls, data: bytes, mime: str, position: int) -> "Media":
        """A reference to these bytes, by their hash."""
        return cls(sha256=hashlib.sha256(data).hexdigest(), mime=mime, position=position)


def media_sample(sha256: str) -> int:
    """Under which number the bytes of a medium are kept beside a group's samples: below 0, from 60 bits of the hash.

    Raises ProtocolError if it is no hash.
    """
    if len(sha256) != 64 or sha256.strip("0123456789abcdef"):
        raise ProtocolError(f"{sha256[:80]!r} is no SHA-256: 64 digits from 0 to f")
    return -1 - int(sha256[:15], 16)


def role_rewards(headers: Iterable[TrajectoryHeader]) -> dict[tuple[int, int, str], float]:
    """Return what each role of each episode earned, by (group, sample, role), if it was scored: its outcome and the
    rewards of its turns, in all its rows. An episode without roles has one, called "".

    That is what estimators compare; only ``gdpo`` looks at parts instead.
    """
    rewards: dict[tuple[int, int, str], float] = {}
    for header in headers:
        if header.scored:
            key = header.group_id, header.sample, header.role
            rewards[key] = rewards.get(key, header.reward) + header.turn_rewards
    return rewards


def episode_rewards(headers: Iterable[TrajectoryHeader]) -> dict[tuple[int, int], float]:
    """Return the reward of each episode, all of whose rows were scored, by (group, sample): the mean of what its roles
    earned."""
    headers = list(headers)
    unscored = {(header.group_id, header.sample) for header in headers if not header.scored}
    earned: dict[tuple[int, int], list[float]] = {}
    for (group, sample, _), reward in role_rewards(headers).items():
        earned.setdefault((group, sample), []).append(reward)
    return {key: sum(rewards) / len(rewards) for key, rewards in earned.items() if key not in unscored}


def mean_role_rewards(headers: Iterable[TrajectoryHeader]) -> dict[str, float]:
    """Return the mean reward of each role over the episodes in which it was scored; nothing if there are no roles."""
    earned: dict[str, list[float]] = {}
    for (_, _, role), reward in sorted(role_rewards(headers).items()):
        if role:
            earned.setdefault(role, []).append(reward)
    return {role: sum(rewards) / len(rewards) for role, rewards in earned.items()}


def has_signal(group: Sequence[TrajectoryHeader]) -> bool:
    """Whether a role earned something else in one scored episode of a group than in another; what is not a number
    differs from all.

    Without a difference every group-relative advantage is 0 (DAPO, arXiv:2503.14476, section 3.2). The queue refills
    by it, and the trainer counts by it.
    """
    first: dict[str, float] = {}
    return any(reward != first.setdefault(role, reward) for (_, _, role), reward in role_rewards(group).items())


class Trajectory(msgspec.Struct, kw_only=True, gc=False):
    """One row to train on, exactly as it was sampled. Agent worker -> queue (opaque payload) -> trainer.

    An episode is one row, or several that count from segment 0 and share its reward: conversations side by side, or a
    history that was branched or rewritten. In an episode of several roles, those of each role share a reward.

    token_ids int32[T]; loss_mask bool[T], true only where the policy sampled; logprobs float32[T] under the sampling
    distribution, 0 where the mask is false. For ``constrained`` tokens that is the policy's distribution over the
    tokens that a grammar allowed, renormalised. routed_experts uint8 or uint16[R, layers, k], the experts of a mixture
    that the row's first R tokens went through in the engine; what no later token was sampled from has none.
    """

    task_id: str
    group_id: int
    sample: int
    attempt: int
    episode_id: str
    segment: int = 0
    role: str = ""  # in an episode of several roles, the one that the row is of
    partition: str = "train"
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: list[VersionRun]
    constrained: list[tuple[int, int]] = []  # runs (start, end) of sampled tokens that a grammar's mask restricted
    sampling: Sampling
    reward: float
    reward_parts: dict[str, float] = {}
    reward_reasons: dict[str, str] = {}  # of parts; of an agent program's whole reward, as ``reward``
    scored: bool = True  # false: a scorer failed, so that there is no reward to learn from
    baseline: bool = False  # a greedy episode that the others are compared with; never trained
    finish_reason: str = "stop"  # stop | length | max_turns | tool_calls | abort | error | timeout
    error: str = ""  # why the episode or its scoring failed; empty: it did not
    turns: list[Turn] = []
    timings: dict[str, float] = {}  # seconds: generate, tools, environment, reward, total
    activities: list[Activity] = []  # those of a conversation, in its last row
    media: list[Media] = []
    routed_experts: np.ndarray | None = None  # None: no engine recorded them
    ground_truth: str = ""
    data_source: str = ""  # the task's
    traced: bool = False  # the episode has a trace

    @property
    def key(self) -> RowKey:
        """The (group, sample, segment) that names the row within its run."""
        return self.group_id, self.sample, self.segment

    def header(self) -> TrajectoryHeader:
        """The control header that travels in front of this trajectory.

        Raises ProtocolError naming the field if the arrays are not one number per token each, or one record per token
        at most.
        """
        self._check_arrays()
        ids, mask = self.token_ids, self.loss_mask
        prompt = int(mask.argmax()) if len(mask) else 0  # 0 also if nothing was sampled
        return TrajectoryHeader(
            group_id=self.group_id,
            sample=self.sample,
            attempt=self.attempt,
            partition=self.partition,
            episode_id=self.episode_id,
            segment=self.segment,
            role=self.role,
            tokens=len(ids),
            sampled=int(np.count_nonzero(mask)),
            reward=self.reward,
            finish_reason=self.finish_reason,
            versions=self.versions,
            reward_parts=self.reward_parts,
            turn_rewards=sum([turn.reward or 0.0 for turn in self.turns]),
            scored=self.scored,
            baseline=self.baseline,
            tokens_hash=self.tokens_hash(),
            media=[medium.sha256 for medium in self.media],
            prompt_tokens=prompt,
            prompt_crc32=zlib.crc32(np.ascontiguousarray(ids[:prompt], _INT32).data),
            traced=self.traced,
        )

    def _check_arrays(self) -> None:
        """Raise ProtocolError if the arrays do not fit the tokens, as ``header`` says."""
        ids, experts = self.token_ids, self.routed_experts
        shape = (len(ids),)
        for name, array in (("token_ids", ids), ("loss_mask", self.loss_mask), ("logprobs", self.logprobs)):
            if not isinstance(array, np.ndarray) or array.shape != shape:
                found = getattr(array, "shape", None)
                what = type(array).__name__ if found is None else f"an array of shape {list(found)}"
                raise ProtocolError(
                    f"{name} of group {self.group_id} sample {self.sample} is {what}, not an array with one number "
                    f"for each of its {len(ids)} tokens"
                )
        if experts is not None and (
            experts.ndim != 3 or experts.dtype not in (np.uint8, np.uint16) or len(experts) > len(ids)
        ):
            raise ProtocolError(
                f"routed_experts of group {self.group_id} sample {self.sample} are {experts.dtype}"
                f"{list(experts.shape)}, not uint8 or uint16 [at most {len(ids)} tokens, layers, experts per token]"
            )

    def tokens_hash(self) -> str:
        """XXH3 of the token ids, 128 bits as hexadecimal digits: the same wherever the same tokens are.

        It tells what went wrong by itself, not what a forger made: whoever could forge tokens makes the hash, too.
        """
        return xxh3_128_hexdigest(np.ascontiguousarray(self.token_ids, _INT32).data)


def by_role(rows: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Return the rows of each role of one episode, as they come; the rows of an episode without roles together."""
    found: dict[str, list[Trajectory]] = {}
    for row in rows:
        found.setdefault(row.role, []).append(row)
    return list(found.values())


class RuleRun(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens number ``start`` to ``end`` (exclusive) were masked, or given weight 0, by ``rule``."""

    rule: str  # of configs/schema/algorithm.py's RULES
    start: int
    end: int


class Explanation(msgspec.Struct, kw_only=True):
    """What the trainer made of a row's sampled tokens; stands as ``correction`` beside a recorded trajectory's own
    fields. Numbers are rounded. Runs of older versions recorded no ``logprobs`` and ``advantages``. Trainer -> viewer.
    """

    weights: list[float]  # of each sampled token; 0 where it did not train
    rules: list[RuleRun]
    logprobs: list[float] = []  # of each sampled token, under the policy that its weight compares with the engine's
    advantages: list[float] = []  # of each sampled token, or one number that all of them have


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
