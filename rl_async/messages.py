"""Every message that crosses a process boundary, in the order of the data's way.

Tasks, versions, trajectories and their headers come first, then replies and requests on the queue's sockets, and last
the encoding of those with arrays. Each struct names its producer and its consumer. ``lineage`` is that of the trainer
that sends a request: the queue refuses an older one than the newest that has resumed, since that trainer has been
replaced. Other clients have none. A request names its replies in its base class: ``Request[Done]`` is answered Done,
and Refused is then an error at the client, whereas ``Request[Done | Refused]`` gives the refusal to the caller. To add
a request: its class here, with its replies, a row in ``transfer_queue/verbs.py`` and a line in
``transfer_queue/client.py``. When an older process would misread a message, raise SCHEMA.

Frequent structs are ``gc=False``: Python does not look for reference cycles through them, and they must have none.
Looking took a fifth of the queue's time and a third of its readers'.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from rl_async.errors import ProtocolError
from rl_async.files import UNDECODABLE

T = TypeVar("T")
Frame = bytes | memoryview

SCHEMA = 13


# (group, sample, segment)
RowKey = tuple[int, int, int]
# (group, sample, attempt)
SampleKey = tuple[int, int, int]
# (group, sha256 of the bytes)
MediaKey = tuple[int, str]
# (group, sample, attempt, segment)
StoredKey = tuple[int, int, int, int]

_INT32 = np.dtype("<i4")


class Version(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Names a set of weights: ``step`` counts completed trainer steps, ``lineage`` counts resumes from a checkpoint.

    Engines get it as the string ``lineage.step``.
    """

    lineage: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> "Version":
        """Parse the form that ``str`` writes. Raises ValueError for another one."""
        lineage, _, step = text.partition(".")
        return cls(int(lineage), int(step))


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampled tokens number ``start`` to ``end`` (exclusive, counting sampled tokens only) came from ``version``."""

    version: Version
    start: int
    end: int


class Task(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One prompt with all that a worker needs to act on it and to score it. Task source -> queue -> agent worker.

    ``prompt`` holds chat messages. The config's ``agent`` and ``tools`` apply unless they are given. ``source`` is the
    data set of data.path, or empty for a producer's task.
    """

    task_id: str
    data_source: str
    prompt: list[dict[str, Any]]
    ground_truth: str
    ability: str = ""
    agent: str = ""
    tools: list[str] | None = None
    extra: dict[str, Any] = {}
    # With queue.sampling=priority, higher ones are trained first.
    priority: float = 0.0
    source: str = ""


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """The distribution of sampled tokens. Temperature 0 is greedy; top_k is off with 0."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken; the bound is vLLM's."""
        return self.temperature < 1e-5

    @property
    def truncating(self) -> bool:
        """Whether some tokens had no chance at all, so that their true log-probability is minus infinity."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


# Why a call is malformed: it never ends, is not JSON, names no function, has no object as arguments, or another shape.
CallProblem = Literal["unclosed", "bad_json", "no_name", "bad_arguments", "bad_structure"]
# The finish reason of an episode that ran out of time.
TIMEOUT = "timeout"
CALL_PROBLEMS: tuple[CallProblem, ...] = get_args(CallProblem)


class ToolCall(msgspec.Struct, kw_only=True, gc=False):
    """One call that the model asked for, with its outcome. Agent loop -> viewer, reward.

    ``arguments`` are JSON, or the whole text of a malformed call, which has a ``problem``. If the policy saw only the
    beginning of a result, ``cut`` is the length of the whole. ``error`` is empty if the call succeeded. ``reward`` is
    part of its turn's reward.
    """

    name: str
    arguments: str
    result: str = ""
    cut: int = 0
    error: str = ""
    problem: CallProblem | None = None
    reward: float | None = None
    # The reason for the reward.
    reason: str = ""
    seconds: float = 0.0


class Turn(msgspec.Struct, kw_only=True, gc=False):
    """One message of the conversation as text, and its tokens, token_ids[start:end]. Agent loop -> viewer.

    ``role`` is system, user, assistant or tool.
    """

    role: str
    text: str
    start: int = 0
    end: int = 0
    tool_calls: list[ToolCall] = []
    reward: float | None = None
    # The reason for the reward.
    reason: str = ""
    seconds: float = 0.0


class Activity(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One activity of an episode, which ``began`` at a Unix time. Agent loop -> viewer.

    ``name`` is that of the tool, or of the engine (the last one if several sampled the turn).
    """

    kind: Literal["generate", "tool", "environment", "reward"]
    name: str
    began: float
    seconds: float


class TrajectoryHeader(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The part of a trajectory that admission, batching and status need; the queue reads no other. Worker -> queue.

    It travels without the names of its fields, since every row has one. ``partition`` is train or eval.
    ``turn_rewards`` is their sum over the row's turns. ``tokens_hash`` is the hash of the token ids, for the audit.
    ``nbytes`` is the size of the payload, which its keeper fills in, and ``shards`` are the ids of the shards that keep
    it, empty if the queue itself does. ``media`` holds the sha256 of each medium that the row refers to.
    ``prompt_tokens`` precede the first sampled token; ``prompt_crc32`` is their checksum. Readers compare
    ``payload_xxh3``, XXH3 with 64 bits, with the encoded row.
    """

    group_id: int
    sample: int
    attempt: int
    partition: str
    episode_id: str
    segment: int
    # The row's role, in an episode of several roles.
    role: str = ""
    tokens: int
    sampled: int
    reward: float
    finish_reason: str
    versions: list[VersionRun]
    reward_parts: dict[str, float] = {}
    turn_rewards: float = 0.0
    # False if a scorer failed, so that the row has no reward to learn from.
    scored: bool = True
    # A greedy episode that the others are compared with. It is never trained.
    baseline: bool = False
    tokens_hash: str
    nbytes: int = 0
    shards: list[str] = []
    media: list[str] = []
    prompt_tokens: int = 0
    prompt_crc32: int = 0
    payload_xxh3: int = 0
    # Whether the episode has a trace.
    traced: bool = False

    @property
    def prompt(self) -> tuple[int, bool, int, int]:
        """A key that rows of a group share if they begin with the same prompt, sampled at the same temperature."""
        return self.group_id, self.baseline, self.prompt_tokens, self.prompt_crc32

    @property
    def key(self) -> RowKey:
        """The (group, sample, segment) that names the row within its run."""
        return self.group_id, self.sample, self.segment


class Media(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An image or the like that a row refers to. Its bytes are kept once for all rows of a group.

    ``sha256`` has 64 hexadecimal digits. ``position`` is that of the first token that stands for it.
    """

    sha256: str
    mime: str
    position: int

    @classmethod
    def of(cls, data: bytes, mime: str, position: int) -> "Media":
        """A reference to these bytes, by their hash."""
        return cls(sha256=hashlib.sha256(data).hexdigest(), mime=mime, position=position)


def media_sample(sha256: str) -> int:
    """The sample number of a medium's bytes beside a group's samples: negative, from 60 bits of the hash.

    Raises ProtocolError for an invalid hash.
    """
    if len(sha256) != 64 or sha256.strip("0123456789abcdef"):
        raise ProtocolError(f"{sha256[:80]!r} is no SHA-256: 64 digits from 0 to f")
    return -1 - int(sha256[:15], 16)


def role_rewards(headers: Iterable[TrajectoryHeader]) -> dict[tuple[int, int, str], float]:
    """Return the reward of each scored role of each episode, by (group, sample, role): its outcome and the rewards of
    its turns, in all its rows. An episode without roles has one, called "".

    Estimators compare these rewards; only ``gdpo`` looks at parts instead.
    """
    rewards: dict[tuple[int, int, str], float] = {}
    for header in headers:
        if header.scored:
            key = header.group_id, header.sample, header.role
            rewards[key] = rewards.get(key, header.reward) + header.turn_rewards
    return rewards


def episode_rewards(headers: Iterable[TrajectoryHeader]) -> dict[tuple[int, int], float]:
    """Return the reward of each fully scored episode, by (group, sample): the mean of its roles' rewards."""
    headers = list(headers)
    unscored = {(header.group_id, header.sample) for header in headers if not header.scored}
    earned: dict[tuple[int, int], list[float]] = {}
    for (group, sample, _), reward in role_rewards(headers).items():
        earned.setdefault((group, sample), []).append(reward)
    return {key: sum(rewards) / len(rewards) for key, rewards in earned.items() if key not in unscored}


def mean_role_rewards(headers: Iterable[TrajectoryHeader]) -> dict[str, float]:
    """Return the mean reward of each role over the episodes that scored it; empty for episodes without roles."""
    earned: dict[str, list[float]] = {}
    for (_, _, role), reward in sorted(role_rewards(headers).items()):
        if role:
            earned.setdefault(role, []).append(reward)
    return {role: sum(rewards) / len(rewards) for role, rewards in earned.items()}


def has_signal(group: Sequence[TrajectoryHeader]) -> bool:
    """Whether a role's reward differs between two scored episodes of a group. NaN differs from all rewards.

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
    that the row's first R tokens went through in the engine, up to the last one that a later token was sampled from;
    None if no engine recorded them.

    kept_tokens int32[S, K], ascending and filled up with -1, are the tokens that ``sampling`` left to choose each of
    the S sampled tokens from, over which logprobs are renormalised; None if it truncates nothing.

    ``constrained`` are runs (start, end) of sampled tokens that a grammar's mask restricted. ``reward_reasons`` are
    those of parts, or of an agent program's whole reward as ``reward``. finish_reason: stop, length, max_turns,
    tool_calls, abort, error or timeout. ``error`` says why the episode or its scoring failed, if it did. ``timings``
    are seconds: generate, tools, environment, reward, total. The last row of a conversation has its ``activities``.
    ``data_source`` is the task's.
    """

    task_id: str
    group_id: int
    sample: int
    attempt: int
    episode_id: str
    segment: int = 0
    # The row's role, in an episode of several roles.
    role: str = ""
    partition: str = "train"
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: list[VersionRun]
    constrained: list[tuple[int, int]] = []
    sampling: Sampling
    reward: float
    reward_parts: dict[str, float] = {}
    reward_reasons: dict[str, str] = {}
    # False if a scorer failed, so that the row has no reward to learn from.
    scored: bool = True
    # A greedy episode that the others are compared with. It is never trained.
    baseline: bool = False
    finish_reason: str = "stop"
    error: str = ""
    turns: list[Turn] = []
    timings: dict[str, float] = {}
    activities: list[Activity] = []
    media: list[Media] = []
    routed_experts: np.ndarray | None = None
    kept_tokens: np.ndarray | None = None
    ground_truth: str = ""
    data_source: str = ""
    # Whether the episode has a trace.
    traced: bool = False

    @property
    def key(self) -> RowKey:
        """The (group, sample, segment) that names the row within its run."""
        return self.group_id, self.sample, self.segment

    def header(self) -> TrajectoryHeader:
        """The control header that travels in front of this trajectory.

        Raises ProtocolError naming the field if the arrays are not one number per token each, or one record per token
        at most, or if a sampled token is not among those that it was chosen from.
        """
        self._check_arrays()
        ids, mask = self.token_ids, self.loss_mask
        # Also 0 if no token was sampled.
        prompt = int(mask.argmax()) if len(mask) else 0
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
        kept, sampled = self.kept_tokens, ids[self.loss_mask]
        if kept is not None and (
            kept.ndim != 2
            or kept.dtype != np.int32
            or len(kept) != len(sampled)
            or not (kept == sampled[:, None]).any(1).all()
        ):
            raise ProtocolError(
                f"kept_tokens of group {self.group_id} sample {self.sample} are {kept.dtype}{list(kept.shape)}, not "
                f"int32 [{len(sampled)} sampled tokens, tokens to choose from] that hold each sampled token"
            )

    def tokens_hash(self) -> str:
        """XXH3 of the token ids, 128 bits as hexadecimal digits, equal on every machine.

        It detects accidents, not forgery: a process that can forge tokens can make the hash, too.
        """
        return xxh3_128_hexdigest(np.ascontiguousarray(self.token_ids, _INT32).data)


def by_role(rows: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Return the rows of each role of one episode, as they come; the rows of an episode without roles together."""
    found: dict[str, list[Trajectory]] = {}
    for row in rows:
        found.setdefault(row.role, []).append(row)
    return list(found.values())


class RuleRun(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens number ``start`` to ``end`` (exclusive) were masked, or given weight 0, by a correction rule."""

    rule: str
    start: int
    end: int


class Explanation(msgspec.Struct, kw_only=True):
    """The trainer's view of a row's sampled tokens; stands as ``correction`` beside a recorded trajectory's own fields.

    Each sampled token has a weight, 0 where it did not train, a log-probability under the policy that the weight
    compares with the engine's, and an advantage; one number stands for equal ones. Numbers are rounded. Runs of older
    versions recorded no ``logprobs`` and ``advantages``. Trainer -> viewer.
    """

    weights: list[float]
    rules: list[RuleRun]
    logprobs: list[float] = []
    advantages: list[float] = []


class Reply(msgspec.Struct, kw_only=True, tag=True, gc=False):
    """Base of all replies, tagged by class name."""


class Welcome(Reply):
    """The queue accepted the hello of a connection."""

    schema: int
    run_id: str


class Done(Reply):
    """The request took effect (or had taken effect before)."""


class Refused(Reply):
    """The request was understood and does not apply; nothing changed. Codes are ``fenced``, ``schema`` and others."""

    code: str
    reason: str


class Malformed(Reply):
    """The request was not understood; it was counted and dropped."""

    reason: str


class LeasedGroup(msgspec.Struct, kw_only=True, gc=False):
    """Samples of one group to generate. The attempt number fences: an older one is refused.

    Engines older than ``min_version`` must not serve it. The episodes of ``traced`` samples have a trace.
    """

    group_id: int
    partition: str
    attempt: int
    samples: list[int]
    task: Task
    min_version: Version
    traced: list[int] = []

    def trace(self, sample: int) -> str:
        """Return the name of a sample's trace, or an empty one if its episode has no trace."""
        return f"{self.group_id}.{sample}.{self.attempt}" if sample in self.traced else ""


class Leased(Reply):
    """Work; empty when none came within the wait. ``finished`` ends the worker."""

    groups: list[LeasedGroup]
    finished: bool = False


class NotReady(Reply):
    """Nothing yet; ask again. ``why`` names the missing groups and how long they have been missing.

    ``unattended_s`` is that of StatusReport. Of an evaluation, ``finished`` of ``groups`` are finished.
    """

    why: str
    unattended_s: float = 0.0
    finished: int = 0
    groups: int = 0


class Reserved(Reply):
    """The batch of a step or an evaluation: headers ordered by (group, sample, segment), and tasks by group, without
    their images.

    ``failed`` samples of an evaluation, (group, sample), were given up.
    """

    step: int
    headers: list[TrajectoryHeader]
    tasks: dict[int, Task] = {}
    failed: list[tuple[int, int]] = []


class Renewed(Reply):
    """The leases are kept, except ``gone`` samples, which others play by now: their rows would be refused."""

    gone: list[SampleKey] = []


class Taken(Reply):
    """The answer for each sample of a Put, in order: None if it was taken, now or before, or its refusal."""

    refused: list[Refused | None]


class FetchedRows(Reply, tag="Rows"):
    """The lengths in bytes of the requested rows, in the same order. Each payload frame holds one or several rows."""

    lengths: list[int]


class Elsewhere(Reply):
    """The requested rows are with payload shards: attempt and live shards of each, in the same order; urls by id."""

    attempts: list[int]
    shards: list[list[str]]
    urls: dict[str, str]


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One payload shard. Its id is new each time it starts with nothing."""

    shard_id: str
    name: str
    url: str


class ShardList(Reply):
    """The payload shards. ``replicas`` of them keep each payload; it is 0 if the queue keeps them itself."""

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


# The prefix in the names of engines that run on the trainer's devices while it waits.
LENT = "lent-"


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


# The prefix in the names of counters of failed attempts at training samples. The cause follows.
FAILED = "failed/"


class StatusReport(Reply):
    """Groups by state, slots, leases, counters, and the age of the oldest lease.

    ``max_staleness`` is the bound of admission now, which the trainer may have tightened. ``counters`` are dropped,
    dead_letters, redelivered, fenced, malformed and others, and FAILED with each cause. If only gateways lease,
    ``unattended_s`` counts the seconds since an agent program last played or asked. ``last_failure`` is the beginning
    of the newest dead letter's error. ``scored`` and ``unscored`` count samples since the queue was started.
    ``flush_s`` is the slowest flush of journal and ledger in about a minute.
    """

    published: Version
    waiting: int
    leased: int
    ready: int
    reserved: int
    committed: int
    slots_used: int
    slots: int
    max_staleness: int
    admitted: int
    payload_bytes: int
    counters: dict[str, int]
    oldest_lease_s: float
    workers: int
    finished: bool
    unattended_s: float = 0.0
    last_failure: str = ""
    scored: int = 0
    unscored: int = 0
    flush_s: float = 0.0


class LeaseRecord(msgspec.Struct, kw_only=True):
    """The worker that has been generating a group for so many seconds."""

    group_id: int
    worker: str
    age_s: float


class WorkerRecord(msgspec.Struct, kw_only=True):
    """A worker that was heard of within the lease time, with the number of its samples, and of their groups.

    It took the oldest of these groups ``oldest_s`` ago, which is 0 without a group.
    """

    worker: str
    samples: int
    groups: int
    oldest_s: float


class DeadLetter(msgspec.Struct, kw_only=True):
    """A training group that was given up because one of its samples failed too often."""

    group_id: int
    task: Task
    error: str


class ConsumerRecord(msgspec.Struct, kw_only=True):
    """A reader of trained groups: it acknowledged ``position`` and is ``behind`` by so many groups.

    ``skipped`` groups were dropped before it acknowledged them.
    """

    name: str
    position: int
    behind: int
    skipped: int


class Inspection(Reply):
    """The status and the lists beside it. Ages count from the change of state, or the queue's start.

    ``submitted`` tasks are not admitted yet. ``ages_s`` has the age of the oldest group in each state, and ``rates``
    groups_ready, groups_reserved, rows and bytes per second over the last minute. The newest ``dead_letters`` come
    oldest first. ``shards`` are live ones. ``kept_bytes`` are kept for consumers only. At most 1000 ``workers`` are
    listed, by name.
    """

    status: StatusReport
    group_size: int
    draining: bool
    submitted: int
    oldest_lease: LeaseRecord | None
    ages_s: dict[str, float]
    rates: dict[str, float]
    dead_letters: list[DeadLetter]
    shards: list[ShardRecord] = []
    consumers: list[ConsumerRecord] = []
    kept_bytes: int = 0
    workers: list[WorkerRecord] = []


class GroupRecord(msgspec.Struct, kw_only=True):
    """One group of a GroupList or of Peeked, which has been in its state for ``age_s``.

    Of its samples, so many are ``here``, and ``workers`` generate the others.
    """

    group_id: int
    partition: str
    state: str
    task_id: str
    samples: int
    here: int
    workers: list[str]
    age_s: float
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
    """The consumer's position, after which it reads; ``skipped`` groups were dropped before."""

    position: int
    skipped: int


class DeliveredGroup(msgspec.Struct, kw_only=True):
    """One trained group; headers ordered by (sample, segment). ``position`` counts committed groups from 1."""

    position: int
    step: int
    group_id: int
    task: Task
    headers: list[TrajectoryHeader]


class Delivered(Reply):
    """Groups for a consumer, empty if none came within the wait. After ``finished``, none will come.

    Since the consumer subscribed, ``skipped`` groups were dropped before it acknowledged them.
    """

    groups: list[DeliveredGroup]
    skipped: int
    finished: bool = False


ReplyType: Any = reduce(or_, Reply.__subclasses__())


R = TypeVar("R")


class Request(msgspec.Struct, Generic[R], tag=True, gc=False):
    """Base of all requests; the client returns an ``R``. The envelope around a request carries its id."""


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

    # A secret must not get into a log.
    def __repr__(self) -> str:
        return f"Hello(schema={self.schema}, role={self.role!r}, name={self.name!r})"

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

    Leases that ``held`` has not listed for a lease time end: the worker has forgotten them. None stands for all.
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
    """Admit groups for the smaller of ``max_staleness`` and the configured bound.

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
    """Read groups with an id above ``after``, in order, at most ``limit``, of any state or one. Any role -> queue."""

    after: int = -1
    limit: int = 1000
    state: str = ""


class Peek(Request[Peeked | Refused]):
    """Read one group with the headers of its finished rows; Fetch has the rows. Any role -> queue."""

    group_id: int


class Subscribe(Request[Subscription]):
    """Create a reader of trained groups, unless one of this name exists. A logger or evaluator -> queue."""

    consumer: str
    # Start at the oldest group that is here, instead of the next one to be trained.
    oldest: bool = False


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
    """Forget a consumer and the groups that were kept for it. Any role -> queue."""

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


# Inside the msgpack of a struct an array is an extension: its type stands for the dtype, its data are the bytes. One
# that does not have one dimension is ``[shape, extension]``. Decoded arrays are read-only views of the received frame.
_DTYPES = tuple(np.dtype(name) for name in ("bool", "uint8", "uint16", "int32", "int64", "float32", "float64"))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def _enc_hook(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot encode {type(value).__name__}")
    code = _CODES.get(value.dtype)
    if code is None:
        raise ProtocolError(f"cannot encode an array of {value.dtype}; known: {', '.join(map(str, _DTYPES))}")
    extension = msgspec.msgpack.Ext(code, np.ascontiguousarray(value).data)
    return extension if value.ndim == 1 else (value.shape, extension)


def _dec_hook(wanted: type, value: Any) -> Any:
    if type(value) is np.ndarray and wanted is np.ndarray:
        return value
    if wanted is not np.ndarray:
        raise NotImplementedError(f"cannot decode {wanted}")
    try:
        shape, flat = value
        # An array of numbers instead of an extension.
        if type(flat) is not np.ndarray:
            raise ProtocolError("malformed array: its bytes are missing")
        if min(shape, default=0) < 0:
            raise ProtocolError(f"an array of {flat.size} {flat.dtype} is not of shape {list(shape)}")
        return flat.reshape(shape)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed array: {error}") from error


def _ext_hook(code: int, data: memoryview) -> np.ndarray:
    if not 0 <= code < len(_DTYPES):
        raise ProtocolError(f"an array of unknown type {code}")
    try:
        return np.frombuffer(data, _DTYPES[code])
    except ValueError as error:
        raise ProtocolError(f"malformed array: {error}") from error


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a struct whose arrays have a dtype listed in this module. Raises ProtocolError for another."""
    return _encoder.encode(message)


def decoder(kind: type[T]) -> Callable[[Frame], T]:
    """A function that decodes a ``kind`` that :func:`encode` encoded. Make it once: that takes longer than its use.

    It raises ProtocolError for bytes that are not a valid ``kind``.
    """
    decode = msgspec.msgpack.Decoder(kind, dec_hook=_dec_hook, ext_hook=_ext_hook).decode

    def checked(frame: Frame) -> T:
        try:
            return decode(frame)
        except (*UNDECODABLE, NotImplementedError) as error:
            raise ProtocolError(f"malformed {kind.__name__}: {error}") from error

    return checked
