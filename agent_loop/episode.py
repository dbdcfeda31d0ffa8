"""An episode: the conversation of a policy with its tools, the loops that drive it, and the rows that it becomes.

A loop is ``async def loop(episode: Episode) -> str``. It decides who speaks when and returns the finish reason:
``stop``, ``length``, ``max_turns``, ``tool_calls`` or ``abort``. Users give their own as ``path.py:name``. To add one,
write the coroutine function here and add a line to ``LOOPS``.

With ``rollout.replay``, recorded episodes and their rewards are put into the queue instead of playing any. The tasks of
the queue name the recorded groups in the order of their training (``task_of``), and it admits one batch at a time, so
every run over a recording trains the same rows in the same order.
"""

import asyncio
import functools
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np

from rl_async import tracing
from rl_async.agent_loop import telemetry
from rl_async.agent_loop.chat_formats.format import (
    BAD_CALL,
    Answer,
    CannotBridge,
    ChatFormat,
    Message,
    ParsedCall,
    SampledTurn,
    TooLong,
    said_text,
    with_names,
)
from rl_async.agent_loop.environments.session import Answering
from rl_async.agent_loop.tools.tool import CallableTool, ToolResult, failed, marked_as_cut
from rl_async.concurrency import gather_or_cancel, off_loop
from rl_async.configs.derived import is_baseline, samples_per_group
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Activity, LeasedGroup, Media, Sampling, Task, ToolCall, Trajectory, Turn, VersionRun
from rl_async.recording import KEY, RecordedGroup, Recording, place_of
from rl_async.rollout_server.api import MOST_ALTERNATIVES, TIES, GenerateRequest, GenerateResult, Generator, Image
from rl_async.transfer_queue.images import MARK, bound_images, images_of
from rl_async.userload import is_user_reference, load_user_object


class RowTokens:
    """An append-only sequence of tokens with loss mask, log-probabilities and versions.

    ``sampled`` counts the policy's own tokens, and ``routed`` the first tokens with a record of their experts.
    ``images`` are those among its tokens, in order.
    """

    def __init__(self, token_ids: Sequence[int] = (), images: Sequence[Image] = ()) -> None:
        self.token_ids: list[int] = []
        self.images: list[Image] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[VersionRun] = []
        self._constrained: list[tuple[int, int]] = []
        self._experts: list[np.ndarray] = []
        self._kept: list[list[int]] = []
        self.sampled = self.routed = 0
        self.add(token_ids, images)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_ids: Sequence[int], images: Sequence[Image] = ()) -> None:
        """Append tokens that the policy did not sample; they are masked out of the loss.

        ``images`` are those among them, at their positions in the row.
        """
        self.images += images
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)

    def add_sampled(self, result: GenerateResult, *, constrained: bool = False) -> None:
        """Append sampled tokens exactly as an engine returned them, merging runs of one version.

        They are ``constrained`` if a grammar's mask restricted the sampling.
        """
        self.token_ids += result.token_ids
        self._mask += [True] * len(result.token_ids)
        self._logprobs += result.logprobs
        for run in result.versions:
            start, end = self.sampled + run.start, self.sampled + run.end
            if self._versions and self._versions[-1].version == run.version:
                start = self._versions.pop().start
            self._versions.append(VersionRun(run.version, start, end))
        if constrained and result.token_ids:
            self._constrained.append((self.sampled, self.sampled + len(result.token_ids)))
        self.sampled += len(result.token_ids)
        self._kept += [sorted(token for token, _ in place) for place in result.alternatives]
        if result.routes is not None and result.routes.start <= self.routed:
            # The first record of a token stays.
            new = result.routes.experts[self.routed - result.routes.start :]
            self._experts.append(new)
            self.routed += len(new)

    def arrays(self) -> dict[str, Any]:
        """Return these fields of a Trajectory: token_ids, loss_mask, logprobs, versions, constrained, media,
        routed_experts, and kept_tokens if the sampler truncates."""
        kept = np.full((len(self._kept), max(map(len, self._kept), default=0)), -1, np.int32)
        for row, tokens in zip(kept, self._kept, strict=True):
            row[: len(tokens)] = tokens
        return {
            "token_ids": np.array(self.token_ids, np.int32),
            "loss_mask": np.array(self._mask, np.bool_),
            "logprobs": np.array(self._logprobs, np.float32),
            "versions": list(self._versions),
            "constrained": list(self._constrained),
            "media": [Media(sha256=image.sha256, mime=image.mime, position=image.position) for image in self.images],
            "routed_experts": np.concatenate(self._experts) if self._experts else None,
            "kept_tokens": kept if self._kept else None,
        }


@dataclass
class Segment:
    """A row in the making: one unbroken history of an episode."""

    tokens: RowTokens
    turns: list[Turn] = field(default_factory=list)
    finish_reason: str = ""


def trajectories(
    rows: Sequence[Segment],
    group: LeasedGroup,
    sample: int,
    *,
    episode_id: str,
    sampling: Sampling,
    timings: Mapping[str, float],
    role: str = "",
    baseline: bool = False,
) -> list[Trajectory]:
    """Return the rows of a conversation to train on, without a reward."""
    trains = group.partition == "train" and not baseline
    return [
        Trajectory(
            task_id=group.task.task_id,
            group_id=group.group_id,
            sample=sample,
            attempt=group.attempt,
            episode_id=episode_id,
            segment=segment,
            role=role,
            partition=group.partition,
            **row.tokens.arrays()
            | ({} if trains else {"routed_experts": None})
            | ({} if trains and sampling.truncating else {"kept_tokens": None}),
            sampling=sampling,
            reward=0.0,
            baseline=baseline,
            finish_reason=row.finish_reason,
            turns=row.turns,
            timings=dict(timings),
            ground_truth=group.task.ground_truth,
            data_source=group.task.data_source,
        )
        for segment, row in enumerate(rows)
    ]


class PromptTooLong(DataError):
    """The opening of a conversation leaves no tokens for an answer."""


class Episode:
    """The conversation that a loop drives: ``generate`` samples a turn, ``call`` runs tools, ``step`` asks the
    environment, ``add`` appends messages of others.

    Sampled tokens are only ever appended to, never re-tokenised from text to be trained. Where ``agent.past_reasoning``
    drops reasoning of earlier turns, a new row begins, with the conversation as the chat template prints it by then.
    """

    def __init__(
        self,
        group: LeasedGroup,
        sample: int,
        *,
        config: RunConfig,
        chat: ChatFormat,
        generator: Generator,
        tools: Sequence[CallableTool],
        environment: Answering | None = None,
        prompt: Sequence[Message] | None = None,
        role: str = "",
    ) -> None:
        """Encode the ``prompt``, by default the task's. In a game, ``role`` names the speaker. Raises PromptTooLong."""
        self.task = group.task
        self.config = config
        self.messages: list[Message] = with_names(group.task.prompt if prompt is None else prompt)
        # Set when a tool or the environment ends the episode.
        self.done = False
        self.tools = {tool.name: tool for tool in tools}
        self.schemas = [tool.schema for tool in tools]
        # The tokens of the latest sampled turn, and the same turn parsed.
        self._said: list[int] = []
        self._answer: Answer | None = None
        self._prompt_messages = len(self.messages)
        self._group, self._sample, self._environment = group, sample, environment
        self._chat, self._generator = chat, generator
        self._id, self._role = f"{group.group_id}.{sample}.{group.attempt}", role
        self._session, self._trace = session_of(self._id, role), group.trace(sample)
        self._baseline = is_baseline(config, group.partition, sample)
        self._sampling = Sampling(temperature=0.0) if self._baseline else policy_sampling(config, group.partition)
        self._limit = min(config.agent.max_tokens, config.rollout.max_model_len)
        self._seconds = {"generate": 0.0, "tools": 0.0}
        self._activities: list[Activity] = []
        self._began = time.monotonic()
        try:
            token_ids = chat.prompt(self.messages, self.schemas, limit=self._limit)
            token_ids, images = chat.expand(token_ids, self.messages, limit=self._limit)
        except TooLong as error:
            raise PromptTooLong(
                f"task {self.task.task_id}: its prompt of {error} leaves no room to answer within {self._limit} "
                "(agent.max_tokens, rollout.max_model_len)"
            ) from None
        turns = [Turn(role=message["role"], text=said_text(message), end=len(token_ids)) for message in self.messages]
        self._rows = [Segment(RowTokens(token_ids, images), turns)]

    @property
    def turns(self) -> list[Turn]:
        """The conversation so far, with the places of the turns in the row that is being played.

        A loop may set the reward of a turn at any time; it counts in the row that sampled the turn.
        """
        return self._rows[-1].turns

    @property
    def _row(self) -> RowTokens:
        return self._rows[-1].tokens

    @property
    def text(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].text

    @property
    def answered(self) -> bool:
        """Whether the policy has sampled a turn."""
        return any(row.tokens.sampled for row in self._rows)

    def tool_calls(self) -> list[ParsedCall]:
        """Parse the tool calls that the model wrote in the last turn."""
        return self._read().calls

    def _read(self) -> Answer:
        if self._answer is None:
            prompt = self._row.token_ids[: len(self._row) - len(self._said)]
            self._answer = self._chat.parse(SampledTurn(self._said, prompt, self.schemas))
        return self._answer

    async def generate(self) -> str:
        """Sample a turn of the model; return why it ended: ``stop``, ``length`` or ``abort``."""
        room = min(self.config.rollout.max_tokens, self._limit - len(self._row))
        if room <= 0:
            return "length"
        request = GenerateRequest(
            request_id=(name := f"{self._session}.{len(self.turns)}"),
            traceparent=tracing.traceparent(self._trace, name),
            token_ids=self._row.token_ids.copy(),
            images=list(self._row.images),
            sampling=self._sampling,
            alternatives=kept_alternatives(self._sampling, self._group.partition),
            max_tokens=room,
            stop_token_ids=self._chat.stop_token_ids,
            min_version=self._group.min_version,
            routed_from=self._row.routed,
        )
        began, at = time.monotonic(), time.time()
        with telemetry.of_chat(self._trace, self.config.model.path, request) as sampled:
            result = await self._generator.generate(request, session=self._session)
            sampled(result)
        seconds = time.monotonic() - began
        self._activities.append(Activity("generate", result.engine, at, seconds))
        self._seconds["generate"] += seconds
        start = len(self._row)
        self._row.add_sampled(result)
        self._said, self._answer = result.token_ids, None
        text = self._chat.turn_text(result.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        self.turns.append(Turn(role="assistant", text=text, start=start, end=len(self._row), seconds=seconds))
        self._rows[-1].finish_reason = result.finish_reason
        return result.finish_reason

    def add(self, messages: Sequence[Message]) -> bool:
        """Append messages and open the next assistant turn.

        If they do not fit, or the turn before ended within its reasoning, append nothing and return False.
        """
        try:
            if self._continues(messages):
                self._append(messages)
            else:
                self._begin_row(messages)
        except (TooLong, CannotBridge):
            return False
        self.messages += messages
        return True

    def _continues(self, messages: Sequence[Message]) -> bool:
        """Whether the sampled turns stay in context unchanged before ``messages`` (``agent.past_reasoning``)."""
        sampled, past = self._sampled(), self.config.agent.past_reasoning
        if past == "keep" or not sampled:
            return True
        if past == "split":
            return False
        return self._chat.keeps_past([*self.messages, *messages], max(sampled), self.schemas, sampled=sampled)

    def _append(self, messages: Sequence[Message]) -> None:
        start = len(self._row)
        said = self._said if self.turns[-1].role == "assistant" else []
        prompt = self._row.token_ids[: start - len(said)]
        room = self._limit - start
        new = self._chat.bridge(prompt, said, messages, self.schemas, limit=room)
        self._row.add(*self._chat.expand(new, messages, start=start, limit=room))
        for message in messages:
            self.turns.append(Turn(role=message["role"], text=message["content"], start=start, end=len(self._row)))

    def _begin_row(self, messages: Sequence[Message]) -> None:
        """Begin a row with the conversation as the chat template prints it now, none of it counted as sampled."""
        whole = [*self.messages, *messages]
        prompt = self._chat.prompt(whole, self.schemas, sampled=self._sampled(), limit=self._limit)
        prompt, images = self._chat.expand(prompt, whole, limit=self._limit)
        turns = self.turns
        # The finished row keeps copies, since the turns get new places.
        self._rows[-1].turns = [msgspec.structs.replace(turn) for turn in turns]
        for turn in turns:
            turn.start, turn.end = 0, len(prompt)
        turns += [Turn(role=message["role"], text=message["content"], end=len(prompt)) for message in messages]
        if not self._row.sampled:
            self._rows.pop()
        self._rows.append(Segment(RowTokens(prompt, images), turns))

    def _sampled(self) -> set[int]:
        """The positions of the messages that the policy sampled."""
        messages = enumerate(self.messages)
        return {i for i, message in messages if i >= self._prompt_messages and message["role"] == "assistant"}

    async def step(self) -> list[Message]:
        """Pass the last turn to the environment, record its reward and return its observation.

        Without an environment or an observation, the episode is ``done``. Raises EnvironmentFailed.
        """
        if self._environment is None:
            self.done = True
            return []
        began, at = time.monotonic(), time.time()
        step, messages = await self._environment.step(self._read().text)
        if self._chat.pictures is not None:
            await self._chat.pictures.check(images_of(messages))
        seconds = time.monotonic() - began
        self._seconds["environment"] = self._seconds.get("environment", 0.0) + seconds
        self._activities.append(Activity("environment", "", at, seconds))
        self._reward_turn(step.reward, step.reason)
        self.done = not messages
        return messages

    def _reward_turn(self, reward: float | None, reason: str) -> None:
        """Add to the reward of the last turn; its tools and the environment may both give one."""
        turn = self.turns[-1]
        if reward is not None:
            turn.reward = float(reward) + (turn.reward or 0.0)
        turn.reason = "; ".join(filter(None, [turn.reason, reason]))

    async def call(self, calls: Sequence[ParsedCall]) -> list[Message]:
        """Run the calls concurrently and record them in the last turn; return a message for each, in order.

        The episode is ``done`` if one of the tools says so.
        """
        began = time.monotonic()
        agent = self.config.agent
        done = await gather_or_cancel(*(self._call_one(call, i) for i, call in enumerate(calls)))
        self._seconds["tools"] += time.monotonic() - began
        messages = []
        for call, (result, seconds) in zip(calls, done):
            result = await self._with_good_images(result)
            text = await off_loop(len(result.text), self._chat.cut, result.text, agent.tool_response_tokens)
            cut = result.whole or (len(result.text) if text != result.text else 0)
            # An image whose mark was cut off is cut off, too.
            images = list(result.images[: text.count(MARK)])
            text = marked_as_cut(text, cut) if cut else text
            self.turns[-1].tool_calls.append(
                ToolCall(
                    name=call.name,
                    arguments=call.recorded,
                    result=text,
                    cut=cut,
                    error=result.error,
                    problem=call.problem,
                    reward=result.reward,
                    reason=result.reason,
                    seconds=seconds,
                )
            )
            self._reward_turn(result.reward, result.reason)
            self.done = self.done or result.done
            message = {"role": "tool", "content": text, "name": call.name} | ({"images": images} if images else {})
            messages.append(message | ({"tool_call_id": call.id} if call.id else {}))
        return messages

    async def _call_one(self, call: ParsedCall, position: int) -> tuple[ToolResult, float]:
        if call.arguments is None:
            return ToolResult(BAD_CALL, "bad call"), 0.0
        if position >= self.config.agent.max_parallel_calls:
            return ToolResult("error: too many calls", "too many calls"), 0.0
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult("error: unknown tool", "unknown tool"), 0.0
        began, at = time.monotonic(), time.time()
        with telemetry.of_tool(self._trace, call.name, call.id) as about:
            result = await tool.call(call.arguments, timeout_s=self.config.agent.tool_timeout_s)
            about |= {"error.type": "tool_error"} if result.error else {}
        seconds = time.monotonic() - began
        self._activities.append(Activity("tool", call.name, at, seconds))
        return result, seconds

    async def _with_good_images(self, result: ToolResult) -> ToolResult:
        """Decode the images of a result outside the event loop; if some are refused, the call counts as failed."""
        if self._chat.pictures is None:
            return result._replace(text=result.plain, images=()) if result.images and result.plain else result
        try:
            bound_images(result.images)
            await self._chat.pictures.check(result.images)
        except (ValueError, DataError) as error:
            return failed(str(error))._replace(reward=result.reward, reason=result.reason, done=result.done)
        return result

    def drift(self) -> int | None:
        """Return the position in the last row of the first token that differs from the chat template of the whole
        conversation, or None."""
        return self._chat.check(self.messages, self._row.token_ids, self.schemas, sampled=self._sampled())

    @property
    def images(self) -> dict[str, bytes]:
        """The images that its rows refer to, by hash."""
        return {image.sha256: image.data for row in self._rows for image in row.tokens.images}

    def trajectories(self, finish_reason: str) -> list[Trajectory]:
        """Return the rows to train on, not scored yet; the last one ends with the last answer."""
        rows = self._with_turn_rewards([row for row in self._rows if row.tokens.sampled] or self._rows[:1])
        rows[-1].finish_reason = finish_reason
        made = trajectories(
            rows,
            self._group,
            self._sample,
            episode_id=self._id,
            sampling=self._sampling,
            timings={**self._seconds, "total": time.monotonic() - self._began},
            role=self._role,
            baseline=self._baseline,
        )
        made[-1].activities = self._activities
        return made

    def _with_turn_rewards(self, rows: Sequence[Segment]) -> list[Segment]:
        """Return the rows with each turn's reward in the first row that has the turn, the one that sampled it."""
        rewards, known, rewarded = [turn.reward for turn in self.turns], 0, list[Segment]()
        for row in rows:
            turns = [
                msgspec.structs.replace(turn, reward=rewards[place] if place >= known else None)
                for place, turn in enumerate(row.turns)
            ]
            known = len(turns)
            rewarded.append(replace(row, turns=turns))
        return rewarded


def session_of(episode: str, role: str) -> str:
    """Return the session of a conversation, whose requests are routed to the same engine."""
    return f"{episode}.{role}" if role else episode


def policy_sampling(config: RunConfig, partition: str) -> Sampling:
    """Return the sampling distribution of a partition's tokens."""
    temperature = config.eval.temperature if partition == "eval" else config.rollout.temperature
    cut = config.rollout.truncation
    return Sampling(temperature) if cut is None else Sampling(temperature, cut.top_p, cut.top_k)


def kept_alternatives(sampling: Sampling, partition: str) -> int:
    """Return how many of the likeliest tokens to ask an engine for, so that all that the sampler kept are there.

    Nothing but training needs them.
    """
    trains = partition == "train" and sampling.truncating and not sampling.greedy
    return min(sampling.top_k + TIES, MOST_ALTERNATIVES) if trains else 0


Loop = Callable[[Episode], Awaitable[str]]


async def single_turn(episode: Episode) -> str:
    """Sample one answer and pass it to the environment."""
    reason = await episode.generate()
    if reason == "stop":
        await episode.step()
    return reason


async def tool_agent(episode: Episode) -> str:
    """Answer each turn with the results of its tool calls or, without calls, with the environment's observation.

    The episode ends when a tool or the environment ends it, and when turns or tokens are used up. Calls in the last
    turn are not run.
    """
    for turns_left in reversed(range(episode.config.agent.max_turns)):
        reason = await episode.generate()
        if reason != "stop":
            return reason
        calls = episode.tool_calls()
        if calls and not turns_left:
            break
        messages = await episode.call(calls) if calls else await episode.step()
        if episode.done:
            return "stop"
        if turns_left and not episode.add(messages):
            return "length"
    return "max_turns"


# The names ending in _agent are those that verl's data sets use.
LOOPS: dict[str, Loop] = {"single_turn": single_turn, "single_turn_agent": single_turn, "tool_agent": tool_agent}


@functools.cache
def get_loop(name: str) -> Loop:
    """Return a built-in loop or the user's coroutine function. Raises ConfigError for an unknown name."""
    if is_user_reference(name):
        loop = load_user_object(name, "agent.loop")
        if not inspect.iscoroutinefunction(loop):
            raise ConfigError(f"agent.loop: {name} is not an `async def` taking an Episode")
        return cast(Loop, loop)
    if name not in LOOPS:
        raise ConfigError(f"agent.loop: no loop {name!r}; built in: {', '.join(LOOPS)}; or path.py:name")
    return LOOPS[name]


class RecordedRunner:
    """Returns the recorded rows of a sample under this run's names instead of playing it."""

    def __init__(self, config: RunConfig) -> None:
        self._recording, self._reading = Recording(config.rollout.replay), asyncio.Lock()

    async def run(self, group: LeasedGroup, sample: int, images: dict[str, bytes] | None = None) -> list[Trajectory]:
        """Return a sample's rows, scored, and add their images by hash to ``images``."""
        async with self._reading:
            samples = await asyncio.to_thread(self._recording.rows, *place_of(group.task))
            if images is not None:
                shown = {medium.sha256 for row in samples[sample] for medium in row.media}
                images |= {name: self._recording.images[name] for name in shown}
        name = f"{group.group_id}.{sample}.{group.attempt}"
        return [
            msgspec.structs.replace(row, group_id=group.group_id, attempt=group.attempt, episode_id=name, activities=[])
            for row in samples[sample]
        ]


class AsRecorded:
    """Stands in for the reward service: recorded rows are scored."""

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory, alone: bool = True) -> None:
        """Leave the rows as they are: they were scored when they were recorded."""

    async def compare(self, task: Task, episodes: Sequence[Sequence[Trajectory]]) -> None:
        """Leave the rows as they are: a comparison is part of their recorded rewards."""


def needed_groups(config: RunConfig) -> list[RecordedGroup]:
    """Return the groups of ``rollout.replay`` that this run trains, in order, by reading the list of groups alone.

    Raises ConfigError if there are too few groups, or if they or the batches differ in size from this run's.
    """
    recording, size = Recording(config.rollout.replay), samples_per_group(config)
    steps, batch = config.trainer.steps, config.data.train_batch_groups
    sizes = Counter(group.step for group in recording.groups)
    for step in range(steps):
        if step not in sizes and any(later > step for later in sizes):
            raise ConfigError(f"{KEY}={recording.folder}: its trained.jsonl lacks step {step}, and has later ones")
        if step not in sizes:
            raise ConfigError(f"{KEY}={recording.folder}: it has {step} steps, not trainer.steps={steps}")
        if sizes[step] != batch:
            raise ConfigError(
                f"{KEY}={recording.folder}: step {step} has {sizes[step]} groups, not data.train_batch_groups={batch}; "
                "its tokens would change their age"
            )
    needed = recording.groups[: steps * batch]
    for group in needed:
        if group.samples != set(range(size)):
            raise ConfigError(
                f"{KEY}={recording.folder}: group {group.group} has {len(group.samples)} samples, and this run's have "
                f"{size} (rollout.group_size={config.rollout.group_size})"
            )
    return needed


def check_recording(config: RunConfig, chat: ChatFormat | None, vocabulary: int | None = None) -> None:
    """Read all that this run trains of ``rollout.replay``.

    Raises ConfigError for rows that are missing or changed since they were trained, or sampled under another
    truncation, for tokens beyond ``vocabulary``, and for tokens that the tokenizer of ``chat`` decodes to another text.
    Either of the last two checks is skipped for None.
    """
    recording, own = Recording(config.rollout.replay), policy_sampling(config, "train")
    for group in needed_groups(config):
        rows = recording.rows(group.step, group.group)
        for row in (row for of_sample in rows.values() for row in of_sample):
            theirs = row.sampling
            if not theirs.greedy and (theirs.top_k, theirs.top_p) != (own.top_k, own.top_p):
                raise ConfigError(
                    f"{KEY}={recording.folder}: a row of group {row.group_id} was sampled with top_k={theirs.top_k}, "
                    f"top_p={theirs.top_p}, not by this run's rollout.truncation"
                )
            largest = (
                row.token_ids.max() if row.kept_tokens is None else max(row.token_ids.max(), row.kept_tokens.max())
            )
            if vocabulary is not None and not 0 <= row.token_ids.min() <= largest < vocabulary:
                raise ConfigError(
                    f"{KEY}={recording.folder}: a row of group {row.group_id} has the token {largest}, and "
                    f"model.path has {vocabulary}: another tokenizer made it"
                )
            if chat is not None:
                _check_tokens(recording, row, chat)


def _check_tokens(recording: Recording, row: Trajectory, chat: ChatFormat) -> None:
    unread = row.loss_mask.copy()
    for turn in row.turns:
        place = slice(turn.start, turn.end)
        if turn.role != "assistant" or not row.loss_mask[place].any():
            continue
        unread[place] = False
        text = chat.turn_text(row.token_ids[place].tolist())
        if text != turn.text:
            raise ConfigError(
                f"{KEY}={recording.folder}: its tokens are not of the tokenizer of model.path, which reads an answer "
                f"of group {row.group_id} as {text[:80]!r}; {turn.text[:80]!r} was recorded"
            )
    if unread.any():
        raise ConfigError(
            f"{KEY}={recording.folder}: a row of group {row.group_id} has {unread.sum()} trained tokens without a "
            "recorded text, so nothing tells whether they are of the tokenizer of model.path"
        )
