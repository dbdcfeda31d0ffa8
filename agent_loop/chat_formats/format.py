"""The interface of chat formats, and how models write tool calls and reasoning as text.

``ChatFormat`` is everything that agent loops, gateway and fine-tuning know about how a family of models chats. A
``CallSyntax`` reads and writes calls in the text of a turn: none, or Hermes's and Qwen's JSON objects {"name",
"arguments"} between ``<tool_call>`` tags.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from rl_async.files import UNDECODABLE
from rl_async.messages import CallProblem
from rl_async.pictures import PictureProcessor
from rl_async.rollout_server.api import Image

Message = dict[str, Any]
# JSON schemas of the tools that a conversation offers.
Tools = Sequence[dict[str, Any]]

# The result of a malformed call.
BAD_CALL = "error: bad call"


class TooLong(Exception):
    """A text has too many tokens: ``tokens``, a lower bound if the text was too long to be encoded."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens


class CannotBridge(Exception):
    """A conversation cannot go on after the tokens as sampled."""


class ParsedCall(NamedTuple):
    """One call as the model wrote it. ``arguments`` is None if there is a ``problem``; ``raw`` is its text.

    ``id`` is the model's own id of the call, in formats that have one; the result must carry it.
    """

    name: str
    arguments: dict[str, object] | None
    raw: str
    problem: CallProblem | None = None
    id: str = ""

    @property
    def recorded(self) -> str:
        """The arguments as JSON, or all of the call's text if there is a problem."""
        return self.raw if self.arguments is None else msgspec.json.encode(self.arguments).decode()


class Answer(NamedTuple):
    """A parsed turn: ``text`` is everything except the reasoning, ``content`` is without the calls, too."""

    text: str
    content: str
    calls: list[ParsedCall]
    reasoning: str = ""


def reasoning_and_answer(chat: "ChatFormat", token_ids: Sequence[int], prompt_ids: Sequence[int]) -> tuple[str, str]:
    """Split a turn sampled after ``prompt_ids`` into its reasoning and all else that was said, its calls included."""
    answer = chat.parse(SampledTurn(token_ids, prompt_ids))
    return answer.reasoning, answer.text


class Settled(NamedTuple):
    """The beginnings of an answer's reasoning and content that no further token changes."""

    reasoning: str = ""
    content: str = ""


class SampledTurn(NamedTuple):
    """A turn sampled after ``prompt_ids`` with these ``tools``, perhaps unfinished. It ends before any of ``stops``."""

    token_ids: Sequence[int]
    prompt_ids: Sequence[int] = ()
    tools: Tools = ()
    stops: Sequence[str] = ()


class ChatFormat(Protocol):
    """Renders messages to token ids and reads sampled ones, with one tokenizer.

    The text of messages is encoded as plain text, even where it spells a special token; only messages that the policy
    sampled itself (at the positions ``sampled``) may hold special tokens. Sampled tokens are never encoded again. With
    ``plain_turns``, a sampled turn has neither reasoning nor channels.
    """

    stop_token_ids: list[int]
    prints_tools: bool
    plain_turns: bool
    # None for a model that reads no images.
    pictures: PictureProcessor | None

    @property
    def name(self) -> str: ...

    def prompt(
        self, messages: Sequence[Message], tools: Tools = (), *, sampled: Collection[int] = (), limit: int = ...
    ) -> list[int]:
        """Encode the conversation so far and the opening of the assistant's turn. ``tools`` are JSON schemas.

        Raises TooLong unless there are fewer than ``limit`` tokens.
        """
        ...

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        sampled: Collection[int] = (),
        limit: int = ...,
    ) -> list[int]:
        """Encode the text from the turn sampled after a prompt, over ``messages``, to the next turn's opening.

        A turn that was cut short is ended first. Raises TooLong unless these are fewer than ``limit`` tokens, and
        CannotBridge if the format cannot go on without encoding what was sampled.
        """
        ...

    def expand(
        self, token_ids: list[int], messages: Sequence[Message], *, start: int = 0, limit: int = ...
    ) -> tuple[list[int], list[Image]]:
        """Put the tokens of the images of ``messages`` in place of the marks that ``prompt`` or ``bridge`` printed.

        Return all tokens, and the images, whose positions count from ``start``. Raises TooLong unless there are fewer
        than ``limit`` tokens, and DataError for images that the model does not read.
        """
        ...

    def parse(self, turn: SampledTurn) -> Answer:
        """Read a turn up to the first of its stop strings."""
        ...

    def settled(self, turn: SampledTurn) -> Settled:
        """Read a turn that is still being sampled, as far as no further token changes the result of `parse`.

        If tools were offered, leave out calls; otherwise they are content.
        """
        ...

    def call_opening(self, name: str = "") -> list[int]:
        """Return the opening of a turn that calls the function ``name``, or any function if it is not given.

        Return nothing if the format cannot say, or if turns begin with reasoning.
        """
        ...

    def keeps_past(
        self, messages: Sequence[Message], place: int, tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> bool:
        """Whether ``prompt`` still prints the turn sampled at ``place``, and all before it, as when it was sampled.

        False if the chat template leaves out reasoning of earlier turns by now.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Encode text of the policy, or of a bare prompt: special tokens count as such."""
        ...

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Decode a sampled turn with its special tokens, but without the one that ended it."""
        ...

    def cut(self, text: str, tokens: int) -> str:
        """Cut a tool's text to ``tokens`` tokens."""
        ...

    def check(
        self, messages: Sequence[Message], token_ids: Sequence[int], tools: Tools = (), *, sampled: Collection[int] = ()
    ) -> int | None:
        """Return the position of the first token that departs from the full chat template's text; None if all agree."""
        ...


def text_size(messages: Sequence[Message]) -> int:
    """Return the number of characters in the contents of messages and the arguments of their calls."""
    contents = [message.get("content") for message in messages]
    arguments = [call["arguments"] for message in messages for call in flat_calls(message)]
    return sum(len(text) for text in [*contents, *arguments] if isinstance(text, str))


def flat_calls(message: Message) -> list[dict[str, Any]]:
    """Return the calls of a message as {name, arguments, perhaps id}, with arguments as JSON text.

    They may be in OpenAI's form, whose name and arguments are in ``function`` and whose arguments may be a mapping.
    """
    flat = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        given = function.get("arguments") or "{}"
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        flat.append({"name": function["name"], "arguments": text} | ({"id": call["id"]} if call.get("id") else {}))
    return flat


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages with a content and, since some formats print it, the function's name in each tool result.

    A result belongs to the earlier call with its id, or else to the next call."""
    made: list[Message] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        message = message | {"content": message.get("content") or ""}
        if message["role"] == "assistant":
            waiting = flat_calls(message)
        elif message["role"] == "tool" and waiting:
            given = message.get("tool_call_id")
            named = (number for number, call in enumerate(waiting) if given and call.get("id") == given)
            call = waiting.pop(next(named, 0))
            message = {"name": call["name"], **message}
        made.append(message)
    return made


def before_stops(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of ``stops``, or all of it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def without_beginnings(text: str, marks: Iterable[str]) -> str:
    """Trim the tail of a partial decode that later tokens may still change: a prefix of one of ``marks``, an incomplete
    UTF-8 character, and trailing white space."""
    text = text.rstrip("\ufffd")
    held = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return text[: len(text) - max(held, default=0)].rstrip()


class CallSyntax(NamedTuple):
    """Reads and writes tool calls.

    ``parse`` finds all calls in an answer, in order. ``render`` writes a call of a function by name, with arguments as
    JSON text. ``call_start`` opens every call; what an answer says before the first one is its content.
    """

    parse: Callable[[str], list[ParsedCall]]
    render: Callable[[str, str], str]
    call_start: str


NO_CALLS = CallSyntax(lambda _: [], lambda name, arguments: f"{name}({arguments})", "")

THINK_START, THINK_END = "<think>", "</think>"


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """Split a sampled text into (reasoning, the rest). ``opened`` says that the prompt ends with ``<think>``.

    Unclosed reasoning takes up the whole text, so that nothing inside it counts as a call.
    """
    begun = text.lstrip().startswith(THINK_START)
    if not (opened or begun):
        return "", text
    body = text.lstrip().removeprefix(THINK_START) if begun else text
    reasoning, _, rest = body.partition(THINK_END)
    return reasoning.strip(), rest.lstrip("\n")


CALL_START, CALL_END = "<tool_call>", "</tool_call>"

_HERMES_BODY = re.compile(
    rf"{re.escape(CALL_START)}(.*?)(?:{re.escape(CALL_END)}|(?={re.escape(CALL_START)})|\Z)", re.DOTALL
)


class _HermesCall(msgspec.Struct):
    name: str
    arguments: dict[str, object] = {}


_HERMES_DECODER = msgspec.json.Decoder(_HermesCall)


def parse_hermes(text: str) -> list[ParsedCall]:
    """Return all calls in ``text``, in order. One that is not closed, or whose body is not a call, is malformed."""
    if CALL_START not in text:
        return []
    found = [(match[1].strip(), match[0].endswith(CALL_END)) for match in _HERMES_BODY.finditer(text)]
    return [read_object(raw) if closed else ParsedCall("", None, raw, "unclosed") for raw, closed in found]


def read_object(raw: str) -> ParsedCall:
    """Read a call that is a JSON object with ``name`` and ``arguments``."""
    try:
        call = _HERMES_DECODER.decode(raw)
    except UNDECODABLE:
        return ParsedCall("", None, raw, _hermes_problem(raw))
    return ParsedCall(call.name, call.arguments, raw)


def _hermes_problem(raw: str) -> CallProblem:
    """Name the problem. The decoder of calls stops at the first wrong type, and the rest may be malformed, too."""
    try:
        value = msgspec.json.decode(raw)
    except UNDECODABLE:
        return "bad_json"
    if not isinstance(value, dict):
        return "bad_structure"
    return "bad_arguments" if isinstance(value.get("name"), str) else "no_name"


def render_hermes(name: str, arguments: str) -> str:
    """Write a call; ``arguments`` is JSON text."""
    body = f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}}}'
    return f"{CALL_START}\n{body}\n{CALL_END}"


def said_text(message: Message) -> str:
    """Write the content and the calls of a message as one text."""
    calls = [render_hermes(call["name"], call["arguments"]) for call in flat_calls(message)]
    return "\n".join(filter(None, [message["content"], *calls]))


HERMES = CallSyntax(parse_hermes, render_hermes, CALL_START)
