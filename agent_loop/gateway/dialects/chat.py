"""Chat messages, requests and answers in one form, independent of the dialect."""

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import msgspec

from rl_async.agent_loop.chat_formats.format import Answer
from rl_async.agent_loop.gateway.dialects.fields import content_refused
from rl_async.agent_loop.gateway.dialects.formats import JsonFormat
from rl_async.errors import RequestRefused
from rl_async.files import UNDECODABLE

ASSISTANT = "assistant"
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")  # in msgspec's errors
_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]+)`")
Body = TypeVar("Body", bound=msgspec.Struct)
# Of stop strings, which are looked for whenever tokens are sampled. OpenAI takes four.
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1000


class Part(msgspec.Struct):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | msgspec.UnsetType = msgspec.UNSET


class FunctionCall(msgspec.Struct, frozen=True):
    """One call of a client's tool. ``arguments`` is JSON text; ``id`` is the model's or the client's, if it has one."""

    name: str
    arguments: str
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. ``role`` is system, user, assistant or tool; only assistant messages have calls.

    ``answers`` is the id of the call of which a tool message is the result, if that is said.
    """

    role: str
    text: str
    calls: tuple[FunctionCall, ...] = ()
    reasoning: str = ""  # of a sampled answer; clients may leave it out when they send the answer back
    answers: str = ""

    def identity(self) -> bytes:
        """Hash the message, but no ids: trimmed answers and JSON written anew are equal, as clients send them back."""
        text = self.text.strip() if self.role == ASSISTANT else self.text
        calls = [[call.name, _canonical(call.arguments)] for call in self.calls]
        return hashlib.sha256(msgspec.json.encode([self.role, text, calls])).digest()


class ChatRequest(NamedTuple):
    """A request of any dialect; None means that the field was not given."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    stops: list[str]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool
    usage: bool  # in the stream
    model: str
    reasoning: bool = True  # whether the client wants to see any
    unobeyed: Mapping[str, Any] = {}  # fields that ask for something that the run does not do (`fields.py`)
    format: JsonFormat | None = None  # that the answer must have; not in ``unobeyed``
    forces: str | None = None  # the function that the answer must call; empty: any; None: the policy decides
    size: int = 0  # bytes of the body
    conversation: str = "messages"  # the field that has it


def read_fields(body: bytes, kind: type[Body]) -> tuple[dict[str, Any], Body]:
    """Decode a request's body: all of its fields, and those that have an effect.

    Raises RequestRefused, whose ``param`` names the field that is not of its type.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        return fields, msgspec.convert(fields, kind)
    except UNDECODABLE as error:
        raise unreadable(error) from error


def unreadable(error: Exception) -> RequestRefused:
    """Return the refusal of a body that cannot be decoded; ``param`` names the field, if one is to blame."""
    place, field = _PLACE.search(str(error)), _FIELD.match(str(error))
    names = [found[1] for found in (place, field) if found and found[1]]
    return RequestRefused(str(error), code="invalid_request", param=".".join(names) or None)


def refused(place: str, reason: str) -> RequestRefused:
    """Return the refusal of a field's value; ``param`` is its ``place``."""
    return RequestRefused(f"{place}: {reason}", code="invalid_request", param=place)


def texts_of(
    content: str | Sequence[Part] | None, place: str, kinds: Sequence[str] = ("text",), other: Sequence[str] = ()
) -> list[str]:
    """Return the texts of a content at ``place``: of parts of ``kinds``, while ``other`` ones are read elsewhere.

    Raises RequestRefused for any other part, and for one without a text.
    """
    if content is None or isinstance(content, str):
        return [content or ""]
    texts = []
    for number, part in enumerate(content):
        if part.type in other:
            continue
        if part.type not in kinds:
            raise content_refused(part.type, f"{place}[{number}]")
        if part.text is msgspec.UNSET:
            raise refused(f"{place}[{number}].text", "this part has no text")
        texts.append(part.text)
    return texts


def text_of(content: str | Sequence[Part] | None, place: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the texts of a content in lines of their own, as vLLM joins them. Raises RequestRefused as `texts_of`."""
    return "\n".join(texts_of(content, place, kinds))


def stops_of(given: str | Sequence[str] | None, field: str) -> list[str]:
    """Return the stop strings in a ``field``. Raises RequestRefused for more and longer ones than are looked for."""
    stops = [given] if isinstance(given, str) else given or ()
    if len(stops) > MOST_STOPS or any(len(stop) > MOST_STOP_CHARACTERS for stop in stops):
        raise refused(field, f"at most {MOST_STOPS} strings of {MOST_STOP_CHARACTERS} characters each")
    return [stop for stop in stops if stop]


class Completion(NamedTuple):
    """An answer to a request. ``number`` counts the episode's answers; ``finish_reason`` is stop or length.

    ``stop`` is the client's stop string that ended it, if one did.
    """

    number: int
    message: ChatMessage
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    stop: str = ""


def forceable(name: str | None, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return ``name``, which an answer must call (empty: any function, if one is offered).

    Raises RequestRefused for a function that is not offered.
    """
    if name and name not in [tool["function"]["name"] for tool in tools]:
        raise _not_offered(name)
    return name if tools else None


def named(name: str) -> str:
    """Return the name of a function that a request forces. Raises RequestRefused for an empty one."""
    if not name:
        raise _not_offered(name)
    return name


def _not_offered(name: str) -> RequestRefused:
    return RequestRefused(
        f"tool_choice names the function {name[:200]!r}, which is not among the tools; name one of them",
        code="invalid_request",
        param="tool_choice",
    )


def answered(messages: Sequence[ChatMessage]) -> dict[int, tuple[int, FunctionCall]]:
    """Return which call each tool message answers, by its position: the one with the id it names, or else the next one.

    A call comes with its place among those of its message.
    """
    found: dict[int, tuple[int, FunctionCall]] = {}
    calls: Sequence[FunctionCall] = ()
    results: list[int] = []

    def settle() -> None:
        by_id: defaultdict[str, deque[int]] = defaultdict(deque)
        for number, call in enumerate(calls):
            by_id[call.id].append(number)
        named = {place: by_id[name].popleft() for place in results if (name := messages[place].answers) and by_id[name]}
        taken = set(named.values())
        left = (number for number in range(len(calls)) if number not in taken)
        rest = zip((place for place in results if place not in named), left)
        found.update((place, (number, calls[number])) for place, number in [*named.items(), *rest])

    for place, message in enumerate(messages):
        if message.role == ASSISTANT:
            settle()
            calls, results = message.calls, []
        elif message.role == "tool":
            results.append(place)
    settle()
    return found


def in_order_of_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with results that follow one another in the order of their calls.

    Clients run calls at once and send results as they come; the order is none of the policy's doing.
    """
    calls = answered(messages)
    ordered, start = list(messages), 0
    for role, run in groupby(messages, key=lambda message: message.role):
        end = start + len(list(run))
        if role == "tool":
            places = sorted(range(start, end), key=lambda place: calls[place][0] if place in calls else len(messages))
            ordered[start:end] = [messages[place] for place in places]
        start = end
    return ordered


def history_keys(messages: Sequence[ChatMessage], offered: bytes) -> list[bytes]:
    """Return a hash for each history ``messages[: i + 1]`` with these tools, in time linear in the messages."""
    keys, key = [], hashlib.sha256(offered).digest()
    for message in messages:
        key = hashlib.sha256(key + message.identity()).digest()
        keys.append(key)
    return keys


def read_answer(answer: Answer, *, tools: bool) -> ChatMessage:
    """Convert a sampled answer. Without tools, or with a malformed call, all of it is text."""
    if not tools or not answer.calls or any(call.arguments is None for call in answer.calls):
        return ChatMessage(ASSISTANT, answer.text, reasoning=answer.reasoning)
    made = tuple(FunctionCall(call.name, call.recorded, call.id) for call in answer.calls)
    return ChatMessage(ASSISTANT, answer.content, made, answer.reasoning)


def _canonical(arguments: str) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted")
    except UNDECODABLE:
        return arguments.encode(errors="replace")
