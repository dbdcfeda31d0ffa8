"""Anthropic's dialect: messages requests in; messages, events and errors out. Pure."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from rl_async.agent_loop.gateway.chat import UNREADABLE, ChatMessage, ChatRequest, Completion, FunctionCall
from rl_async.agent_loop.gateway.openai import Limit, unsupported
from rl_async.errors import RequestRefused

IGNORED = frozenset({"metadata", "service_tier"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Block(msgspec.Struct):
    """A content block: text, tool_use or tool_result."""

    type: str
    text: str = ""
    name: str = ""
    id: str = ""
    tool_use_id: str = ""
    input: dict[str, Any] = {}
    content: "str | list[Block] | None" = None


class AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""


class MessagesBody(msgspec.Struct):
    """The fields of a request that have an effect."""

    messages: list[AnthropicMessage]
    max_tokens: Limit
    model: str = ""
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: Any = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def read_request(body: bytes) -> ChatRequest:
    """Decode a messages request. Raises RequestRefused naming a field that is not supported."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        wanted = msgspec.json.decode(body, type=MessagesBody)
    except UNREADABLE as error:
        raise RequestRefused(str(error), code="invalid_request") from error
    for name, value in fields.items():
        if value is None or (name in MessagesBody.__struct_fields__ and name not in NEUTRAL) or name in IGNORED:
            continue
        if value not in NEUTRAL.get(name, ()):
            raise unsupported(name, value)
    system = [ChatMessage("system", _text(wanted.system))] if wanted.system else []
    tools = [] if wanted.tool_choice == {"type": "none"} else wanted.tools or []
    return ChatRequest(
        messages=[*system, *(m for body in wanted.messages for m in _messages(body))],
        tools=[_schema(tool) for tool in tools],
        stops=[stop for stop in wanted.stop_sequences or [] if stop],
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        stream=bool(wanted.stream),
        usage=True,
        model=wanted.model,
    )


def _messages(body: AnthropicMessage) -> Iterator[ChatMessage]:
    """Convert a message for chat templates, in which tool results are messages of their own."""
    if isinstance(body.content, str):
        yield ChatMessage(body.role, body.content)
        return
    if body.role == "assistant":
        calls = [
            FunctionCall(b.name, msgspec.json.encode(b.input).decode(), b.id)
            for b in body.content
            if b.type == "tool_use"
        ]
        yield ChatMessage(body.role, _text([b for b in body.content if b.type != "tool_use"]), tuple(calls))
        return
    for block in body.content:
        if block.type == "tool_result":
            yield ChatMessage("tool", _text(block.content), answers=block.tool_use_id)
    if rest := [block for block in body.content if block.type != "tool_result"]:
        yield ChatMessage(body.role, _text(rest))


def _text(content: str | list[Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    other = [block.type for block in content if block.type != "text"]
    if other:
        raise RequestRefused(f"content of type {other[0]} is not supported", code="unsupported_value", param="messages")
    return "".join(block.text for block in content)


def _schema(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def message(done: Completion, episode: str, model: str) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    return _head(done, episode, model) | {
        "content": _blocks(done),
        "stop_reason": _stop_reason(done),
        "usage": {"input_tokens": done.prompt_tokens, "output_tokens": done.sampled_tokens},
    }


def events(done: Completion, episode: str, model: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer."""
    usage = {"input_tokens": done.prompt_tokens, "output_tokens": 0}
    yield {"type": "message_start", "message": _head(done, episode, model) | {"content": [], "usage": usage}}
    for index, block in enumerate(_blocks(done)):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = msgspec.json.encode(block["input"]).decode()
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": _stop_reason(done), "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": done.sampled_tokens}}
    yield {"type": "message_stop"}


def error_body(error: RequestRefused) -> dict[str, Any]:
    """Return the body of an error response, as Anthropic's clients expect it."""
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(error.status, "invalid_request_error")
    kind = "overloaded_error" if error.status >= 500 else kind
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _head(done: Completion, episode: str, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{episode}_{done.number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks(done: Completion) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": done.message.text}] if done.message.text else []
    calls = [
        {
            "type": "tool_use",
            "id": call.id or f"toolu_{done.number}_{i}",
            "name": call.name,
            "input": msgspec.json.decode(call.arguments),
        }
        for i, call in enumerate(done.message.calls)
    ]
    return [*text, *calls]


def _stop_reason(done: Completion) -> str:
    return "tool_use" if done.message.calls else STOP_REASONS[done.finish_reason]
