"""What agent loops, gateway and fine-tuning need to know about the way in which a family of models chats."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from rl_async.messages import CallProblem

Message = dict[str, Any]

BAD_CALL = "error: bad call"  # the result of a malformed call


class TooLong(Exception):
    """A text has too many tokens: ``tokens``, or at least as many if its size told so before it was encoded."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens


class CannotBridge(Exception):
    """A conversation cannot go on after the tokens as sampled."""


class ParsedCall(NamedTuple):
    """One call as the model wrote it. ``arguments`` is None if there is a ``problem``; ``raw`` is its text.

    ``id`` is what the model calls it, in formats where it does, and what its result must be called.
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
    """A sampled turn, read: ``text`` is all that was said but the reasoning, ``content`` is without the calls."""

    text: str
    content: str
    calls: list[ParsedCall]
    reasoning: str = ""


def reasoning_and_answer(chat: "ChatFormat", token_ids: Sequence[int], prompt_ids: Sequence[int]) -> tuple[str, str]:
    """Split a turn sampled after ``prompt_ids`` into its reasoning and all else that was said, its calls included."""
    answer = chat.parse(token_ids, prompt_ids=prompt_ids)
    return answer.reasoning, answer.text


class Settled(NamedTuple):
    """The beginnings of an answer's reasoning and content that no further token changes."""

    reasoning: str = ""
    content: str = ""


class ChatFormat(Protocol):
    """Renders messages to token ids and reads sampled ones, with one tokenizer.

    What messages say is encoded as plain text, even where it spells a special token; only what the policy sampled
    itself (``sampled``: positions of such messages) may hold special tokens. Sampled tokens are never encoded again.
    """

    stop_token_ids: list[int]
    prints_tools: bool
    plain_turns: bool  # what the policy samples is all said: no reasoning, no channels

    @property
    def name(self) -> str: ...

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = ...,
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
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = ...,
    ) -> list[int]:
        """Return what ``messages`` append to a prompt and the turn sampled after it, up to the next turn's opening.

        A turn that was cut short is ended first. Raises TooLong unless these are fewer than ``limit`` tokens, and
        CannotBridge if the format cannot go on without encoding what was sampled.
        """
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Answer:
        """Read a turn sampled after ``prompt_ids``, up to the first of the texts ``stops``. ``tools`` were offered."""
        ...

    def settled(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Settled:
        """Read the beginning of a turn that is still being sampled: what `parse` will return, however it goes on.

        With ``tools``, of what is said outside calls; without, calls are content.
        """
        ...

    def call_opening(self, name: str = "") -> list[int]:
        """Return how a turn begins that calls the function ``name`` (empty: any), up to where the policy decides.

        Nothing if the format cannot say, or if turns begin with reasoning.
        """
        ...

    def keeps_past(
        self,
        messages: Sequence[Message],
        place: int,
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> bool:
        """Whether ``prompt`` of all messages prints the turn sampled at ``place`` and what came before it as then.

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
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> int | None:
        """Return the position of the first token that departs from the full chat template's text; None if all agree."""
        ...


def text_size(messages: Sequence[Message]) -> int:
    """Return the number of characters that the messages say, in arguments of calls, too."""
    return sum(len(text) for message in messages for text in _texts(message) if isinstance(text, str))


def _texts(message: Message) -> Iterator[object]:
    yield message.get("content")
    for call in flat_calls(message):
        yield call["arguments"]


def flat_calls(message: Message) -> list[dict[str, Any]]:
    """Return the calls of a message as {name, arguments, perhaps id}, with arguments as JSON text.

    They may be in OpenAI's form, whose name and arguments are in ``function`` and whose arguments may be a mapping.
    """
    return [_flat(call) for call in message.get("tool_calls") or ()]


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages with a content, and with the function's name in each result that a call before it has: that with
    its id, or the next one. Some formats print it."""
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


def _flat(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    given = function.get("arguments") or "{}"
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {"name": function["name"], "arguments": text} | ({"id": call["id"]} if call.get("id") else {})


def before_stops(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of ``stops``, or all of it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def without_beginnings(text: str, marks: Iterable[str]) -> str:
    """Leave out the end of an unfinished text as far as it may belong to what comes: the beginning of one of ``marks``,
    a character whose bytes are not all there, and white space, which answers are stripped of."""
    text = text.rstrip("\ufffd")
    held = (size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size]))
    return text[: len(text) - max(held, default=0)].rstrip()
