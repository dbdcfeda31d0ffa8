"""The chat format of a model that is asked with messages instead of tokens: one that an endpoint serves.

Its tokens are the bytes of the conversation as JSON lines: the tools that are offered, then a message each. So what an
episode asks of a chat format can be had of any endpoint, and calls stay as structured as the endpoint gave them.
"""

import sys
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from rl_async.agent_loop.chat_formats.format import Answer, Message, ParsedCall, Settled, TooLong
from rl_async.agent_loop.chat_formats.hermes import HERMES
from rl_async.agent_loop.chat_formats.syntax import THINK_END, THINK_START
from rl_async.files import UNDECODABLE
from rl_async.messages import CallProblem

END = ord("\n")  # of a line, which JSON itself never has
TOKEN_CHARS = 4  # about as many as a token of most models has


class Function(msgspec.Struct, kw_only=True):
    """A function that a message calls. ``arguments`` is the JSON text that the model wrote."""

    name: str
    arguments: str = "{}"


class Call(msgspec.Struct, kw_only=True):
    """A tool call of a chat completion."""

    id: str = ""
    type: str = "function"
    function: Function


class Said(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the assistant, as a line has it."""

    role: str
    content: str = ""
    tool_calls: list[Call] = []
    reasoning: str = ""


def line(value: Any) -> list[int]:
    """Return a line as tokens."""
    return [*msgspec.json.encode(value), END]


def read_lines(token_ids: Sequence[int]) -> tuple[list[dict[str, Any]], list[Message]]:
    """Return the tools and the messages that tokens say."""
    tools, *messages = msgspec.json.Decoder().decode_lines(bytes(token_ids))
    return tools, messages


class MessageLines:
    """A `ChatFormat` of JSON lines."""

    name = "messages"
    prints_tools = True
    plain_turns = False

    def __init__(self) -> None:
        self.stop_token_ids = [END]

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode the conversation so far. Raises TooLong unless there are fewer than ``limit`` tokens."""
        return _within(limit, [*line(list(tools)), *self._lines(messages)])

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode what ``messages`` append. Raises TooLong unless these are fewer than ``limit`` tokens."""
        return _within(limit, self._lines(messages))

    def _lines(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in line(message)]

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Answer:
        """Read a turn."""
        said = _said(token_ids)
        return Answer(_with_calls(said), said.content, [_parsed(call) for call in said.tool_calls], said.reasoning)

    def settled(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Settled:
        """Settle nothing before the end of the turn."""
        return Settled()

    def call_opening(self, name: str = "") -> list[int]:
        """Return nothing: how a call begins is the endpoint's."""
        return []

    def keeps_past(
        self,
        messages: Sequence[Message],
        place: int,
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> bool:
        """Return True: what becomes of earlier reasoning is the endpoint's."""
        return True

    def encode(self, text: str) -> list[int]:
        """Encode text as its bytes."""
        return list(text.encode())

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Write a turn as one text, with its reasoning and calls as Hermes' format has them."""
        said = _said(token_ids)
        thought = f"{THINK_START}\n{said.reasoning}\n{THINK_END}\n\n" if said.reasoning else ""
        return thought + _with_calls(said)

    def cut(self, text: str, tokens: int) -> str:
        """Cut a tool's text to about ``tokens`` tokens of a model, whose tokenizer is unknown here."""
        return text[: tokens * TOKEN_CHARS]

    def check(
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> int | None:
        """Return None: there is no template to depart from."""
        return None


def _within(limit: int, token_ids: list[int]) -> list[int]:
    if len(token_ids) >= limit:
        raise TooLong(len(token_ids))
    return token_ids


def _said(token_ids: Sequence[int]) -> Said:
    """Read a turn; one without tokens says nothing."""
    return msgspec.json.decode(bytes(token_ids), type=Said) if token_ids else Said(role="assistant")


def _with_calls(said: Said) -> str:
    calls = (HERMES.render(call.function.name, call.function.arguments or "{}") for call in said.tool_calls)
    return "\n".join(filter(None, [said.content, *calls]))


def _parsed(call: Call) -> ParsedCall:
    function = call.function
    arguments, problem = read_arguments(function.arguments)
    raw = f'{{"name": {msgspec.json.encode(function.name).decode()}, "arguments": {function.arguments or "{}"}}}'
    return ParsedCall(function.name, arguments, raw, problem, call.id)


def read_arguments(text: str) -> tuple[dict[str, object] | None, CallProblem | None]:
    """Read the arguments of a call; None, and what is wrong with them, if they are no JSON object. None at all are
    an empty one."""
    try:
        value = msgspec.json.decode(text or "{}")
    except UNDECODABLE:
        return None, "bad_json"
    return (value, None) if isinstance(value, dict) else (None, "bad_arguments")
