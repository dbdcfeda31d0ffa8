"""Chat messages, requests and answers in one form, independent of the dialect.

``Field`` tables list the fields of each dialect's requests that a run cannot obey, and how to treat them. A
``JsonFormat`` is the schema that an answer is to have. Everything here is pure. To add a dialect, write its requests
and answers in a file beside `openai.py`, its fields in a table here, and its routes in `server.py`.
"""

import hashlib
import logging
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import msgspec

from rl_async.agent_loop.chat_formats.format import Answer
from rl_async.configs.schema.rollout import UnsupportedFields
from rl_async.errors import RequestRefused
from rl_async.files import UNDECODABLE, has_more_values
from rl_async.rollout_server.json_schemas import without_unknown_formats
from rl_async.transfer_queue.images import IMAGE_PARTS, MARK, read_image

log = logging.getLogger("rl_async.gateway")

# So many pairs of client and field are counted apart, since clients choose both names.
COUNTED = 1000
# A request may have so many fields: clients choose their names, and each is looked up.
MOST_FIELDS = 256
# A request may have so many JSON values: parsing them holds up all episodes, by some 80 ms.
MOST_VALUES = 200_000
# Logs and refusals quote so many characters of a name or value.
SHOWN = 80


class Field(NamedTuple):
    """A field that a run does not obey. ``neutral`` values ask for the default behaviour, as any value does if None.

    Other values are refused with ``code`` if they would change the meaning of an answer; ``way_out`` then says what to
    do instead. Without a ``way_out``, `agent.gateway.unsupported` decides.
    """

    neutral: tuple[Any, ...] | None = ()
    way_out: str = ""
    code: str = "unsupported_value"


_NO_EFFECT = Field(None)
_LOGPROBS = "leave it out: rows have the log-probability of every sampled token, but answers have none"
_TEXT_ONLY = "leave it out: the policy writes text only"
_NOT_READ = "leave it out: the policy reads text and images"
_SERVER_TOOL = "leave it out: the gateway runs no tools; offer a function that your program runs"
OWN_TURN = "the policy samples whole turns; end with a user's message or a tool's result, and say there how to begin"
_SAMPLING: dict[str, Field] = {
    "top_k": Field((0, -1)),
    "min_p": Field((0,)),
    "frequency_penalty": Field((0,)),
    "presence_penalty": Field((0,)),
    "repetition_penalty": Field((1,)),
    "length_penalty": Field((1,)),
    "logit_bias": Field(({},)),
    "min_tokens": Field((0,)),
    "ignore_eos": Field((False,)),
    "stop_token_ids": Field(([],)),
    "use_beam_search": Field((False,)),
    "skip_special_tokens": Field((True,)),
    "spaces_between_special_tokens": Field((True,)),
    "include_stop_str_in_output": Field((False,)),
}
# Fields that no table lists and no dialect reads are not obeyed either.
OPENAI: dict[str, Field] = {
    # A seed would make the members of a group equal, which leaves nothing to compare.
    **dict.fromkeys(("seed", "user", "metadata", "store", "service_tier", "safety_identifier"), _NO_EFFECT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prediction"), _NO_EFFECT),
    **_SAMPLING,
    "response_format": Field(({"type": "text"},)),
    "verbosity": Field(("medium",)),
    "parallel_tool_calls": Field((True,)),
    "tool_choice": Field(("auto", "none")),
    "chat_template_kwargs": Field(({},)),
    "n": Field((1,), "send more requests instead: each answer to the same messages is a row of its own"),
    "best_of": Field((1,), "send more requests instead, and choose among the answers"),
    "logprobs": Field((False,), _LOGPROBS),
    "top_logprobs": Field((0,), _LOGPROBS),
    "prompt_logprobs": Field((), _LOGPROBS),
    "modalities": Field((["text"],), _TEXT_ONLY),
    "audio": Field((), _TEXT_ONLY),
    "functions": Field(([],), "use tools"),
    "function_call": Field(("auto", "none"), "use tools and tool_choice"),
    "web_search_options": Field((), _SERVER_TOOL),
    "chat_template": Field((), "leave it out: the run's model has one (docs/reference/chat_formats.md)"),
    "add_generation_prompt": Field((True,), OWN_TURN),
    "continue_final_message": Field((False,), OWN_TURN),
}
COMPLETIONS: dict[str, Field] = {
    **dict.fromkeys(("seed", "user", "metadata", "store", "service_tier", "safety_identifier"), _NO_EFFECT),
    **_SAMPLING,
    "n": OPENAI["n"],
    "best_of": OPENAI["best_of"],
    "logprobs": Field((), _LOGPROBS),
    "prompt_logprobs": OPENAI["prompt_logprobs"],
    "echo": Field((False,), "leave it out: your program has the prompt"),
    "suffix": Field(("",), "the policy continues a prompt; it fills no gaps"),
    "add_special_tokens": Field((False,)),
}
RESPONSES: dict[str, Field] = {
    **dict.fromkeys(("metadata", "user", "service_tier", "safety_identifier", "client_metadata"), _NO_EFFECT),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), _NO_EFFECT),
    # These concern OpenAI's own network and tools.
    **dict.fromkeys(("stream_options", "max_tool_calls"), _NO_EFFECT),
    **_SAMPLING,
    "reasoning": Field(({}, {"summary": "auto"})),
    "truncation": Field(("disabled",)),
    "parallel_tool_calls": Field((True,)),
    "tool_choice": Field(("auto", "none")),
    "top_logprobs": Field((0,), _LOGPROBS),
    "background": Field((False,), "leave it out: an answer comes with its request, or as a stream"),
    "conversation": Field((), "name the previous response instead (previous_response_id)"),
    "prompt": Field((), "leave it out: nothing is stored here; send instructions and input"),
}
# The members of `text`.
RESPONSES_TEXT: dict[str, Field] = {"format": Field(({}, {"type": "text"})), "verbosity": Field(("medium",))}
ANTHROPIC: dict[str, Field] = {
    **dict.fromkeys(("metadata", "service_tier", "cache_control", "inference_geo"), _NO_EFFECT),
    **_SAMPLING,
    "tool_choice": Field(
        tuple(
            {"type": kind, **more} for kind in ("auto", "none") for more in ({}, {"disable_parallel_tool_use": False})
        )
    ),
    # The vendor's client knows this code, and sends whole conversations from then on.
    "thread": Field((), "send the whole conversation in each request", "thread_unsupported_request"),
    "context_management": Field(({}, {"edits": []})),
    "output_config": Field(({},)),
    "mcp_servers": Field(([],), _SERVER_TOOL),
    "container": Field((), _SERVER_TOOL),
}


def unobeyed(fields: Mapping[str, Any], read: Collection[str], table: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields that a run does not obey. The fields in ``read`` have an effect.

    Raises RequestRefused for a field that cannot be ignored without changing the answer, and for too many fields.
    """
    if len(fields) > MOST_FIELDS:
        raise RequestRefused(f"there are more than {MOST_FIELDS} fields", code="invalid_request")
    found = {}
    for name, value in fields.items():
        if value is None or (name in read and name not in table):
            continue
        field = table.get(name, Field())
        if field.neutral is None or value in field.neutral or _given(value) in field.neutral:
            continue
        if field.way_out:
            raise not_supported(f"{name[:SHOWN]}={_shown(value)}", field.way_out, name, field.code)
        found[name] = value
    return found


def _given(value: Any) -> Any:
    """Return the value without null members, which clients write for options that they leave unset."""
    if not isinstance(value, dict):
        return value
    return {name: _given(member) for name, member in value.items() if member is not None}


def not_supported(what: str, way_out: str, param: str = "messages", code: str = "unsupported_value") -> RequestRefused:
    """Return the refusal of ``what``, which says what to do instead."""
    return RequestRefused(f"{what} is not supported: {way_out}", code=code, param=param)


def tool_refused(kind: str) -> RequestRefused:
    """Return the refusal of a tool that the agent program does not run."""
    return not_supported(f"a tool of type {kind[:SHOWN]}", _SERVER_TOOL, "tools")


class UnobeyedFields:
    """Drops, counts and logs fields that cannot be obeyed, or refuses them (`agent.gateway.unsupported`)."""

    def __init__(self, choice: UnsupportedFields) -> None:
        self._choice = choice
        # Requests by client and field.
        self.dropped: Counter[tuple[str, str]] = Counter()

    def settle(self, fields: Mapping[str, Any], client: str) -> None:
        """Drop and count ``fields`` of a request of ``client``. Raises RequestRefused if they are to be refused."""
        for name, value in fields.items():
            if self._choice == "refuse":
                raise not_supported(
                    f"{name[:SHOWN]}={_shown(value)}",
                    f"tokens are trained on, so they come from the run's own distribution; leave {name[:SHOWN]} out, "
                    "or let the gateway drop it: agent.gateway.unsupported=ignore (fields: docs/how-to/gateway.md)",
                    name,
                )
            key = (client[:SHOWN], name[:SHOWN])
            if key not in self.dropped and len(self.dropped) >= COUNTED:
                key = ("others", "others")
            self.dropped[key] += 1
            if self.dropped[key] == 1:
                log.warning(
                    "%r asks for %r=%s, which the gateway ignores (agent.gateway.unsupported)", *key, _shown(value)
                )

    def listing(self) -> list[dict[str, Any]]:
        """Return how many requests of each client had which field, the most frequent first."""
        return [
            {"client": client, "field": field, "requests": requests}
            for (client, field), requests in self.dropped.most_common()
        ]


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:SHOWN]


class JsonFormat(NamedTuple):
    """A format as a JSON schema (text), the request's ``field`` and value ``given``, and the place of the schema."""

    schema: str
    field: str
    given: Any
    place: str

    def refused(self, reason: str) -> RequestRefused:
        """Return the refusal of a schema, which names its place in the request."""
        return RequestRefused(f"{self.place}: {reason}", code="invalid_request", param=self.place)


def take_format(asked: dict[str, Any], field: str, member: str = "") -> JsonFormat | None:
    """Remove and return the JSON format in ``field``, or in its ``member``, among the fields ``asked``, or None.

    The field's other members stay. A format without a schema accepts any object. Raises RequestRefused, naming the
    place, for a schema that is not an object.
    """
    value: Any = asked.get(field)
    given: Any = value.get(member) if member and isinstance(value, dict) else value
    name = f"{field}.{member}" if member else field
    match given:
        case {"type": "json_object"}:
            schema, place = {"type": "object"}, name
        # Chat completions nest the schema.
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            place = f"{name}.json_schema.schema"
        case {"type": "json_schema", "schema": dict(schema)}:
            place = f"{name}.schema"
        case {"type": "json_schema", "json_schema": {"schema": _}} | {"type": "json_schema", "schema": _}:
            place = f"{name}.json_schema.schema" if "json_schema" in given else f"{name}.schema"
            raise RequestRefused(f"{place} must be an object: a JSON schema", code="invalid_request", param=place)
        case {"type": "json_schema"}:
            schema, place = {"type": "object"}, name
        case _:
            return None
    del asked[field]
    if member and (rest := {key: other for key, other in value.items() if key != member and other is not None}):
        asked[field] = rest
    return JsonFormat(msgspec.json.encode(without_unknown_formats(schema)).decode(), name, given, place)


ASSISTANT = "assistant"
# An event of a streamed answer, and the ping of dialects without one.
Event = dict[str, Any]
COMMENT = b": ping\n\n"
# The place and the field that msgspec's errors name.
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]+)`")
Body = TypeVar("Body", bound=msgspec.Struct)
# Limits on stop strings, which are searched for whenever tokens are sampled. OpenAI takes four.
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1000


class Part(msgspec.Struct):
    """A part of a message's content: a text, or an image, in ``image_url`` (OpenAI's) or ``source`` (Anthropic's)."""

    type: str
    text: str | msgspec.UnsetType = msgspec.UNSET
    image_url: Any = None
    source: Any = None


class FunctionCall(msgspec.Struct, frozen=True):
    """One call of a client's tool. ``arguments`` is JSON text; ``id`` is the model's or the client's, if it has one."""

    name: str
    arguments: str
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. ``role`` is system, user, assistant or tool; only assistant messages have calls.

    ``answers`` is the optional id of the call whose result a tool message is. Only sampled answers have ``reasoning``,
    and clients may leave it out when they send the answer back. ``text`` has a mark for each of the ``images``
    (``transfer_queue/images.py``).
    """

    role: str
    text: str
    calls: tuple[FunctionCall, ...] = ()
    reasoning: str = ""
    answers: str = ""
    images: tuple[bytes, ...] = ()

    def identity(self) -> bytes:
        """Hash the message without ids, so that it equals the one a client sends back, trimmed or with other JSON."""
        text = self.text.strip() if self.role == ASSISTANT else self.text
        calls = [[call.name, _canonical(call.arguments)] for call in self.calls]
        images = [hashlib.sha256(image).hexdigest() for image in self.images]
        return hashlib.sha256(msgspec.json.encode([self.role, text, calls, *images])).digest()


class ChatRequest(NamedTuple):
    """A request of any dialect; None means that the field was not given.

    ``usage`` asks for the usage in a stream, and ``reasoning`` for the reasoning. ``unobeyed`` fields ask for behaviour
    that the run does not have, except for the JSON ``format``. The answer must call the function ``forces``, or any
    function if that is empty; if it is None, the policy decides. ``size`` is that of the body in bytes, and
    ``conversation`` the name of the field with the messages.
    """

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    stops: list[str]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool
    usage: bool
    model: str
    reasoning: bool = True
    unobeyed: Mapping[str, Any] = {}
    format: JsonFormat | None = None
    forces: str | None = None
    size: int = 0
    conversation: str = "messages"


def read_fields(body: bytes, kind: type[Body]) -> tuple[dict[str, Any], Body]:
    """Decode a request's body: all of its fields, and those that have an effect.

    Raises RequestRefused, whose ``param`` names the field that is not of its type, and for too many values.
    """
    refuse_many_values(body)
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        return fields, msgspec.convert(fields, kind)
    except UNDECODABLE as error:
        raise unreadable(error) from error


def refuse_many_values(text: bytes | str, param: str | None = None) -> None:
    """Raise RequestRefused if JSON at the place ``param`` of a request has more than MOST_VALUES values."""
    if has_more_values(text.encode(errors="replace") if isinstance(text, str) else text, MOST_VALUES):
        raise RequestRefused(
            f"{param or 'the body'}: more than {MOST_VALUES} JSON values; send fewer messages, parts or members",
            code="body_too_large",
            status=413,
            param=param,
        )


def unreadable(error: Exception) -> RequestRefused:
    """Return the refusal of a body that cannot be decoded; its ``param`` names the faulty field, if known."""
    place, field = _PLACE.search(str(error)), _FIELD.match(str(error))
    names = [found[1] for found in (place, field) if found and found[1]]
    return RequestRefused(str(error), code="invalid_request", param=".".join(names) or None)


def refused(place: str, reason: str) -> RequestRefused:
    """Return the refusal of a field's value; ``param`` is its ``place``."""
    return RequestRefused(f"{place}: {reason}", code="invalid_request", param=place)


def content_of(
    content: str | Sequence[Part] | None,
    place: str,
    kinds: Sequence[str] = ("text",),
    other: Sequence[str] = (),
    dropped: str = "\0",
) -> tuple[str, tuple[bytes, ...]]:
    """Return the text of a content at ``place``, with a mark for each image, and its images.

    Texts of the parts of ``kinds`` come in lines of their own, as vLLM joins them, but without a separator beside
    images, as chat templates print parts. Those that begin with ``dropped`` are left out, and parts of ``other`` kinds
    are read elsewhere. Raises RequestRefused for any other part, and for one without its text or image.
    """
    if content is None or isinstance(content, str):
        return content or "", ()
    texts, images = list[str](), list[bytes]()
    for number, part in enumerate(content):
        if part.type in other:
            continue
        if part.type in IMAGE_PARTS:
            try:
                images.append(read_image(part.image_url or part.source))
            except ValueError as error:
                raise refused(f"{place}[{number}]", str(error)) from error
            texts.append(MARK)
            continue
        if part.type not in kinds:
            raise not_supported(f"content of type {part.type[:SHOWN]}", _NOT_READ, f"{place}[{number}]")
        if part.text is msgspec.UNSET:
            raise refused(f"{place}[{number}].text", "this part has no text")
        if not part.text.startswith(dropped):
            texts.append(part.text)
    text = ("" if images else "\n").join(texts)
    if images and text.count(MARK) != len(images):
        raise refused(place, "a text has the character U+FFFC, which stands for an image here; take it out")
    return text, tuple(images)


def text_of(content: str | Sequence[Part] | None, place: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content, as `content_of` does. Raises RequestRefused for images, too."""
    text, images = content_of(content, place, kinds)
    if images:
        raise not_supported("an image here", "send it in a user's message or in a tool's result", place)
    return text


def stops_of(given: str | Sequence[str] | None, field: str) -> list[str]:
    """Return the stop strings in a ``field``. Raises RequestRefused if they are too many or too long."""
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
    """Return the name of the function that an answer must call, "" for any, or None without tools.

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
    """Match each tool message, by its position, to its call: the one with the id that it names, or else the next one.

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

    Clients run calls concurrently and send results as they come, so their order says nothing about the policy.
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
