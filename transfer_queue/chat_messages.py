"""Values and chat messages of rows, checked and in one form: OpenAI's, with the arguments of calls as JSON text.

Everything that reads conversations (prompts of tasks, demonstrations, preference pairs, submitted tasks) reads them
here, so that each of them refuses the same. A value is text, or becomes text in one way only. A prompt's tokens are
those of its messages and calls, of the schemas of its tools, and of the text that the template adds.
"""

import datetime
import json
import math
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError
from rl_async.files import UNDECODABLE, lost_when_read, undamaged
from rl_async.messages import Task
from rl_async.picture_decoder import Want
from rl_async.pictures import PictureProcessor
from rl_async.transfer_queue.images import TEXT_MARK, as_parts, bound_images, canonical, images_of, placed, read_image

# Levels of lists and mappings in a row.
DEEPEST = 64
# The keys of images and sounds, and of decoded sounds, in columns of the library `datasets`.
_FILE, _SOUND = {"bytes", "path"}, {"array", "sampling_rate"}
# The integers that MessagePack holds.
_WHOLE = (-(2**63), 2**64 - 1)


def as_text(value: Any) -> str:
    """Write a value as text: a text as it is, decimal numbers in digits, dates as ISO 8601 has them, the rest as JSON.

    Raises ValueError, saying why, for a value that has no such text: NaN, bytes, a duration.
    """
    plain = plain_value(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def plain_value(value: Any) -> Any:
    """Convert a value to JSON's types. Raises ValueError, saying why, for one that JSON does not hold."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a number that JSON holds; write it as text, or leave the row out")
        return value
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a mapping with keys that are not text; write them as text")
        if value.keys() == _FILE or value.keys() >= _SOUND:
            raise ValueError("an image or a sound, as the library datasets stores them, has no text of its own")
        return {key: plain_value(part) for key, part in value.items()}
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value} is not a finite number; write it as text, or leave the row out")
        return f"{value:f}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    hint = "; decode them to text" if isinstance(value, bytes) else "; write it as text"
    raise ValueError(f"a value of type {type(value).__name__} has no text of its own{hint}")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; an integer that no float holds is not, and neither is a truth value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def short(value: Any) -> str:
    """Show the beginning of a value in an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def without_nulls(value: Any) -> Any:
    """Drop keys without a value: Arrow gives every struct all keys that any struct of its column has."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def depth_problem(value: Any) -> str | None:
    """Say that a value is nested too deeply for those that read it by recursion; None if it is not."""
    level, depth = [value], 0
    while level := [inside for part in level for inside in _inside(part)]:
        depth += 1
        if depth > DEEPEST:
            return f"nested more than {DEEPEST} levels deep; write its inside as text"
    return None


def message_problem(value: Any) -> str | None:
    """Say why no message can carry a value: an integer beyond 64 bits, a key that is not text; None if one can."""
    if isinstance(value, int) and not _WHOLE[0] <= value <= _WHOLE[1]:
        return "an integer of more than 64 bits; write it as text"
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return "a mapping with keys that are not text; write them as text"
    return next((problem for part in _inside(value) if (problem := message_problem(part))), None)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# An empty system message replaces the template's own, and a tool may return nothing.
MAY_BE_EMPTY = ("system", "developer", "tool")
# Keys of a message whose values are text, keys of a call, and keys or columns of media that no model here reads.
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_CALL = ("id", "type", "index", "name", "arguments")
_MEDIA = ("video", "videos", "audio", "audios")
# Columns in which some data sets have the system message of a conversation.
_SYSTEM = ("system", "system_prompt")
# Keys under which some data sets say a part of a message that would be lost.
_UNREAD = ("tool_call", "function_calls", "attachments", "documents", "refusal")
# Messages that were written as one text, as JSON (once or twice) or by the repr of Python or NumPy: a list of them, one
# message, or an object that has them.
_MESSAGES_AS_TEXT = re.compile(
    r"""\s*(?:(?:array\(|["'])?\[\s*\{\s*(\\?["'])(?:role|content|from)\1\s*:.*\](?:, dtype=object\))?["']?"""
    r"""|["']?\{\s*(\\?["'])(?:role|messages)\2\s*:.*\}["']?)\s*""",
    re.DOTALL,
)
# The beginnings of prompts that a chat template has printed.
_RENDERED = re.compile(
    r"\s*(?:<\|(?:im_start|begin_of_text|start_header_id|im_user|im_system|user|system|start|startoftext)\|>"
    r"|<｜(?:begin▁of▁sentence|User)｜>|(?:<s>\s*)?\[(?:INST|SYSTEM_PROMPT)\]|<(?:bos|start_of_turn)>|\[gMASK\]<sop>"
    r"|Human: .*\n\nAssistant:\s*$)",
    re.DOTALL,
)


def to_messages(value: Any, place: str, *, role: str = "user", folder: Path | None = None) -> list[Message]:
    """Return checked chat messages; a text is one message of ``role``.

    Keys without a value are dropped. Images become bytes (``images.py``); those that are files lie in ``folder``.
    Raises DataError that names ``place`` and the message.
    """
    if isinstance(value, str) and value.strip():
        if _MESSAGES_AS_TEXT.fullmatch(value):
            raise DataError(f"{place}: the messages are written as one text, got {short(value)}; decode it to a list")
        if _RENDERED.match(value):
            raise DataError(
                f"{place}: a chat template has been applied already, got {short(value)}; give the messages, since the "
                "model's own template is applied here"
            )
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: needs a list of messages or a text, got {short(value)}")
    messages = [_message(message, f"{place}, message {number}", folder) for number, message in enumerate(value)]
    _match_results(messages, place)
    _order_results(messages, place)
    _bound_images(messages, place)
    return messages


def _match_results(messages: Sequence[Message], place: str) -> None:
    """Raise DataError for a tool result whose id no earlier call has, though calls have ids."""
    called = set[str]()
    for number, message in enumerate(messages):
        called |= {call["id"] for call in message.get("tool_calls", ()) if "id" in call}
        if called and message["role"] == "tool" and message.get("tool_call_id", "") not in {"", *called}:
            raise DataError(f"{place}, message {number}: no earlier call has the id {short(message['tool_call_id'])}")


def _order_results(messages: list[Message], place: str) -> None:
    """Put results that name their calls into the order of these, since many templates print no ids.

    Raises DataError if images stand in such results, since their marks would get those of others.
    """
    for start, message in enumerate(messages, 1):
        places = {call["id"]: place for place, call in enumerate(message.get("tool_calls", ())) if "id" in call}
        results = list(takewhile(lambda later: later["role"] == "tool", messages[start:])) if places else []
        if all(result.get("tool_call_id") in places for result in results):
            ordered = sorted(results, key=lambda one: places[one["tool_call_id"]])
            if ordered != results and any(TEXT_MARK in one["content"] for one in results):
                raise DataError(
                    f"{place}, message {start}: results with {TEXT_MARK} stand in another order than their calls; give "
                    "both in one order"
                )
            messages[start : start + len(results)] = ordered


def _bound_images(messages: Sequence[Message], place: str) -> None:
    """Raise DataError for a conversation with too many images, or too many bytes of them."""
    try:
        bound_images(images_of(messages))
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error


def with_images(messages: list[Message], row: dict[str, Any], place: str, folder: Path | None) -> list[Message]:
    """Return messages with the images of the row's column ``images`` at their marks. Raises DataError.

    verl's column is a list of ``{"bytes", "path"}``; data URLs and paths will do, too.
    """
    refuse_media(row, place)
    given = row.get("images")
    if not given:
        return messages
    place = f"{place}, column images"
    if not isinstance(given, list):
        raise DataError(f"{place}: needs a list of images, got {short(given)}")
    try:
        found = placed([message["content"] for message in messages], [read_image(image, folder) for image in given])
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error
    placed_messages = [
        message | ({"content": content, "images": images} if images else {})
        for message, (content, images) in zip(messages, found, strict=True)
    ]
    _bound_images(placed_messages, place)
    return placed_messages


def for_templates(messages: list[Message]) -> list[Message]:
    """Return messages with the arguments of calls as mappings, which most chat templates print."""
    return [
        message | {"tool_calls": [_with_mapping(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def refuse_media(row: dict[str, Any], place: str) -> None:
    """Raise DataError for sound or films beside the text of a row or of a message, and for ``image``."""
    if key := next((key for key in _MEDIA if row.get(key)), None):
        raise DataError(f"{place}: has {key}; models read text and images here, so leave it out, or the row")
    if row.get("image"):
        raise DataError(f"{place}: has image; write a list of them, images, and <image> where each stands")


def refuse_lost(row: dict[str, Any], messages: Sequence[Message], place: str) -> None:
    """Raise DataError for a column beside the conversation that would change its prompt and is not read.

    That is a system message that the conversation does not have, and TRL's options of the chat template.
    """
    for name in _SYSTEM:
        text = said.strip() if isinstance(said := row.get(name), str) else ""
        if text and not any(one["role"] in ("system", "developer") or text in one["content"] for one in messages):
            raise DataError(
                f"{place}: the conversation has no system message, and column {name} would be lost; make it the first "
                f"message, as by data.path=[{{path: FILE, system: '{{{name}}}'}}], or leave the column out"
            )
    if row.get("chat_template_kwargs"):
        raise DataError(f"{place}: chat_template_kwargs is not supported; the template's defaults apply to all rows")


def _message(value: Any, place: str, folder: Path | None) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"{place}: needs {{role, content}}, got {short(value)}")
    message = {key: part for key, part in value.items() if part is not None}
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{place}: unknown role {short(role)}; known: {', '.join(ROLES)}")
    if "function_call" in message:
        raise DataError(f"{place}: function_call is OpenAI's old form; write tool_calls")
    if unread := next((key for key in _UNREAD if message.get(key)), None):
        raise DataError(f"{place}: has {unread}, which is not read; known: content, tool_calls, reasoning_content")
    refuse_media(message, place)
    if odd := next((key for key in _TEXTS if not isinstance(message.get(key, ""), str)), None):
        raise DataError(f"{place}: needs its {odd} as text, got {short(message[odd])}")
    calls = message.pop("tool_calls", None) or []
    try:
        message = canonical({"content": ""} | message, folder)
    except ValueError as error:
        raise DataError(f"{place}: {error}, got {short(value)}") from error
    content = message["content"]
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
    if problem := depth_problem(found) or lost_when_read(value):
        raise DataError(f"{place}: {problem}")
    return value


def _with_mapping(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": msgspec.json.decode(function["arguments"])}}


PromptLength = Callable[[Task], int]
# By the name that a config or a task gives the tool.
Schemas = Mapping[str, dict[str, Any]]

# In a run's folder: the schemas of the tools that tasks may name.
TOOLS_FILE = "tools.json"
# Tokens that a template prints around a message or call, at most.
PER_MESSAGE = 32
_NOTHING: Message = {"role": "user", "content": "x"}


def read_schemas(run: Path) -> Schemas:
    """Read the schemas that the launcher wrote; none if it did not start this process.

    Raises UserError, naming the file, if it is damaged.
    """
    file = run / TOOLS_FILE
    if not file.is_file():
        return {}
    with undamaged(file):
        return msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Any]])


def prompt_length(config: RunConfig, schemas: Schemas) -> PromptLength:
    """Return a bound on a prompt's tokens, exact if it may exceed ``data.max_prompt_tokens``.

    Only then, or for images, the tokenizer is loaded. The tools of MCP servers and environments are unknown until an
    episode begins.
    """
    longest, template = config.data.max_prompt_tokens, _template_bytes(Path(config.model.path))
    exact: list[_Tokenizer] = []

    def length(task: Task) -> int:
        names = config.agent.tools if task.tools is None else task.tools
        tools = [schemas[name] for name in names if name in schemas]
        if images_of(task.prompt):
            if not exact:
                exact.append(_Tokenizer(config.model.path))
            return exact[0].count(task.prompt, tools)
        said = _bound(task.prompt)
        if (bound := said + template + len(json.dumps(tools, ensure_ascii=False).encode())) <= longest:
            return bound
        if not exact:
            exact.append(_Tokenizer(config.model.path))
        if (bound := said + exact[0].added(tools)) <= longest:
            return bound
        return exact[0].count(task.prompt, tools)

    return length


def _bound(messages: Sequence[Message]) -> int:
    """Bound the tokens of messages alone: a token has at least one byte."""
    return sum(len(msgspec.json.encode(message)) + PER_MESSAGE for message in messages)


def _template_bytes(model: Path) -> int:
    """Return the size of the files that may have a model's chat template, which always prints a part of itself."""
    own = model / "chat_template.jinja"
    files = [own] if own.is_file() else [model / "tokenizer_config.json"]
    return sum(file.stat().st_size for file in files if file.is_file())


class _Tokenizer:
    def __init__(self, model: str) -> None:
        from transformers import PreTrainedTokenizerFast

        from rl_async.template_tokens import TemplateTokens

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        self._tokens = TemplateTokens(self._tokenizer)
        self._added: dict[str, int] = {}
        self._model = model
        self._pictures: PictureProcessor | None = None

    def added(self, tools: Sequence[dict[str, Any]]) -> int:
        """Return the tokens that the template prints of itself and the tools, around the shortest conversation."""
        key = json.dumps(tools)
        if key not in self._added:
            self._added[key] = self.count([_NOTHING], tools)
        return self._added[key]

    def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        """Count the tokens of a prompt, with those of its images.

        The sizes of images are read from their headers. Raises DataError if the template refuses the prompt, and for
        images that the model or its template does not read.
        """
        import jinja2

        from rl_async.template_tokens import MISFITS

        given = [as_parts(message) for message in messages]
        try:
            text = self._render(for_templates(given), tools)
        except (jinja2.TemplateError, *MISFITS):
            # Some templates take arguments as text.
            try:
                text = self._render(given, tools)
            except (jinja2.TemplateError, *MISFITS) as error:
                raise DataError(f"the model's chat template refuses it: {error}") from error
        ids, images = self._tokens.encode(text), images_of(messages)
        if not images:
            return len(ids)
        self._pictures = self._pictures or PictureProcessor.load(self._model)
        if self._pictures is None:
            raise DataError(f"has images, and model.path={self._model} reads text only")
        return len(self._pictures.expand(ids, images, Want.HEADER)[0])

    def _render(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> str:
        escaped = [self._tokens.escape(message) for message in messages]
        offered = [self._tokens.escape(tool) for tool in tools]
        return str(
            self._tokenizer.apply_chat_template(
                escaped, tools=offered or None, tokenize=False, add_generation_prompt=True
            )
        )
