"""The format of Hermes and Qwen: a JSON object {"name", "arguments"} between ``<tool_call>`` tags."""

import re

import msgspec

from rl_async.agent_loop.chat_formats.format import Message, ParsedCall, flat_calls
from rl_async.agent_loop.chat_formats.syntax import CallSyntax
from rl_async.files import UNDECODABLE
from rl_async.messages import CallProblem

CALL_START, CALL_END = "<tool_call>", "</tool_call>"

_BODY = re.compile(rf"{re.escape(CALL_START)}(.*?)(?:{re.escape(CALL_END)}|(?={re.escape(CALL_START)})|\Z)", re.DOTALL)


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, object] = {}


_DECODER = msgspec.json.Decoder(_Call)


def parse(text: str) -> list[ParsedCall]:
    """Return all calls in ``text``, in order. One that is not closed, or whose body is not a call, is malformed."""
    if CALL_START not in text:
        return []
    return [_parse(match) for match in _BODY.finditer(text)]


def _parse(match: re.Match[str]) -> ParsedCall:
    raw = match[1].strip()
    if not match[0].endswith(CALL_END):
        return ParsedCall("", None, raw, "unclosed")
    return read_object(raw)


def read_object(raw: str) -> ParsedCall:
    """Read a call that is a JSON object with ``name`` and ``arguments``."""
    try:
        call = _DECODER.decode(raw)
    except UNDECODABLE:
        return ParsedCall("", None, raw, _problem(raw))
    return ParsedCall(call.name, call.arguments, raw)


def _problem(raw: str) -> CallProblem:
    """Say what is wrong. The decoder of calls stops at the first wrong type, after which there may be anything."""
    try:
        value = msgspec.json.decode(raw)
    except UNDECODABLE:
        return "bad_json"
    if not isinstance(value, dict):
        return "bad_structure"
    return "bad_arguments" if isinstance(value.get("name"), str) else "no_name"


def render(name: str, arguments: str) -> str:
    """Write a call; ``arguments`` is JSON text."""
    body = f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}}}'
    return f"{CALL_START}\n{body}\n{CALL_END}"


def said_text(message: Message) -> str:
    """Write what a message says with its calls as one text, for those who read a conversation as texts."""
    calls = [render(call["name"], call["arguments"]) for call in flat_calls(message)]
    return "\n".join(filter(None, [message["content"], *calls]))


HERMES = CallSyntax(parse, render, CALL_START)
