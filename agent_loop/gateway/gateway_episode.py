"""An episode played by an agent program: engines answer its requests, and the sampled tokens become rows.

    messages ── prompt() ──> token ids ── an engine ──> result ── record() ──> rows

``EpisodeRecorder`` keeps a tree of conversations and cuts it into rows, without engine or clock. A request that
continues a recorded answer gets that answer's tokens and those of the new messages, so nothing that was sampled is ever
tokenised again. If the answer is the last of its row, the row goes on; otherwise a new row begins.

While an answer is being sampled, ``Release`` decides which part of it may be sent already: text that no further token
changes.
"""

import asyncio
import hashlib
import logging
import math
import re
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jinja2
import msgspec

from rl_async import tracing
from rl_async.agent_loop import telemetry
from rl_async.agent_loop.chat_formats.format import (
    Answer,
    CannotBridge,
    ChatFormat,
    Message,
    ParsedCall,
    SampledTurn,
    Settled,
    TooLong,
    Tools,
    before_stops,
    without_beginnings,
)
from rl_async.agent_loop.episode import RowTokens, Segment, kept_alternatives, policy_sampling, trajectories
from rl_async.agent_loop.gateway.chat import (
    ASSISTANT,
    OWN_TURN,
    ChatMessage,
    ChatRequest,
    Completion,
    FunctionCall,
    answered,
    history_keys,
    in_order_of_calls,
    not_supported,
    read_answer,
)
from rl_async.agent_loop.gateway.openai import PlainText
from rl_async.agent_loop.gateway.responses import KeptResponses
from rl_async.agent_loop.tools.tool_registry import task_tools
from rl_async.concurrency import off_loop
from rl_async.configs.derived import follows_json_schemas, unbounded
from rl_async.configs.schema.rollout import GatewayConfig, PastReasoning
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError, EngineLost, RequestRefused, SchemaRejected
from rl_async.messages import Activity, LeasedGroup, ToolCall, Trajectory, Turn, VersionRun
from rl_async.reward_loop.api import MOST_REASON, REWARD, too_many
from rl_async.rollout_server import json_schemas
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Image, Routes, StreamingGenerator
from rl_async.transfer_queue.images import MOST_IMAGES

# Patterns are searched for in so many characters of a message.
SEARCHED = 20_000
log = logging.getLogger("rl_async.gateway")

# Reading an answer decodes all of it, so it is read again only when it has grown by one in so many tokens.
READS = 64


@dataclass
class Conversation:
    """Answers to messages that begin alike, from its first request with the messages ``opening`` on.

    ``asked_after`` counts the episode's answers before that request, and ``last_answer`` is the number of the latest
    one, ``said``. It is ``finished`` if that answer was complete and called no tool.
    """

    asked_after: int
    opening: Sequence[ChatMessage]
    has_task: bool
    rows: set[int] = field(default_factory=set)
    answers: int = 0
    last_row: int = -1
    last_answer: int = -1
    said: str = ""
    finished: bool = False


class Conversations:
    """Collects the answers of an episode. ``task`` is a text of the task that the program was given; may be empty."""

    def __init__(self, task: str = "") -> None:
        self._task = task
        self._found: dict[bytes, Conversation] = {}
        self.recorded = 0

    def add(
        self, row: int, messages: Sequence[ChatMessage], said: ChatMessage, asked_after: int, *, finished: bool
    ) -> None:
        """Note an answer in ``row`` to ``messages``, which are empty for a bare prompt."""
        key = messages[0].identity() if messages else b""
        if (one := self._found.get(key)) is None:
            told = any(self._task in message.text for message in messages if message.role == "user")
            one = self._found[key] = Conversation(asked_after, messages, bool(self._task) and told)
        one.rows.add(row)
        one.answers += 1
        one.last_row, one.last_answer = row, self.recorded
        one.said, one.finished = said.text.strip(), finished and not said.calls
        self.recorded += 1

    def untrained(self, patterns: Sequence[str], output: str | None) -> list[Conversation]:
        """Return the conversations that are left out of training.

        They match one of ``patterns`` in the first message of the system or the user, or are certainly not part of the
        work (``_is_aside``). ``output`` is the program's output, if known.
        """
        named = [one for one in self._found.values() if _matches(one, patterns)]
        rest = [one for one in self._found.values() if one not in named]
        main = _main(rest)
        return [*named, *(one for one in rest if main is not None and _is_aside(one, main, output))]

    def rows_with(self, row: int) -> set[int]:
        """Return the rows of the conversation that has ``row``."""
        return next(one.rows for one in self._found.values() if row in one.rows)

    def scored_row(self, untrained: Sequence[Conversation], output: str | None) -> int:
        """Return the row with the answer that reward functions score: the main conversation's last one.

        If the main conversation ended with a call, as one does that hands over to another agent, the answer is that of
        the conversation that went on.
        """
        left = [one for one in self._found.values() if one not in untrained]
        printed = [one for one in left if output and one.said and one.said in output]
        main = _main(printed or left)
        assert main is not None, "the episode has an answer"
        while not main.finished:
            later = [one for one in left if one.asked_after > main.last_answer]
            if not later:
                break
            main = max(later, key=lambda one: one.last_answer)
        return main.last_row


def _main(conversations: Sequence[Conversation]) -> Conversation | None:
    """Return the first conversation with the most answers, preferring those that have the task."""
    return max(conversations, key=lambda one: (one.has_task, one.answers, -one.asked_after), default=None)


def _is_aside(one: Conversation, main: Conversation, output: str | None) -> bool:
    """Whether a conversation is certainly not part of the work.

    It began after the main conversation had finished and does not quote the answer that finished it. The program's
    output has the main conversation's last answer and not its own; if the output is unknown, it has fewer answers than
    the main conversation. Nothing is certain of bare prompts.
    """
    if not (main.opening and one.opening):
        return False
    if not main.finished or one.asked_after <= main.last_answer:
        return False
    if any(main.said and main.said in message.text for message in one.opening if message.role in ("system", "user")):
        return False
    if not output:
        return one.answers < main.answers and one.has_task <= main.has_task
    return bool(main.said) and main.said in output and not (one.said and one.said in output)


def _matches(one: Conversation, patterns: Sequence[str]) -> bool:
    texts = [next((m.text for m in one.opening if m.role == role), "")[:SEARCHED] for role in ("system", "user")]
    return any(re.search(pattern, text) for pattern in patterns for text in texts)


# The printed forms of so many sets of tools are remembered.
OFFERS = 256
_PROBE: tuple[Message, ...] = ({"role": "system", "content": "x"}, {"role": "user", "content": "y"})


class RecordedAnswer(NamedTuple):
    """Where a recorded answer ends: its row, and the row's tokens and turns up to there."""

    row: Segment
    tokens: int
    turns: int

    @property
    def newest(self) -> bool:
        """Whether the answer is the last thing in its row."""
        return self.tokens == len(self.row.tokens)


class Prompt(NamedTuple):
    """The tokens that an engine is to continue, their new ``turns``, and the recorded answer that they extend.

    ``offered`` is a hash of the tools as the chat format prints them. ``forced`` tokens open the answer without being
    sampled. ``asked_after`` counts the answers that were recorded before. ``images`` are those among the tokens.
    """

    token_ids: list[int]
    turns: list[Turn]
    continues: RecordedAnswer | None
    messages: Sequence[ChatMessage]
    tools: Tools
    offered: bytes
    forced: Sequence[int] = ()
    asked_after: int = 0
    images: Sequence[Image] = ()

    @property
    def given(self) -> list[int]:
        """All tokens that the engine is to continue."""
        return [*self.token_ids, *self.forced]


class _Given(NamedTuple):
    """The messages of a request, as the client sent them and as the chat template gets them, and its tools."""

    messages: Sequence[ChatMessage]
    shown: Sequence[ChatMessage]
    tools: Tools
    offered: bytes


class EpisodeRecorder:
    """The rows of one episode, in the order of their beginnings."""

    def __init__(self, chat: ChatFormat, past_reasoning: PastReasoning = "keep", task: str = "") -> None:
        """The main conversation is recognised by ``task``, a text of the task that the program has."""
        self._chat, self._past_reasoning = chat, past_reasoning
        self.rows: list[Segment] = []
        self.conversations = Conversations(task)
        # Answers by the key of the history that each ends.
        self._answers: defaultdict[bytes, list[RecordedAnswer]] = defaultdict(list)
        # Sampled texts by the identity of the answer that was returned for each.
        self._texts: dict[bytes, str] = {}
        # Hashes of tools as printed, by hashes of their JSON.
        self._offered: dict[bytes, bytes] = {}
        # Whether late system messages become the user's.
        self._recasts = False

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools, limit: int = sys.maxsize) -> Prompt:
        """Return the tokens of a conversation that the assistant is to continue; nothing is recorded yet.

        Raises jinja2.TemplateError for messages that the chat template rejects, and TooLong unless there are fewer than
        ``limit`` tokens.
        """
        # Read once, since several threads may be here.
        recasts = self._recasts
        try:
            return self._extend(messages, tools, limit, recasts)
        except jinja2.TemplateError:
            if recasts or list(messages) == _recast(messages):
                raise
        found = self._extend(messages, tools, limit, True)
        self._recasts = True
        return found

    def _extend(self, messages: Sequence[ChatMessage], tools: Tools, limit: int, recasts: bool) -> Prompt:
        given = _Given(messages, _recast(messages) if recasts else messages, tools, self._printed(tools, limit))
        known, answer = self._longest(messages, given.offered)
        if answer is not None and not self._continues(given, known - 1):
            known, answer = 0, None
        try:
            return self._prompt(given, limit, known, answer)
        except CannotBridge:
            return self._prompt(given, limit, 0, None)

    def _printed(self, tools: Tools, limit: int) -> bytes:
        """Hash the tools as the chat format prints them, so that a change that it does not print begins no row."""
        given = hashlib.sha256(msgspec.json.encode(tools, order="sorted")).digest()
        if (found := self._offered.get(given)) is None:
            if len(self._offered) >= OFFERS:
                self._offered.clear()
            found = self._offered[given] = self._probe(tools, limit) or given
        return found

    def _probe(self, tools: Tools, limit: int) -> bytes:
        # Some templates take no system message.
        for messages in (_PROBE, _PROBE[1:]):
            try:
                token_ids = self._chat.prompt(messages, tools, limit=limit)
            except jinja2.TemplateError:
                continue
            except TooLong:
                break
            return hashlib.sha256(msgspec.json.encode(token_ids)).digest()
        return b""

    def _prompt(self, given: _Given, limit: int, known: int, answer: RecordedAnswer | None) -> Prompt:
        messages, shown, tools, offered = given
        new, sampled = self._plain_messages(shown, known)
        images: list[Image] = []
        if answer is None:
            token_ids = self._chat.prompt(new, tools, sampled=sampled, limit=limit)
            token_ids, images = self._chat.expand(token_ids, new, limit=limit)
            turns = [_turn(m, 0, len(token_ids)) for m in new]
        else:
            token_ids = answer.row.tokens.token_ids[: answer.tokens]
            start = answer.row.turns[answer.turns - 1].start
            room = limit - answer.tokens
            more = self._chat.bridge(token_ids[:start], token_ids[start:], new, tools, sampled=sampled, limit=room)
            more, images = self._chat.expand(more, new, start=answer.tokens, limit=room)
            token_ids += more
            images = [image for image in answer.row.tokens.images if image.position < answer.tokens] + images
            turns = [_turn(m, answer.tokens, len(token_ids)) for m in new]
        recorded = self.conversations.recorded
        return Prompt(token_ids, turns, answer, messages, tools, offered, asked_after=recorded, images=images)

    def bare(self, given: str | list[int]) -> Prompt:
        """Return a prompt outside any conversation: token ids, or a text whose control tokens count as such."""
        token_ids = self._chat.encode(given) if isinstance(given, str) else given
        text = given if isinstance(given, str) else self._chat.turn_text(given)
        turns = [Turn(role="user", text=text, start=0, end=len(token_ids))]
        return Prompt(token_ids, turns, None, (), (), b"", asked_after=self.conversations.recorded)

    def record(
        self,
        prompt: Prompt,
        result: GenerateResult,
        said: ChatMessage,
        seconds: float = 0.0,
        malformed: Sequence[ParsedCall] = (),
        *,
        constrained: bool = False,
    ) -> None:
        """Record the tokens that an engine sampled after ``prompt``, and the answer that is returned for them.

        ``malformed`` are the broken calls in an answer that is returned as text. The tokens are ``constrained`` if a
        grammar's mask restricted the sampling.
        """
        row = self._row(prompt)
        start = len(row.tokens)
        row.tokens.add(prompt.forced)
        row.tokens.add_sampled(result, constrained=constrained)
        text = self._chat.turn_text([*prompt.forced, *result.token_ids])
        calls = [ToolCall(name=call.name, arguments=call.arguments) for call in said.calls]
        calls += [ToolCall(name="", arguments=call.raw, error="bad call", problem=call.problem) for call in malformed]
        row.turns.append(
            Turn(role=ASSISTANT, text=text, start=start, end=len(row.tokens), tool_calls=calls, seconds=seconds)
        )
        row.finish_reason = result.finish_reason
        # No conversation continues a bare prompt.
        if prompt.messages:
            key = history_keys([*prompt.messages, said], prompt.offered)[-1]
            self._answers[key].append(RecordedAnswer(row, len(row.tokens), len(row.turns)))
            self._texts[said.identity()] = text
        number = next(number for number, other in enumerate(self.rows) if other is row)
        self.conversations.add(
            number, prompt.messages, said, prompt.asked_after, finished=result.finish_reason == "stop"
        )

    def _longest(self, messages: Sequence[ChatMessage], offered: bytes) -> tuple[int, RecordedAnswer | None]:
        """Return the longest part of the history that ends with a recorded answer, in messages, and that answer.

        Among equal answers, the last one of a row is preferred, so that the row can go on.
        """
        keys = history_keys(messages, offered)
        for size in range(len(messages) - 1, 0, -1):
            if found := self._answers.get(keys[size - 1]):
                return size, next((answer for answer in reversed(found) if answer.newest), found[-1])
        return 0, None

    def _continues(self, given: _Given, place: int) -> bool:
        """Whether the answer at ``place`` stays in the context as it was sampled (``agent.past_reasoning``)."""
        if self._past_reasoning == "keep":
            return True
        if self._past_reasoning == "split":
            return False
        plain, sampled = self._plain_messages(given.shown)
        return self._chat.keeps_past(plain, place, given.tools, sampled=sampled)

    def _plain_messages(self, messages: Sequence[ChatMessage], start: int = 0) -> tuple[list[Message], set[int]]:
        """Convert the messages from ``start`` on for templates; say which of these were sampled in this episode."""
        calls = {place: call for place, (_, call) in answered(messages).items()}
        plain = [self._plain(message, calls.get(place)) for place, message in enumerate(messages[start:], start)]
        return plain, {place for place, message in enumerate(messages[start:]) if message.identity() in self._texts}

    def _row(self, prompt: Prompt) -> Segment:
        """Continue or start the row that the answer to ``prompt`` belongs to, and add the prompt's tokens."""
        before = prompt.continues
        if before is not None and before.newest:
            row = before.row
            new = [image for image in prompt.images if image.position >= before.tokens]
            row.tokens.add(prompt.token_ids[before.tokens :], new)
        else:
            turns = before.row.turns[: before.turns] if before is not None else []
            row = Segment(RowTokens(prompt.token_ids, prompt.images), list(turns))
            self.rows.append(row)
        row.turns += prompt.turns
        return row

    def _plain(self, message: ChatMessage, answers: FunctionCall | None) -> Message:
        """Convert for chat templates; an answer of this episode is written as it was sampled."""
        if message.role == ASSISTANT and (text := self._texts.get(message.identity())):
            return {"role": ASSISTANT, "content": text}
        plain: Message = {"role": message.role, "content": message.text}
        if message.images:
            plain["images"] = list(message.images)
        if answers is not None:
            plain["name"] = answers.name
        if call_id := (answers.id if answers is not None else "") or message.answers:
            plain["tool_call_id"] = call_id
        if message.calls:
            plain["tool_calls"] = [
                {"name": call.name, "arguments": call.arguments} | ({"id": call.id} if call.id else {})
                for call in message.calls
            ]
        return plain


def _recast(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Give system messages to the user, except those at the beginning, where every template takes them."""
    late = next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))
    rest = (msgspec.structs.replace(m, role="user") if m.role == "system" else m for m in messages[late:])
    return [*messages[:late], *rest]


def _turn(message: Message, start: int, end: int) -> Turn:
    calls = [ToolCall(name=call["name"], arguments=call["arguments"]) for call in message.get("tool_calls", ())]
    return Turn(role=message["role"], text=message["content"], start=start, end=end, tool_calls=calls)


def cut_at_stop(result: GenerateResult, stops: Sequence[str], chat: ChatFormat) -> GenerateResult:
    """Cut an answer after the token that completes a stop string.

    Whether it is cut there depends on earlier tokens only, so the result is a sample of the policy that stops at these
    strings.
    """

    def stopped(tokens: int) -> bool:
        text = chat.turn_text(result.token_ids[:tokens])
        return any(stop in text for stop in stops)

    if not stopped(len(result.token_ids)):
        return result
    low, high = 1, len(result.token_ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle + 1, high)
    routes, dropped = result.routes, len(result.token_ids) - low
    if routes is not None and dropped:
        routes = Routes(routes.start, routes.experts[: max(0, len(routes.experts) - dropped)])
    return msgspec.structs.replace(
        result,
        token_ids=result.token_ids[:low],
        logprobs=result.logprobs[:low],
        versions=[VersionRun(run.version, run.start, min(run.end, low)) for run in result.versions if run.start < low],
        routes=routes,
        finish_reason="stop",
    )


def stopped_by(result: GenerateResult, stops: Sequence[str], chat: ChatFormat) -> str:
    """Return the stop string at which ``cut_at_stop`` cut an answer, or an empty text."""
    text = chat.turn_text(result.token_ids) if stops else ""
    return min((stop for stop in stops if stop in text), key=text.find, default="")


class Reader(Protocol):
    """Reads sampled tokens: the part of a chat format that answers need."""

    def parse(self, turn: SampledTurn) -> Answer: ...
    def settled(self, turn: SampledTurn) -> Settled: ...


class Release:
    """The tokens of one answer so far, and the part that was sent. ``news`` is set when more tokens come."""

    def __init__(
        self, reader: Reader, prompt_ids: Sequence[int], request: ChatRequest, forced: Sequence[int] = ()
    ) -> None:
        self._reader, self._prompt_ids, self._request, self._forced = reader, prompt_ids, request, forced
        # The reasoning and the text that were sent.
        self._reasoning = self._text = ""
        self._tokens: Sequence[int] = ()
        self._read = 0
        self.news = asyncio.Event()

    def hear(self, token_ids: Sequence[int]) -> None:
        """Take all tokens sampled so far."""
        self._tokens = [*self._forced, *token_ids] if self._forced else token_ids
        self.news.set()

    def more(self) -> tuple[str, str]:
        """Return the reasoning and the text that may be sent now."""
        size = len(self._tokens)
        if size - self._read < max(1, self._read // READS):
            return "", ""
        self._read = size
        found = self._reader.settled(
            SampledTurn(self._tokens, self._prompt_ids, self._request.tools, self._request.stops)
        )
        reasoning = found.reasoning if self._request.reasoning else ""
        if not (reasoning.startswith(self._reasoning) and found.content.startswith(self._text)):
            # A stop string ended the answer before text that was sent; `check` decides at the end.
            return "", ""
        new = reasoning[len(self._reasoning) :], found.content[len(self._text) :]
        self._reasoning, self._text = reasoning, found.content
        return new

    def check(self, said: ChatMessage) -> None:
        """Release only the rest from now on. Raises RequestRefused unless the answer begins with the text sent."""
        self._tokens = ()
        if not (said.text.startswith(self._text) and said.reasoning.startswith(self._reasoning)):
            raise RequestRefused(
                "the end of the answer changed the text before it (bytes that are no text); send the request again",
                code="unreadable_answer",
                status=503,
            )

    def rest(self, said: ChatMessage) -> tuple[str, str]:
        """Return the reasoning and the text of the whole answer that were not sent yet."""
        return said.reasoning[len(self._reasoning) :], said.text[len(self._text) :]


ID_BYTES = 16
# If the model's name ends with this in a request, the answer is not trained on.
UNTRAINED = "untrained"


class Asked(NamedTuple):
    """A request that may be answered. A ``bare`` prompt is not a conversation."""

    request: ChatRequest
    prompt: Prompt
    number: int
    bare: bool


class GatewayEpisode:
    """A leased sample that an agent program plays. ``id`` is a secret: a client that knows it can act in the episode.
    ``name`` is not: it is the sample and its attempt as GROUP.SAMPLE.ATTEMPT.

    Raises UserError for a task whose tools do not exist or are code that the config does not list.
    """

    def __init__(
        self,
        group: LeasedGroup,
        sample: int,
        *,
        config: RunConfig,
        chat: ChatFormat,
        generator: StreamingGenerator,
        max_answers: int,
    ) -> None:
        self.id = secrets.token_urlsafe(ID_BYTES)
        self.group, self.sample = group, sample
        # The program may run these tools; the gateway runs none.
        self.tools = task_tools(config, group.task)
        self.responses = KeptResponses()
        self.closed = False
        # Tokens by kind of conversation (`telemetry.CONVERSATIONS`), once the episode has ended.
        self.sampled: Counter[str] = Counter()
        # The error of the latest request, if no engine answered it.
        self.lost = ""
        self.ending = asyncio.Lock()
        self.began, self.traced_from = time.monotonic(), tracing.now()
        self.name = f"{group.group_id}.{sample}.{group.attempt}"
        self.trace = group.trace(sample)
        self._model = config.model.path
        self._chat, self._generator, self._max_answers = chat, generator, max_answers
        # A program sends on the user's last message of the prompt.
        said = [message["content"] for message in group.task.prompt if message["role"] == "user"]
        task = str(said[-1]).strip() if said else ""
        self._recorder = EpisodeRecorder(chat, config.agent.past_reasoning, task)
        self._left_out = (config.agent.gateway or GatewayConfig()).untrained
        unprinted = config.agent.unprinted_tools == "refuse" and not chat.prints_tools
        self._refuses_tools = unprinted or chat.name == "plain"
        self._follows_schemas = follows_json_schemas(config) and chat.plain_turns
        self._refuses_fields = (config.agent.gateway or GatewayConfig()).unsupported == "refuse"
        self._sampling = policy_sampling(config, group.partition)
        # Programs may request this in held-out episodes, too.
        self._train_sampling = policy_sampling(config, "train")
        self._limit = min(config.agent.max_tokens, config.rollout.max_model_len)
        self._max_tokens = config.rollout.max_tokens
        self._requests = self._answers = self._in_flight = 0
        self._heard = self.began
        self._generate_s = 0.0
        self._activities: list[Activity] = []

    def heard(self) -> None:
        """Note a sign of life of the program."""
        self._heard = time.monotonic()

    def excuse(self, seconds: float, now: float) -> None:
        """Take a pause of this process until ``now``, when it could not hear the program, off the episode's time."""
        self.began = min(now, self.began + seconds)
        self._heard = min(now, self._heard + seconds)

    def idle_s(self, now: float) -> float:
        """Return for how many seconds the program has given no sign of life; 0 while it waits for an answer."""
        return 0.0 if self._in_flight else now - self._heard

    def summary(self, now: float) -> dict[str, Any]:
        """Return the episode's entry in a listing."""
        return {
            "episode": self.name,
            "task_id": self.group.task.task_id,
            "partition": self.group.partition,
            "age_s": now - self.began,
            "idle_s": self.idle_s(now),
            "answers": self._answers,
        }

    async def complete(self, request: ChatRequest, *, train: bool = True) -> Completion:
        """Return the policy's answer; see ``answer``."""
        return await self.answer(await self.prepare(request), train=train)

    async def prepare(self, request: ChatRequest, bare: str | list[int] | None = None) -> Asked:
        """Make the prompt of a request: its messages, or a ``bare`` prompt without a template.

        Raises RequestRefused for unsupported requests.
        """
        self.heard()
        self._check_open()
        self._check_number()
        if bare is None:
            self._check_messages(request)
        request = await self._without_unfollowed(request)
        number = self._requests
        self._requests += 1
        return Asked(request, await self._prompt(request, bare, self._limit), number, bare is not None)

    async def count(self, request: ChatRequest) -> int:
        """Return the number of tokens that the prompt of a request would have. Raises RequestRefused."""
        self.heard()
        self._check_open()
        self._check_messages(request)
        return len((await self._prompt(request, None, sys.maxsize)).given)

    @property
    def images(self) -> dict[str, bytes]:
        """The images that its rows refer to, by hash."""
        return {image.sha256: image.data for row in self._recorder.rows for image in row.tokens.images}

    def release(self, asked: Asked) -> Release:
        """Return the answer's ``Release`` for the time that it is sampled."""
        return Release(self._reader(asked), asked.prompt.token_ids, asked.request, asked.prompt.forced)

    async def answer(self, asked: Asked, *, train: bool = True, release: Release | None = None) -> Completion:
        """Return the policy's answer, and record it if the episode is still open and it is to ``train``.

        ``release`` hears the tokens while they are sampled. Raises EngineRejected or EngineLost if no engine answers.
        """
        request, prompt = asked.request, asked.prompt
        self._check_open()
        self._check_number()
        generate = self._generate(request, prompt, asked.number)
        self._in_flight += 1
        began, at = time.monotonic(), time.time()
        try:
            with telemetry.of_chat(self.trace, self._model, generate) as told:
                heard = {} if release is None else {"heard": release.hear}
                result = await self._generator.generate(generate, session=self.name, **heard)
                told(result)
                self.lost = ""
        except EngineLost as error:
            self.lost = str(error)
            raise
        except SchemaRejected as error:
            if request.format is None:
                raise
            raise request.format.refused(str(error)) from error
        finally:
            self._in_flight -= 1
            self.heard()
        seconds = time.monotonic() - began
        if self.closed:
            raise RequestRefused("the episode ended before this answer was complete", code="episode_ended", status=404)
        engine = result.engine
        result = cut_at_stop(result, request.stops, self._chat)
        answer = self._reader(asked).parse(
            SampledTurn([*prompt.forced, *result.token_ids], prompt.token_ids, request.tools, request.stops)
        )
        said = read_answer(answer, tools=bool(request.tools))
        if release is not None:
            release.check(said)
        malformed = [call for call in answer.calls if call.problem] if request.tools else []
        if train and not request.model.endswith(UNTRAINED):
            constrained = bool(generate.json_schema)
            self._recorder.record(prompt, result, said, seconds, malformed, constrained=constrained)
        self._answers += 1
        self._generate_s += seconds
        self._activities.append(Activity("generate", engine, at, seconds))
        return Completion(
            asked.number,
            said if request.reasoning else msgspec.structs.replace(said, reasoning=""),
            "stop" if result.finish_reason == "stop" else "length",
            len(prompt.given),
            len(result.token_ids),
            stopped_by(result, request.stops, self._chat),
        )

    def _reader(self, asked: Asked) -> Reader:
        return PlainText(self._chat) if asked.bare else self._chat

    async def unobeyed(self, request: ChatRequest) -> dict[str, Any]:
        """Return the fields of a request that ask for other sampling than the run's. Raises RequestRefused for a
        schema that is too large, and one that cannot be followed if such fields are to be refused."""
        found = dict((await self._without_unfollowed(request)).unobeyed)
        for name in ("temperature", "top_p"):
            wanted, known = getattr(request, name), [getattr(s, name) for s in (self._sampling, self._train_sampling)]
            if wanted is not None and not any(math.isclose(wanted, value) for value in known):
                found[name] = wanted
        if request.forces is not None and not self._forced(request):
            found["tool_choice"] = request.forces or "required"
        return found

    def _forced(self, request: ChatRequest) -> list[int]:
        """Return the opening of an answer that must be a call, or nothing if the chat format cannot say.

        Return nothing, too, if a stop string may begin in the opening, since only sampled ones end an answer. The rest
        is sampled from the policy's own distribution, without a mask, and only that is trained.
        """
        if request.forces is None:
            return []
        opening = self._chat.call_opening(request.forces)
        text = self._chat.turn_text(opening).rstrip()
        return opening if without_beginnings(before_stops(text, request.stops), request.stops) == text else []

    async def _without_unfollowed(self, request: ChatRequest) -> ChatRequest:
        """Return the request without a JSON format that engines cannot follow; its field then counts as unobeyed.

        They cannot where the answer may be something else, a call of an offered tool or reasoning before it, and where
        llguidance does not know a keyword. Raises RequestRefused as ``unobeyed`` does.
        """
        asked = request.format
        if asked is None:
            return request
        if self._follows_schemas and not request.tools:
            problem = await asyncio.to_thread(json_schemas.problem, asked.schema)
            if not problem:
                return request
            if self._refuses_fields or json_schemas.beyond_bounds(asked.schema):
                raise asked.refused(problem)
            log.info("%s: %s is ignored: %s", self.name, asked.place, problem)
        return request._replace(format=None, unobeyed={**request.unobeyed, asked.field: asked.given})

    def _check_open(self) -> None:
        """Refuse requests while the episode is scored or given back, since nobody would record the answer."""
        if self.closed:
            raise RequestRefused("this episode is being ended", code="episode_ended", status=404)

    def _check_number(self) -> None:
        if self._answers + self._in_flight >= self._max_answers:
            raise RequestRefused(
                f"this episode has used up its {self._max_answers} answers (agent.gateway.max_answers)",
                code="too_many_answers",
            )

    def _check_messages(self, request: ChatRequest) -> None:
        if not request.messages:
            raise RequestRefused("there are no messages", code="invalid_request", param=request.conversation)
        if request.messages[-1].role == ASSISTANT:
            raise not_supported("prefill", OWN_TURN, request.conversation)
        if sum(len(message.images) for message in request.messages) > MOST_IMAGES:
            raise RequestRefused(
                f"there are more than {MOST_IMAGES} images", code="invalid_request", param=request.conversation
            )
        if request.tools and self._refuses_tools:
            raise RequestRefused(
                "the model's chat template prints no tools, or its calls cannot be read; put the tools into the "
                "messages, or see agent.unprinted_tools and agent.chat_format (docs/reference/chat_formats.md)",
                code="unsupported_value",
                param="tools",
            )

    async def _prompt(self, request: ChatRequest, bare: str | list[int] | None, limit: int) -> Prompt:
        try:
            # Every message is printed as some token.
            if len(request.messages) > limit:
                raise TooLong(len(request.messages))
            if bare is not None:
                prompt = await off_loop(len(bare), self._recorder.bare, bare)
                if len(prompt.token_ids) >= limit:
                    raise TooLong(len(prompt.token_ids))
                return prompt
            # A message takes time, too, and those of a conversation that is kept here are not in the body.
            size = request.size + sum(len(message.text) + 100 for message in request.messages)
            forced = self._forced(request)
            if self._chat.pictures is not None:
                await self._chat.pictures.check([image for message in request.messages for image in message.images])

            def make() -> Prompt:
                return self._recorder.prompt(in_order_of_calls(request.messages), request.tools, limit - len(forced))

            return (await off_loop(size, make))._replace(forced=forced)
        except TooLong as error:
            raise RequestRefused(
                f"the messages have {error} and leave no room within {limit} (agent.max_tokens, rollout.max_model_len)",
                code="context_length_exceeded",
                param=request.conversation,
            ) from None
        # An image is damaged, or the model or its template reads none.
        except DataError as error:
            raise RequestRefused(str(error), code="invalid_request", param=request.conversation) from error
        except jinja2.TemplateError as error:
            raise RequestRefused(
                f"the chat template rejects these messages: {error}", code="invalid_request", param=request.conversation
            ) from error

    def _generate(self, request: ChatRequest, prompt: Prompt, number: int) -> GenerateRequest:
        given = prompt.given
        room = min(self._max_tokens, self._limit - len(given))
        return GenerateRequest(
            request_id=(name := f"{self.name}.{number}"),
            traceparent=tracing.traceparent(self.trace, name),
            token_ids=given,
            images=list(prompt.images),
            sampling=self._sampling,
            alternatives=kept_alternatives(self._sampling, self.group.partition),
            max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
            stop_token_ids=self._chat.stop_token_ids,
            min_version=self.group.min_version,
            json_schema=request.format.schema if request.format is not None else "",
        )

    def trajectories(self, output: str | None = None) -> tuple[list[Trajectory], int]:
        """Return the rows to train on, without rewards, and the index of the row with the answer to score.

        ``output`` is the program's output, if known.
        """
        conversations, recorded = self._recorder.conversations, self._recorder.rows
        untrained = conversations.untrained(self._left_out, output)
        left_out = {row for conversation in untrained for row in conversation.rows}
        kept = [number for number in range(len(recorded)) if number not in left_out]
        if not kept:
            return [], -1
        scored = kept.index(conversations.scored_row(untrained, output))
        main = conversations.rows_with(kept[scored])
        self.sampled = Counter()
        for number, row in enumerate(recorded):
            kind = "left_out" if number in left_out else "main" if number in main else "other"
            self.sampled[kind] += row.tokens.sampled
        timings = {"generate": self._generate_s, "total": time.monotonic() - self.began}
        rows = trajectories(
            [recorded[number] for number in kept],
            self.group,
            self.sample,
            episode_id=self.name,
            sampling=self._sampling,
            timings=timings,
        )
        rows[scored].activities = self._activities
        return rows, scored


def give_reward(
    rows: list[Trajectory], reward: float, parts: Mapping[str, float], reasons: Mapping[str, str], limit: float
) -> None:
    """Set the agent program's own reward on every row, with the beginnings of the reasons for it and its parts.

    Raises RequestRefused for numbers beyond ``limit``, a part with the name of the whole, and a reason without a part.
    """
    if REWARD in parts:
        raise RequestRefused(
            f"parts: {REWARD!r} is the name of the whole; give this part another", code="invalid_request", param="parts"
        )
    if unknown := sorted(reasons.keys() - parts.keys() - {REWARD}):
        names = ", ".join([REWARD, *sorted(parts)])
        raise RequestRefused(
            f"reasons: {unknown[0][:80]!r} is none of {names}", code="invalid_request", param="reasons"
        )
    if problem := too_many(parts) or unbounded(parts, limit):
        raise RequestRefused(f"parts: {problem}", code="invalid_request", param="parts")
    if problem := unbounded({REWARD: reward}, limit):
        raise RequestRefused(problem, code="invalid_request", param="reward")
    for row in rows:
        row.reward, row.reward_parts = reward, dict(parts)
        row.reward_reasons = {part: reason[:MOST_REASON] for part, reason in reasons.items() if reason}


def task_view(episode: GatewayEpisode) -> dict[str, Any]:
    """Return the part of a task that its agent program sees."""
    task = episode.group.task
    return {
        "task_id": task.task_id,
        "data_source": task.data_source,
        "partition": episode.group.partition,
        "prompt": task.prompt,
        "ground_truth": task.ground_truth,
        "tools": [tool.schema for tool in episode.tools],
        "extra": task.extra,
    }
