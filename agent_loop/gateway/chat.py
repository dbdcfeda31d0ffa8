"""Chat messages in the one form that the gateway compares and renders, whatever dialect they came in."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rl_async.agent_loop.chat_formats.hermes import CALL_END, CALL_START, parse_hermes

ASSISTANT = "assistant"


class Call(msgspec.Struct, frozen=True):
    """One call of a tool. ``arguments`` is JSON text."""

    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. ``role`` is system, user, assistant or tool; only the assistant makes calls."""

    role: str
    text: str
    calls: tuple[Call, ...] = ()

    def identity(self) -> bytes:
        """Equal for messages that are the same to the gateway: clients trim answers and write JSON anew."""
        text = self.text.strip() if self.role == ASSISTANT else self.text
        calls = [[call.name, _canonical(call.arguments)] for call in self.calls]
        return hashlib.sha256(msgspec.json.encode([self.role, text, calls])).digest()


class ChatRequest(NamedTuple):
    """What a request of any dialect asks for; None: nothing is said about it."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    stops: list[str]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool
    usage: bool  # in the stream
    model: str


class Completion(NamedTuple):
    """An answer as it is given out. ``number`` counts the episode's answers; ``finish_reason``: stop or length."""

    number: int
    message: ChatMessage
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int


def history_keys(messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> list[bytes]:
    """A name for each history ``messages[: i + 1]`` under these tools, in time linear in the messages."""
    keys, key = [], hashlib.sha256(msgspec.json.encode(tools, order="sorted")).digest()
    for message in messages:
        key = hashlib.sha256(key + message.identity()).digest()
        keys.append(key)
    return keys


def read_answer(text: str, *, tools: bool) -> ChatMessage:
    """A sampled answer with its calls, if there are tools and every call is well formed; else all of it is text."""
    calls = parse_hermes(text) if tools else []
    if not calls or any(call.arguments is None for call in calls):
        return ChatMessage(ASSISTANT, text)
    made = tuple(Call(call.name, msgspec.json.encode(call.arguments).decode()) for call in calls)
    return ChatMessage(ASSISTANT, text.partition(CALL_START)[0].strip(), made)


def answer_text(message: ChatMessage) -> str:
    """An answer that nobody sampled here, in the form in which answers are read."""
    parts = [message.text] if message.text else []
    for call in message.calls:
        body = f'{{"name": {msgspec.json.encode(call.name).decode()}, "arguments": {call.arguments}}}'
        parts.append(f"{CALL_START}\n{body}\n{CALL_END}")
    return "\n".join(parts)


def _canonical(arguments: str) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted")
    except msgspec.DecodeError:
        return arguments.encode(errors="replace")
