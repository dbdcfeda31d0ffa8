"""What the queue is about: tasks, versions, trajectories and their headers."""

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from xxhash import xxh3_128_hexdigest

from rl_async.errors import ProtocolError

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

    rule: str  # of configs/schema/correction.py's RULES
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
