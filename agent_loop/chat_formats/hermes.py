"""Finds tool calls in what the model wrote. The format is Hermes': JSON between ``<tool_call>`` tags, as Qwen uses."""

import re
from typing import NamedTuple

import msgspec

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
BAD_CALL = "error: bad call"

_BODY = re.compile(rf"{re.escape(CALL_START)}(.*?)(?:{re.escape(CALL_END)}|(?={re.escape(CALL_START)})|\Z)", re.DOTALL)


class ParsedCall(NamedTuple):
    """One call as the model wrote it. ``arguments`` is None when the call is malformed; ``raw`` is its JSON text."""

    name: str
    arguments: dict[str, object] | None
    raw: str


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, object] = {}


_DECODER = msgspec.json.Decoder(_Call)


def parse_hermes(text: str) -> list[ParsedCall]:
    """All calls in ``text``, in order. A call without an end, or with a body that is not a call, is malformed."""
    if CALL_START not in text:
        return []
    return [_parse(match) for match in _BODY.finditer(text)]


def _parse(match: re.Match[str]) -> ParsedCall:
    raw = match[1].strip()
    if not match[0].endswith(CALL_END):
        return ParsedCall("", None, raw)
    try:
        call = _DECODER.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return ParsedCall("", None, raw)
    return ParsedCall(call.name, call.arguments, raw)
