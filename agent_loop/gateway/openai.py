"""OpenAI's dialects: chat completions, and the oldest, which continues a bare prompt. Pure, but for the tokenizer.

A bare prompt is encoded without the chat template, like the text of a template: control tokens that it spells count
as such, since its author takes the template's place.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rl_async.agent_loop.chat_formats.format import (
    Answer,
    ChatFormat,
    SampledTurn,
    Settled,
    before_stops,
    without_beginnings,
)
from rl_async.agent_loop.gateway.chat import (
    ASSISTANT,
    COMMENT,
    COMPLETIONS,
    OPENAI,
    ChatMessage,
    ChatRequest,
    Completion,
    Event,
    FunctionCall,
    Part,
    content_of,
    forceable,
    named,
    not_supported,
    read_fields,
    refuse_many_values,
    refused,
    stops_of,
    take_format,
    text_of,
    tool_refused,
    unobeyed,
)
from rl_async.errors import RequestRefused
from rl_async.files import UNDECODABLE

Limit = Annotated[int, msgspec.Meta(ge=1)]
# Other fields of an assistant's message with something it said, and how to send that instead.
SAID_OTHERWISE = {
    "function_call": "send it as one of tool_calls, and its result in a message of role tool",
    "audio": "the policy reads text only; send the transcript as content",
}


class Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class ToolCallBody(msgspec.Struct):
    function: Function
    id: str | None = None


class OpenAIMessage(msgspec.Struct):
    """A message. Fields that no chat template prints are ignored, except for the assistant's in SAID_OTHERWISE."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


class ForcedCall(msgspec.Struct):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"]
    function: Function


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatBody(msgspec.Struct):
    """The fields of a request that have an effect."""

    messages: list[OpenAIMessage]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


def read_request(body: bytes) -> ChatRequest:
    """Decode a chat completion request. Raises RequestRefused naming a field that is not supported."""
    fields, chat = read_fields(body, ChatBody)
    limits = [limit for limit in (chat.max_tokens, chat.max_completion_tokens) if limit is not None]
    tools = [] if chat.tool_choice == "none" else [_tool(tool) for tool in chat.tools or []]
    asked = unobeyed(fields, ChatBody.__struct_fields__, OPENAI)
    if (forces := forceable(_forced(chat.tool_choice), tools)) is not None:
        del asked["tool_choice"]
    return ChatRequest(
        messages=[_message(message, place) for place, message in enumerate(chat.messages)],
        tools=tools,
        stops=stops_of(chat.stop, "stop"),
        max_tokens=min(limits, default=None),
        temperature=chat.temperature,
        top_p=chat.top_p,
        stream=bool(chat.stream),
        usage=bool(chat.stream_options and chat.stream_options.include_usage),
        model=chat.model,
        format=take_format(asked, "response_format"),
        unobeyed=asked,
        size=len(body),
        forces=forces,
    )


def _forced(choice: Any) -> str | None:
    """Return the name of the function that must be called, "" for any function, or None if no call is forced."""
    if choice == "required":
        return ""
    try:
        return named(msgspec.convert(choice, ForcedCall).function.name)
    except msgspec.ValidationError:
        return None


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool that is a function. Raises RequestRefused for any other."""
    if (kind := tool.get("type", "function")) != "function":
        raise tool_refused(str(kind))
    function = tool.get("function")
    if not isinstance(function, dict) or not (isinstance(function.get("name"), str) and function["name"]):
        raise RequestRefused("a tool has no function with a name", code="invalid_request", param="tools")
    return tool


def _message(body: OpenAIMessage, place: int) -> ChatMessage:
    for name, way_out in SAID_OTHERWISE.items():
        if getattr(body, name) is not None:
            raise not_supported(f"{name} in a message", way_out, f"messages[{place}].{name}")
    role, at = "system" if body.role == "developer" else body.role, f"messages[{place}]"
    if role != ASSISTANT and not body.content and body.content != "":
        raise refused(f"{at}.content", f"a message of role {body.role} needs a content")
    if role != ASSISTANT and body.tool_calls:
        raise refused(f"{at}.tool_calls", f"a message of role {body.role} calls nothing")
    made = tuple(_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(body.tool_calls or []))
    if role == ASSISTANT:
        return ChatMessage(role, text_of(body.content, f"{at}.content") or body.refusal or "", made)
    text, images = content_of(body.content, f"{at}.content")
    return ChatMessage(role, text or body.refusal or "", answers=body.tool_call_id or "", images=images)


def _call(body: ToolCallBody, place: str) -> FunctionCall:
    name, arguments = body.function.name, body.function.arguments or "{}"
    if not name:
        raise refused(f"{place}.function.name", "the name is empty")
    refuse_many_values(arguments, f"{place}.function.arguments")
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except UNDECODABLE as error:
        raise refused(f"{place}.function.arguments", f"they must be a JSON object: {error}") from error
    return FunctionCall(name, arguments, body.id or "")


def completion(done: Completion, episode: str, model: str) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": done.message.text, "refusal": None}
    if done.message.calls:
        message |= {"content": done.message.text or None, "tool_calls": calls(done)}
    if done.message.reasoning:
        message["reasoning_content"] = done.message.reasoning
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(done)}
    return head(done.number, episode, model, "chat.completion") | {"choices": [choice], "usage": usage(done)}


def finish_reason(done: Completion) -> str:
    """Return ``tool_calls`` for an answer with calls, else why the engine stopped."""
    return "tool_calls" if done.message.calls else done.finish_reason


def model_entry(name: str) -> dict[str, Any]:
    """Return the description of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "rl-async"}


def models(names: Sequence[str]) -> dict[str, Any]:
    """Return the response that lists the models."""
    return {"object": "list", "data": [model_entry(name) for name in names]}


def error_body(error: RequestRefused) -> dict[str, Any]:
    """Return the body of an error response, as OpenAI's clients expect it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def head(number: int, episode: str, model: str, kind: str) -> dict[str, Any]:
    """Return the fields that answers and chunks begin with."""
    return {"id": f"chatcmpl-{episode}-{number}", "object": kind, "created": int(time.time()), "model": model}


def calls(done: Completion) -> list[dict[str, Any]]:
    """Return the calls of an answer."""
    return [
        {
            "id": call.id or f"call_{done.number}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(done.message.calls)
    ]


def usage(done: Completion) -> dict[str, int]:
    """Return the numbers of tokens."""
    total = done.prompt_tokens + done.sampled_tokens
    return {"prompt_tokens": done.prompt_tokens, "completion_tokens": done.sampled_tokens, "total_tokens": total}


class ChatStream:
    """The chunks of a chat completion, with ``usage`` in the last one if asked for."""

    named, ping, last = False, COMMENT, b"data: [DONE]\n\n"

    def __init__(self, number: int, episode: str, model: str, *, usage: bool) -> None:
        self._head = head(number, episode, model, "chat.completion.chunk")
        self._usage = usage

    def begin(self) -> Iterator[Event]:
        """Say who speaks."""
        yield self._chunk({"role": "assistant", "content": ""})

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Append to the reasoning, then to the text."""
        if reasoning:
            yield self._chunk({"reasoning_content": reasoning})
        if text:
            yield self._chunk({"content": text})

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of reasoning and text, then calls and why the answer ended."""
        yield from self.more(reasoning, text)
        for place, call in enumerate(calls(done)):
            yield self._chunk({"tool_calls": [{"index": place, **call}]})
        yield self._chunk({}, finish_reason(done))
        if self._usage:
            yield self._head | {"choices": [], "usage": usage(done)}

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the error."""
        yield error_body(error)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._head | {"choices": [choice]}


# OpenAI's default.
MAX_TOKENS = 16

Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(min_length=1)]


class CompletionBody(msgspec.Struct):
    """The fields of a request that have an effect."""

    prompt: Any
    model: str = ""
    max_tokens: Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


def read_prompt(body: bytes) -> tuple[ChatRequest, str | list[int]]:
    """Decode a request: one without messages, and its prompt. Raises RequestRefused naming a field."""
    fields, wanted = read_fields(body, CompletionBody)
    request = ChatRequest(
        messages=[],
        tools=[],
        stops=stops_of(wanted.stop, "stop"),
        max_tokens=wanted.max_tokens or MAX_TOKENS,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        stream=bool(wanted.stream),
        usage=bool(wanted.stream_options and wanted.stream_options.include_usage),
        model=wanted.model,
        size=len(body),
        conversation="prompt",
        unobeyed=unobeyed(fields, CompletionBody.__struct_fields__, COMPLETIONS),
    )
    return request, _prompt(wanted.prompt)


def _prompt(given: Any) -> str | list[int]:
    """Return the only prompt, as text or token ids."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    try:
        prompt: str | list[int] = msgspec.convert(given, str | Ids)
    except msgspec.ValidationError as error:
        raise RequestRefused(
            f"a prompt is a text or token ids, and there is one to a request: {error}",
            code="invalid_request",
            param="prompt",
        ) from error
    if not prompt:
        raise RequestRefused("the prompt is empty", code="invalid_request", param="prompt")
    return prompt


class PlainText:
    """Reads the continuation of a bare prompt, which has no reasoning and no calls."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat

    def parse(self, turn: SampledTurn) -> Answer:
        """Read all of it, up to the first stop string."""
        text = before_stops(self._chat.turn_text(turn.token_ids), turn.stops)
        return Answer(text, text, [])

    def settled(self, turn: SampledTurn) -> Settled:
        """Read the part before anything that may become a stop string."""
        text = before_stops(self._chat.turn_text(turn.token_ids), turn.stops)
        return Settled("", without_beginnings(text, turn.stops))


def continuation(done: Completion, episode: str, model: str) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    head = _head(done.number, episode, model)
    return head | {"choices": [_choice(done.message.text, done.finish_reason)], "usage": usage(done)}


class CompletionStream:
    """The chunks of a completion, with ``usage`` in the last one if asked for."""

    named, ping, last = False, COMMENT, b"data: [DONE]\n\n"

    def __init__(self, number: int, episode: str, model: str, *, usage: bool) -> None:
        self._head, self._usage = _head(number, episode, model), usage

    def begin(self) -> Iterator[Event]:
        """Send nothing, since every chunk has a text."""
        yield from ()

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Send the part of the text that is new."""
        if text:
            yield self._head | {"choices": [_choice(text, None)]}

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of the text, and why it ended."""
        yield self._head | {"choices": [_choice(text, done.finish_reason)]}
        if self._usage:
            yield self._head | {"choices": [], "usage": usage(done)}

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the error."""
        yield error_body(error)


def _head(number: int, episode: str, model: str) -> dict[str, Any]:
    return head(number, episode, model, "text_completion") | {"id": f"cmpl-{episode}-{number}"}


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
