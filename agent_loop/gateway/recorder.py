"""Records the sampled tokens of one episode: a tree of conversations, cut into rows. Pure: no engine, no clock.

    messages ── prompt() ──> token ids ── an engine ──> result ── record() ──> rows

A request that continues a recorded answer gets that answer's tokens and those of the new messages, so nothing that was
sampled is ever tokenised again. If the answer is the last of its row, the row goes on; otherwise a new row begins.
"""

import hashlib
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jinja2
import msgspec

from rl_async.agent_loop.chat_formats.format import CannotBridge, ChatFormat, Message, ParsedCall, TooLong
from rl_async.agent_loop.gateway.chat import ASSISTANT, ChatMessage, FunctionCall, answered, history_keys
from rl_async.agent_loop.row_tokens import RowTokens, Segment
from rl_async.configs.schema.rollout import PastReasoning
from rl_async.messages import ToolCall, Turn, VersionRun
from rl_async.rollout_server.api import GenerateResult, Image, Routes

# Patterns are searched for in so many characters of a message.
SEARCHED = 20_000


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
    tools: Sequence[dict[str, Any]]
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
    tools: Sequence[dict[str, Any]]
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

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], limit: int = sys.maxsize
    ) -> Prompt:
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

    def _extend(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], limit: int, recasts: bool
    ) -> Prompt:
        given = _Given(messages, _recast(messages) if recasts else messages, tools, self._printed(tools, limit))
        known, answer = self._longest(messages, given.offered)
        if answer is not None and not self._continues(given, known - 1):
            known, answer = 0, None
        try:
            return self._prompt(given, limit, known, answer)
        except CannotBridge:
            return self._prompt(given, limit, 0, None)

    def _printed(self, tools: Sequence[dict[str, Any]], limit: int) -> bytes:
        """Hash the tools as the chat format prints them, so that a change that it does not print begins no row."""
        given = hashlib.sha256(msgspec.json.encode(tools, order="sorted")).digest()
        if (found := self._offered.get(given)) is None:
            if len(self._offered) >= OFFERS:
                self._offered.clear()
            found = self._offered[given] = self._probe(tools, limit) or given
        return found

    def _probe(self, tools: Sequence[dict[str, Any]], limit: int) -> bytes:
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
