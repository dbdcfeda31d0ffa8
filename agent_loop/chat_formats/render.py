"""Chat messages to token ids, one turn at a time, so that sampled tokens are never encoded again.

``TokenizerFormat`` is the part that all formats share: it encodes, decodes, caches tokens (the samples of a group share
their prompt) and compares itself with the tokenizer's chat template. ``ChatRenderer`` prints prompts with
that template. It renders a tool result after a placeholder conversation and encodes only the text that this adds, so
the tokens sampled before it stay as they are.

``PrintedParts`` refuses conversations with parts that a template leaves out: tools, calls, reasoning, the content of a
role. Demonstrations and prompts of tasks are checked by the same code. Trained on such a demonstration, a model learns
to end its turn where a call was; after such a prompt it answers another question than the one that is scored.
"""

import json
import re
import sys
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jinja2
import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import (
    HERMES,
    THINK_END,
    THINK_START,
    Answer,
    CallSyntax,
    ChatFormat,
    Message,
    SampledTurn,
    Settled,
    TooLong,
    Tools,
    before_stops,
    flat_calls,
    split_reasoning,
    text_size,
    with_names,
    without_beginnings,
)
from rl_async.errors import DataError
from rl_async.messages import Task
from rl_async.pictures import PictureProcessor
from rl_async.rollout_server.api import Image
from rl_async.template_tokens import MISFITS, TemplateTokens, bounded, encode, ending
from rl_async.transfer_queue.images import as_parts, images_of, mime_of, without_bytes

# Data sets have the reasoning of a turn under such keys, or as part of its content, up to this tag.
_REASONING = re.compile("reasoning|thinking|thought")
_THOUGHT = "</think>"

# The size of an int in a tuple: the object and the pointer to it.
TOKEN_BYTES = 36
ToolList = list[dict[str, Any]]


class PrintedParts:
    """Checks conversations with one template; ``render`` prints messages and tools with it."""

    def __init__(self, render: Callable[[list[Message], ToolList], str]) -> None:
        self._render = render
        # Shapes of conversations that the template prints completely.
        self._complete: set[str] = set()

    def check(self, messages: Sequence[Message], tools: ToolList, place: str) -> None:
        """Raise DataError, naming ``place`` and the message, for a part that the template leaves out.

        The check prints a conversation of the same shape with a mark in each place, once for all of that shape.
        """
        shape = _shape(messages, tools)
        if shape in self._complete:
            return
        marked, offered, marks = _with_marks(messages, tools)
        printed = self._render(marked, offered)
        for mark, part, problem in marks:
            if mark not in printed:
                raise DataError(f"{place}{part}: the chat template does not print {problem}")
        self._complete.add(shape)


def check_prompts(tasks: Iterable[tuple[str, Task]], load: Callable[[], ChatFormat]) -> None:
    """Raise DataError, naming the place, for the first prompt with a part that the chat format leaves out.

    The format is only loaded for a prompt with more than texts of the user, which every template prints. Tools are the
    format's own check.
    """
    parts: PrintedParts | None = None
    for place, task in tasks:
        if all(message["role"] == "user" and message.keys() == {"role", "content"} for message in task.prompt):
            continue
        if parts is None:
            chat = load()
            parts = PrintedParts(lambda messages, tools, chat=chat: _prompt_text(chat, messages))  # type: ignore[misc]
        try:
            parts.check(task.prompt, [], place)
        except (jinja2.TemplateError, *MISFITS) as error:
            raise DataError(f"{place}: the model's chat template refuses it: {error}") from error


def _prompt_text(chat: ChatFormat, messages: list[Message]) -> str:
    return chat.turn_text(chat.prompt(with_names(messages)))


class _Mark(NamedTuple):
    """A text that a template must print, its place in a conversation, and the error if it is missing."""

    text: str
    place: str
    problem: str


def _shape(messages: Sequence[Message], tools: ToolList) -> str:
    """Describe which parts the messages of a conversation have; conversations of one shape are printed alike."""
    parts = [
        (
            message["role"],
            bool(message["content"].strip()),
            _THOUGHT in message["content"],
            [bool(call["function"]["arguments"]) for call in message.get("tool_calls", ())],
            _reasoning(message),
        )
        for message in messages
    ]
    return json.dumps([parts, [sorted(tool) for tool in tools]])


def _reasoning(message: Message) -> list[str]:
    return [key for key in message if _REASONING.match(key) and message[key]]


def _with_marks(messages: Sequence[Message], tools: ToolList) -> tuple[list[Message], ToolList, list[_Mark]]:
    """Return the conversation with marks in place of contents, reasoning, calls and tools, and these marks."""
    marks: list[_Mark] = []

    def mark(kind: str, place: str, problem: str) -> str:
        marks.append(_Mark(f"zq{len(marks)}{kind}", place, problem))
        return marks[-1].text

    offered = []
    for tool in tools:
        named = {"name": mark("tool", "", "tools; leave them out, or take a model whose template does")}
        offered.append(tool | ({"function": tool["function"] | named} if "function" in tool else named))
    marked, shorter = [], "leave it out, or let the row end with this turn"
    for number, message in enumerate(messages):
        place, role = f", message {number}", message["role"]
        made = {key: value for key, value in message.items() if key != "images"}
        if message["content"].strip():
            made["content"] = mark("content", place, f"a {role} message; change its role, or leave it out")
            if _THOUGHT in message["content"]:
                thought = mark("thought", place, f"the reasoning of this turn; {shorter}")
                made["content"] = f"<think>\n{thought}\n{_THOUGHT}\n\n{made['content']}"
        for key in _reasoning(message):
            made[key] = mark("reasoning", place, f"{key}, the reasoning of this turn; {shorter}")
        if calls := message.get("tool_calls"):
            hint = "the tool calls of this turn; write them into its content, as the model is to write them"
            made["tool_calls"] = []
            for call in calls:
                name, value = mark("name", place, hint), mark("value", place, hint)
                function = call["function"] | {"name": name, "arguments": {f"{value}key": value}}
                made["tool_calls"].append(call | {"function": function})
        marked.append(made)
    return marked, offered, marks


class TokenCache:
    """An LRU cache, for any thread, of up to ``max_bytes`` of token ids, by the text that they encode."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.bytes = max_bytes, 0
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> tuple[int, ...] | None:
        with self._lock:
            if (found := self._known.get(key)) is not None:
                self._known.move_to_end(key)
            return found

    def put(self, key: bytes, token_ids: tuple[int, ...]) -> None:
        """Keep tokens, unless they alone would fill the cache."""
        size = _size(key, token_ids)
        with self._lock:
            if key in self._known or size > self._max_bytes:
                return
            self._known[key] = token_ids
            self.bytes += size
            while self.bytes > self._max_bytes:
                self.bytes -= _size(*self._known.popitem(last=False))


def _size(key: bytes, token_ids: tuple[int, ...]) -> int:
    return len(key) + TOKEN_BYTES * len(token_ids)


CACHE_BYTES = 64 << 20
# A template is watched for endless loops while it prints its first conversations, except for longer ones than this:
# they take their time, and an endless template would hang on short ones, too.
WATCHED, WATCHED_BYTES = 20, 10_000
# Stands for the reasoning of a turn.
_MARK = "reasoningmark"
TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}


class TokenizerFormat(ABC):
    """The part of a `ChatFormat` that only depends on the tokenizer. The text of messages is encoded as plain text."""

    stop_token_ids: list[int]

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer, self._renders = tokenizer, 0
        # Set for models that read images.
        self.pictures: PictureProcessor | None = None
        self._backend = tokenizer.backend_tokenizer
        self.cache = TokenCache(cache_bytes)
        self.template_tokens = TemplateTokens(tokenizer)
        probe: list[Message] = [{"role": "user", "content": "x"}]
        self.prints_tools = self._render(probe, [TOOL], generate=True) != self._render(probe, (), generate=True)
        self.plain_turns = False

    def _render_prompt(
        self, messages: list[Message], tools: list[Any], sampled: list[int], limit: int
    ) -> tuple[int, ...]:
        """Encode a conversation and the opening of the assistant's turn; may raise TooLong beyond ``limit`` tokens."""
        printed = self._render(self._escaped(messages, sampled), self.template_tokens.escape(tools), generate=True)
        return self._encode_printed(printed, limit)

    @abstractmethod
    def parse(self, turn: SampledTurn) -> Answer:
        """Read a turn up to the first of its stop strings."""

    def settled(self, turn: SampledTurn) -> Settled:
        """Settle nothing before the end of the turn."""
        return Settled()

    def call_opening(self, name: str = "") -> list[int]:
        """Return nothing, since the opening of a call is unknown."""
        return []

    @abstractmethod
    def _written(self, message: Message, *, sampled: bool) -> Message:
        """Convert a message, whose calls are `flat_calls`, for the template.

        The content of a sampled one is the text as it was sampled.
        """

    def encode(self, text: str) -> list[int]:
        """Encode text of the policy: special tokens count as such, and none are added."""
        return encode(self._backend, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ``token_ids``, keeping special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Decode an assistant's sampled tokens, without the token that ended the turn."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self.decode(token_ids[:-1] if ended else token_ids)

    def prompt(
        self, messages: Sequence[Message], tools: Tools = (), *, sampled: Collection[int] = (), limit: int = sys.maxsize
    ) -> list[int]:
        """Encode the conversation so far and the opening of the assistant's turn. ``tools`` are JSON schemas.

        ``sampled``: positions of the messages that the policy sampled in this episode. Raises TooLong unless there are
        fewer than ``limit`` tokens.
        """
        given = without_bytes(messages), tools, sorted(sampled)
        return self._within(limit, messages, given, self._render_prompt)

    def expand(
        self, token_ids: list[int], messages: Sequence[Message], *, start: int = 0, limit: int = sys.maxsize
    ) -> tuple[list[int], list[Image]]:
        """Put the tokens of the images of ``messages`` in place of their marks; return all tokens, and the images.

        Positions count from ``start``. Raises TooLong unless there are fewer than ``limit`` tokens, and DataError for
        images that the model or its chat template does not read.
        """
        found = images_of(messages)
        if not found:
            return token_ids, []
        assert self.pictures is not None, "the messages were printed, so the model reads images"
        expanded, positions = self.pictures.expand(token_ids, found)
        if len(expanded) >= limit:
            raise TooLong(len(expanded))
        return expanded, [Image.of(data, mime_of(data), start + at) for data, at in zip(found, positions, strict=True)]

    def keeps_past(
        self, messages: Sequence[Message], place: int, tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> bool:
        """Whether ``prompt`` still prints the turn sampled at ``place``, and all before it, as when it was sampled.

        False if the chat template leaves out reasoning of earlier turns by now, or the empty one that opened a turn.
        """
        before = self.prompt(messages[:place], tools, sampled=[p for p in sampled if p < place])
        said, marked = messages[place]["content"], [*messages]
        reasoning = self._reasoning(said, before)
        if reasoning:
            places = [at for at in range(len(said)) if said.startswith(reasoning, at)]
            texts = (f"{said[:at]}{_MARK}{said[at + len(reasoning) :]}" for at in places)
            text = next((text for text in texts if self._reasoning(text, before) == _MARK), said)
            marked[place] = messages[place] | {"content": text}
        start, now = self.decode(before), self.decode(self.prompt(marked, tools, sampled=sampled))
        return now.startswith(start) and (not reasoning or _MARK in now[len(start) :])

    def _reasoning(self, said: str, before: Sequence[int]) -> str:
        return self.parse(SampledTurn(self.encode(said), before)).reasoning.strip()

    def _within(
        self, limit: int, messages: Sequence[Message], given: Any, render: Callable[..., tuple[int, ...]]
    ) -> list[int]:
        """Encode the arguments ``given`` to ``render``, or return the cached tokens. Too long ones are not cached."""
        least = text_size(messages) // self.template_tokens.longest_token
        if least >= limit:
            raise TooLong(least)
        key = msgspec.json.encode(given)
        token_ids = self.cache.get(key)
        if token_ids is None:
            token_ids = render(*msgspec.json.decode(key), limit)
        if len(token_ids) >= limit:
            raise TooLong(len(token_ids))
        self.cache.put(key, token_ids)
        return list(token_ids)

    def _encode_printed(self, printed: str, limit: int, after: str = "") -> tuple[int, ...]:
        """Encode as ``encode_printed`` does. Raises TooLong if the size of the text already exceeds the limit."""
        least = self.template_tokens.least(printed)
        if least >= limit:
            raise TooLong(least)
        return tuple(self.encode_printed(printed, after))

    def cut(self, text: str, tokens: int) -> str:
        """Cut a tool's text to ``tokens`` tokens, between characters; only as much is encoded as they can hold."""
        # No token is shorter than a byte.
        if len(text.encode(errors="replace")) <= tokens:
            return text
        text = text[: tokens * self.template_tokens.longest_token]
        token_ids = self.template_tokens.encode_outside(text)
        return text if len(token_ids) <= tokens else self.decode(token_ids[:tokens]).rstrip("\ufffd")

    def encode_printed(self, text: str, after: str = "") -> list[int]:
        """Encode escaped messages as the chat template printed them, after a special token with the text ``after``.

        Some tokenizers put a space before a text, and others not behind special tokens.
        """
        if not after:
            return self.template_tokens.encode(text)
        before = self.template_tokens.encode(after)
        token_ids = self.template_tokens.encode(after + text)
        if token_ids[: len(before)] != before:
            raise ValueError(f"{after!r} is not encoded by itself")
        return token_ids[len(before) :]

    def check(
        self, messages: Sequence[Message], token_ids: Sequence[int], tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> int | None:
        """Return the position of the first token that departs from the full chat template's text; None if all agree.

        Texts are compared rather than ids, because a model may spell a text with other tokens than the tokenizer does;
        so text of the format's own that is split into other tokens than the template's passes, too.
        """
        printed = self._render(self._escaped(messages, sampled), self.template_tokens.escape(tools), generate=False)
        expected = self.decode(self.expand(self.template_tokens.encode(printed), messages)[0])
        actual = self.decode(token_ids)
        if expected.startswith(actual):
            return None
        agreed = next((i for i, (a, b) in enumerate(zip(expected, actual)) if a != b), min(len(expected), len(actual)))
        low, high = 0, len(token_ids) - 1
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(token_ids[: middle + 1])) > agreed:
                high = middle
            else:
                low = middle + 1
        return low

    def _render(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str:
        """Print messages by the chat template. Raises jinja2.TemplateError if it cannot print them."""
        self._renders += 1
        try:
            # Formats are told apart by the first messages. Tracing makes printing several times slower.
            watched = self._renders <= WATCHED and len(msgspec.json.encode([*messages, *tools])) <= WATCHED_BYTES
            with ending(self._tokenizer) if watched else nullcontext():
                text = self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
                )
        # A message, call or tool does not have the form that the template expects.
        except MISFITS as error:
            raise jinja2.TemplateError(str(error)) from error
        return bounded(self._tokenizer, str(text)) if watched else str(text)

    def _escaped(self, messages: Sequence[Message], sampled: Collection[int]) -> list[Message]:
        if self.pictures is None and any(m.get("images") for m in messages):
            raise DataError("the conversation has images, and the model of model.path reads text only")
        flat = [m | {"tool_calls": flat_calls(m)} if m.get("tool_calls") else m for m in messages]
        written = [as_parts(self._written(m, sampled=place in sampled)) for place, m in enumerate(flat)]
        return [m if place in sampled else self.template_tokens.escape(m) for place, m in enumerate(written)]


# The assistant's text in the placeholder conversation.
_ANSWER_MARK = "rendermark"
# A call of this function shows how the template prints calls.
_PROBE, _PROBE_ID = "probe", "callid012"
_KEY = "probekey"
# Names of functions that no template has to escape.
_NAME = re.compile(r"[\w.-]{0,256}")
# An open <think> is searched for in so many tokens at the end of a prompt.
_TAIL = 16


class ChatRenderer(TokenizerFormat):
    """The chat format that follows a tokenizer's own chat template, with calls in ``syntax``.

    Raises ValueError for a template that alters an assistant's text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        name: str = "hermes",
        syntax: CallSyntax = HERMES,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(tokenizer, cache_bytes)
        self.name, self._syntax = name, syntax
        self._thinks = "</think>" in str(tokenizer.chat_template)
        self.plain_turns = not self._thinks
        self._takes_text = takes_arguments_as_text(self._print_past)
        self._printed_call = self.printed_call()
        self._prints_calls = _PROBE in self._printed_call
        closing = self._after_mark([])
        first = self.encode(closing.lstrip())[:1]
        if not first or first[0] not in tokenizer.added_tokens_decoder:
            raise ValueError(f"the chat template ends an assistant's turn with {closing!r}, not with a special token")
        self.end_of_turn: int = first[0]
        self._end_text = tokenizer.added_tokens_decoder[first[0]].content
        # Llama 2's template prints a space before the token that ends a turn.
        self._closing = closing[: closing.index(self._end_text)] + self._end_text
        self.stop_token_ids = sorted({self.end_of_turn, tokenizer.eos_token_id or self.end_of_turn})

    def printed_call(self) -> str:
        """Return a call as the template prints it, or nothing if the template accepts none."""
        return _print_call(self._print_past, "{}" if self._takes_text else {})

    def _print_past(self, messages: list[Message]) -> str:
        return self._render(messages, (), generate=False)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode the text from the turn sampled after a prompt, over ``messages``, to the next turn's opening.

        A turn that was cut short is ended first. Raises TooLong unless these are fewer than ``limit`` tokens.
        """
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        closing = [] if ended else [self.end_of_turn]
        return closing + self.delta(messages, sampled=sampled, limit=limit - len(closing))

    def parse(self, turn: SampledTurn) -> Answer:
        text, reasoning = before_stops(self.turn_text(turn.token_ids), turn.stops), ""
        if self._thinks:
            reasoning, text = split_reasoning(text, opened=self._opened(turn.prompt_ids))
        calls = self._syntax.parse(text)
        return Answer(text, text.partition(self._syntax.call_start)[0].rstrip() if calls else text, calls, reasoning)

    def settled(self, turn: SampledTurn) -> Settled:
        """Settle the text before anything that may become a stop string, the end of reasoning or, with ``tools``, a
        call."""
        text, reasoning = without_beginnings(before_stops(self.turn_text(turn.token_ids), turn.stops), turn.stops), ""
        if self._thinks:
            begun = text.lstrip()
            if THINK_START.startswith(begun):
                return Settled()
            if begun.startswith(THINK_START) or self._opened(turn.prompt_ids):
                if THINK_END not in begun:
                    return Settled(without_beginnings(begun.removeprefix(THINK_START), [THINK_END]).lstrip())
                reasoning, text = split_reasoning(text, opened=True)
        start = self._syntax.call_start
        if turn.tools and start:
            text = without_beginnings(text.partition(start)[0], [start])
        return Settled(reasoning, text)

    def call_opening(self, name: str = "") -> list[int]:
        """Return the opening of a turn that calls ``name``, or any function, as the template would write it.

        Return nothing for templates that know reasoning, since calls come after it.
        """
        if self._thinks or not self._syntax.call_start or not _NAME.fullmatch(name):
            return []
        if not name:
            return self.encode(self._syntax.call_start)
        written = self._printed_call if self._prints_calls else self._syntax.render(_PROBE, "{}")
        # Earlier call starts belong to the template's instructions, and the policy chooses the id.
        _, start, call = written.rpartition(self._syntax.call_start)
        opening, arguments, _ = call.partition("{}")
        opening = opening.partition(_PROBE_ID)[0]
        if not arguments or opening.count(_PROBE) != 1:
            return []
        token_ids = self.encode(start + opening.replace(_PROBE, name).rstrip())
        return [] if set(self.stop_token_ids) & set(token_ids) else token_ids

    def _opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt has opened the turn's reasoning."""
        return self.decode(prompt_ids[-_TAIL:]).rstrip().endswith(THINK_START)

    def delta(
        self, messages: Sequence[Message], *, sampled: Collection[int] = (), limit: int = sys.maxsize
    ) -> list[int]:
        """Encode ``messages`` after a finished assistant turn, up to the opening of the next one.

        Raises TooLong unless these are fewer than ``limit`` tokens.
        """
        return self._within(limit, messages, (without_bytes(messages), sorted(sampled)), self._render_delta)

    def demo_row(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Tokenise a demonstration turn by turn, as an episode would; return (token_ids, loss_mask).

        The mask is true on the assistant's tokens and on the tokens that end its turns.
        """
        token_ids: list[int] = []
        mask: list[bool] = []
        context: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                context.append(message)
                continue
            opening, _ = self.expand(self.delta(context) if token_ids else self.prompt(context), context)
            spoken = [*self.encode(message["content"]), self.end_of_turn]
            token_ids += opening + spoken
            mask += [False] * len(opening) + [True] * len(spoken)
            context = []
        return token_ids, mask

    def _render_delta(self, messages: list[Message], sampled: list[int], limit: int) -> tuple[int, ...]:
        text = self._after_mark(self._escaped(messages, sampled), generate=True)
        if not text.startswith(self._closing):
            return self._encode_printed(text, limit)
        return self._encode_printed(text.removeprefix(self._closing), limit, after=self._end_text)

    def _written(self, message: Message, *, sampled: bool) -> Message:
        """Give calls to a template that prints them; else write them the way the model would have written them."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self._prints_calls:
            return message | {"tool_calls": [nested(call, as_text=self._takes_text) for call in calls]}
        texts = [self._syntax.render(call["name"], call["arguments"]) for call in calls]
        return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *texts])}

    def _after_mark(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Return the text that the template prints after an assistant's text if ``messages`` follow."""
        placeholder = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER_MARK}]
        text = self._render([*placeholder, *messages], (), generate=generate)
        _, mark, after = text.partition(_ANSWER_MARK)
        if not mark:
            raise ValueError("the chat template does not print the assistant's text")
        return after


def takes_arguments_as_text(render: Callable[[list[Message]], str]) -> bool:
    """Whether a template needs the arguments of calls as JSON text: it refuses mappings, or prints them as Python does.

    ``render`` prints messages, and raises jinja2.TemplateError if it cannot.
    """
    printed = _print_call(render, {_KEY: "1"})
    return f"'{_KEY}'" in printed or (not printed and bool(_print_call(render, "{}")))


def _print_call(render: Callable[[list[Message]], str], arguments: Any) -> str:
    call = {"id": _PROBE_ID, "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        return render([{"role": "user", "content": "x"}, said])
    except jinja2.TemplateError:
        return ""


def nested(call: dict[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """Convert one of `flat_calls` to the form that most templates take, or ``as_text`` to OpenAI's own."""
    arguments = call["arguments"] if as_text else msgspec.json.decode(call["arguments"])
    made = {"type": "function", "function": {"name": call["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") else made
