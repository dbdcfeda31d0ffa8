"""Chat messages of rows, checked and in one form: OpenAI's, with the arguments of calls as JSON text.

Everything that reads conversations (prompts of tasks, demonstrations, preference pairs, submitted tasks) reads them
here, so that each of them refuses the same.
"""

import json
import re
from typing import Any

import msgspec

from rl_async.errors import DataError
from rl_async.transfer_queue.data.values import depth_problem, plain_value, short
from rl_async.undecodable import UNDECODABLE

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# An empty system message replaces the template's own, and a tool may return nothing.
MAY_BE_EMPTY = ("system", "developer", "tool")
# Keys of a message whose values are text, keys of a call, and keys or columns of what no model here reads.
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_CALL = ("id", "type", "index", "name", "arguments")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Messages that were written as one text, as JSON or by Python's repr: a list of them, one, or an object that has them.
_MESSAGES_AS_TEXT = re.compile(
    r"""\s*(?:\[\s*\{\s*(["'])(?:role|content|from)\1\s*:.*\]|\{\s*(["'])(?:role|messages)\2\s*:.*\})\s*""", re.DOTALL
)


def to_messages(value: Any, place: str, *, role: str = "user") -> list[Message]:
    """Return checked chat messages; a text is one message of ``role``.

    Keys without a value are dropped. Raises DataError that names ``place`` and the message.
    """
    if isinstance(value, str) and value.strip():
        if _MESSAGES_AS_TEXT.fullmatch(value):
            raise DataError(f"{place}: the messages are written as one text, got {short(value)}; decode it to a list")
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: needs a list of messages or a text, got {short(value)}")
    return [_message(message, f"{place}, message {number}") for number, message in enumerate(value)]


def for_templates(messages: list[Message]) -> list[Message]:
    """Return messages with the arguments of calls as mappings, which most chat templates print."""
    return [
        message | {"tool_calls": [_with_mapping(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def refuse_media(row: dict[str, Any], place: str) -> None:
    """Raise DataError for images, sound or films beside the text of a row or of a message."""
    if key := next((key for key in _MEDIA if row.get(key)), None):
        raise DataError(f"{place}: has {key}; models read text only here, so leave it out, or the row")


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"{place}: needs {{role, content}}, got {short(value)}")
    message = {key: part for key, part in value.items() if part is not None}
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{place}: unknown role {short(role)}; known: {', '.join(ROLES)}")
    if "function_call" in message:
        raise DataError(f"{place}: function_call is OpenAI's old form; write tool_calls")
    refuse_media(message, place)
    if odd := next((key for key in _TEXTS if not isinstance(message.get(key, ""), str)), None):
        raise DataError(f"{place}: needs its {odd} as text, got {short(message[odd])}")
    calls = message.pop("tool_calls", None) or []
    content = message.setdefault("content", "")
    if not isinstance(content, str):
        raise DataError(f"{place}: needs its content as text, got {short(content)}")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise DataError(f"{place}: tool_calls are a list, in an assistant's message; got {short(calls)}")
        message["tool_calls"] = [_call(call, place) for call in calls]
    elif not content.strip() and role not in MAY_BE_EMPTY:
        or_calls = " or tool_calls" if role == "assistant" else ""
        raise DataError(f"{place}: a turn of the {role} without content{or_calls}; fill it, or leave the row out")
    return message


def _call(call: Any, place: str) -> dict[str, Any]:
    """Convert a call: OpenAI's ``{"type": "function", "function": {"name", "arguments"}}``, or its inner object."""
    outer = dict(call) if isinstance(call, dict) else {}
    function = outer.pop("function", None) or {}
    if not isinstance(function, dict) or not isinstance(name := (outer | function).get("name"), str) or not name:
        raise DataError(f"{place}: a tool call needs function.name and function.arguments, got {short(call)}")
    given = {key: part for key, part in (outer | function).items() if part is not None}
    if unknown := given.keys() - set(_CALL):
        known = ", ".join(_CALL)
        raise DataError(f"{place}: the call of {name:.80} has {short(min(unknown))}, which is not read; known: {known}")
    if (kind := given.get("type") or "function") != "function":
        raise DataError(f"{place}: the call of {name:.80} is of type {short(kind)}; only function calls are read")
    identity = given.get("id", "")
    if not isinstance(identity, str):
        raise DataError(f"{place}: the call of {name:.80} needs its id as text, got {short(identity)}")
    inside = {"name": name, "arguments": _arguments(given.get("arguments"), f"{place}: arguments of {name:.80}")}
    return {**({"id": identity} if identity else {}), "type": "function", "function": inside}


def _arguments(value: Any, place: str) -> str:
    """Return the arguments of a call as JSON text; a text stays as it is."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"
    if isinstance(value, dict):
        try:
            return json.dumps(plain_value(value), ensure_ascii=False)
        except ValueError as error:
            raise DataError(f"{place}: {error}") from error
    if not isinstance(value, str):
        raise DataError(f"{place} must be a JSON object, got {short(value)}")
    try:
        found = msgspec.json.decode(value)
    except UNDECODABLE as error:
        raise DataError(f"{place} are not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{place} must be a JSON object, got {short(value)}")
    if problem := depth_problem(found):
        raise DataError(f"{place}: {problem}")
    return value


def _with_mapping(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": msgspec.json.decode(function["arguments"])}}
