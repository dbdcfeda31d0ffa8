"""Anthropic's dialect: messages requests in; messages, events and errors out. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from rl_async.agent_loop.gateway.chat import (
    ANTHROPIC,
    ChatMessage,
    ChatRequest,
    Completion,
    Event,
    FunctionCall,
    Part,
    content_of,
    forceable,
    named,
    read_fields,
    refuse_many_values,
    refused,
    stops_of,
    take_format,
    tool_refused,
    unobeyed,
    unreadable,
)
from rl_async.agent_loop.gateway.openai import Limit
from rl_async.errors import RequestRefused
from rl_async.files import UNDECODABLE

THINKING = ("thinking", "redacted_thinking")
# A line of Claude Code's system prompt begins with this and differs in every request.
BILLING = "x-anthropic-billing-header"
# Clients keep the signature of a thinking block, and nobody checks it.
SIGNATURE = "cmwtYXN5bmM="
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Block(Part):
    """A content block: text, tool_use, tool_result, or thinking, which the policy need not be told again."""

    name: str = ""
    id: str = ""
    tool_use_id: str = ""
    input: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    content: "str | list[Block] | None" = None


class AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    """A tool that the program runs has a schema; the vendor's own have a type instead."""

    name: str = ""
    input_schema: dict[str, Any] | None = None
    description: str = ""
    type: str | None = None


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
    thinking: dict[str, Any] | None = None
    stream: bool | None = None


def read_count(body: bytes) -> ChatRequest:
    """Decode a request to count the tokens of a messages request; it has no ``max_tokens``."""
    refuse_many_values(body)
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except UNDECODABLE as error:
        raise unreadable(error) from error
    return read_request(msgspec.json.encode({"max_tokens": 1} | fields))


def read_request(body: bytes) -> ChatRequest:
    """Decode a messages request. Raises RequestRefused naming a field that is not supported."""
    fields, wanted = read_fields(body, MessagesBody)
    system, images = _content(wanted.system, "system")
    if images:
        raise refused("system", "it has an image; send it in a user's message")
    choice = wanted.tool_choice.get("type") if isinstance(wanted.tool_choice, dict) else wanted.tool_choice
    tools = [] if choice == "none" else [_schema(tool) for tool in wanted.tools or []]
    asked = unobeyed(fields, MessagesBody.__struct_fields__, ANTHROPIC)
    if (forces := forceable(_forced(wanted.tool_choice), tools)) is not None:
        del asked["tool_choice"]
        if wanted.tool_choice.get("disable_parallel_tool_use"):
            asked["tool_choice"] = {"disable_parallel_tool_use": True}
    return ChatRequest(
        messages=[
            *([ChatMessage("system", system)] if system else []),
            *(message for place, body in enumerate(wanted.messages) for message in _messages(body, place)),
        ],
        tools=tools,
        stops=stops_of(wanted.stop_sequences, "stop_sequences"),
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        stream=bool(wanted.stream),
        usage=True,
        model=wanted.model,
        reasoning=(wanted.thinking or {}).get("type", "disabled") != "disabled",
        format=take_format(asked, "output_config", "format") or take_format(asked, "output_format"),
        unobeyed=asked,
        size=len(body),
        forces=forces,
    )


def _forced(choice: Any) -> str | None:
    """Return the name of the function that must be called, "" for any function, or None if no call is forced."""
    match choice:
        case {"type": "any"}:
            return ""
        case {"type": "tool", "name": str(name)}:
            return named(name)
    return None


def _messages(body: AnthropicMessage, place: int) -> Iterator[ChatMessage]:
    """Convert a message for chat templates, which take tool results as messages of their own."""
    at = f"messages[{place}].content"
    if isinstance(body.content, str):
        yield ChatMessage(body.role, body.content)
        return
    if body.role == "assistant":
        calls = [_call(block, f"{at}[{n}]") for n, block in enumerate(body.content) if block.type == "tool_use"]
        said, images = _content(body.content, at, ("tool_use", *THINKING))
        if images:
            raise refused(at, "an image of the assistant; the policy writes text only")
        yield ChatMessage(body.role, said, tuple(calls))
        return
    if not body.content:
        raise refused(at, f"a message of role {body.role} needs a content")
    for number, block in enumerate(body.content):
        if block.type == "tool_result":
            result, images = _content(block.content, f"{at}[{number}].content")
            yield ChatMessage("tool", result, answers=block.tool_use_id, images=images)
    if any(block.type != "tool_result" for block in body.content):
        said, images = _content(body.content, at, ("tool_result",))
        yield ChatMessage(body.role, said, images=images)


def _call(block: Block, place: str) -> FunctionCall:
    if not block.name:
        raise refused(f"{place}.name", "a tool_use needs the name of the tool")
    if block.input is msgspec.UNSET:
        raise refused(f"{place}.input", "a tool_use needs the tool's input")
    return FunctionCall(block.name, msgspec.json.encode(block.input).decode(), block.id)


def _content(
    content: str | Sequence[Block] | None, place: str, other: Sequence[str] = ()
) -> tuple[str, tuple[bytes, ...]]:
    return content_of(content, place, other=other, dropped=BILLING)


def _schema(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise tool_refused(tool.type)
    if not tool.name or tool.input_schema is None:
        raise RequestRefused("a tool needs a name and an input_schema", code="invalid_request", param="tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def message(done: Completion, episode: str, model: str) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    return head(done.number, episode, model) | {
        "content": blocks(done),
        **stop(done),
        "usage": {"input_tokens": done.prompt_tokens, "output_tokens": done.sampled_tokens},
    }


def error_body(error: RequestRefused) -> dict[str, Any]:
    """Return the body of an error response, as Anthropic's clients expect it."""
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(error.status, "invalid_request_error")
    kind = "overloaded_error" if error.status >= 500 else kind
    return {"type": "error", "error": {"type": kind, "message": str(error), "details": {"error_code": error.code}}}


def models(names: Sequence[str]) -> dict[str, Any]:
    """Return the response that lists the models."""
    ends = {"first_id": names[0], "last_id": names[-1]}
    return {"data": [model_entry(name) for name in names], "has_more": False, **ends}


def model_entry(name: str) -> dict[str, Any]:
    """Return the description of a model."""
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def head(number: int, episode: str, model: str) -> dict[str, Any]:
    """Return the fields that every message begins with."""
    return {
        "id": f"msg_{episode}_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def blocks(done: Completion) -> list[dict[str, Any]]:
    """Return the content of an answer."""
    said = done.message
    thought = [{"type": "thinking", "thinking": said.reasoning, "signature": SIGNATURE}] if said.reasoning else []
    text = [{"type": "text", "text": said.text}] if said.text else []
    calls = [
        {
            "type": "tool_use",
            "id": call.id or f"toolu_{done.number}_{i}",
            "name": call.name,
            "input": msgspec.json.decode(call.arguments),
        }
        for i, call in enumerate(done.message.calls)
    ]
    return [*thought, *text, *calls]


def stop(done: Completion) -> dict[str, Any]:
    """Return why an answer ended."""
    if done.message.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if done.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop}
    return {"stop_reason": STOP_REASONS[done.finish_reason], "stop_sequence": None}


class MessageStream:
    """The events of a message in Anthropic's dialect."""

    named, ping, last = True, b'event: ping\ndata: {"type": "ping"}\n\n', b""

    def __init__(self, number: int, episode: str, model: str, prompt_tokens: int) -> None:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        self._head = head(number, episode, model) | {"content": [], "usage": usage}
        # The number and the type of the open block.
        self._index, self._open = 0, ""

    def begin(self) -> Iterator[Event]:
        """Send the message without content."""
        yield {"type": "message_start", "message": self._head}

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Append to the block of reasoning, then to that of text."""
        if reasoning:
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": reasoning})
        if text:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of reasoning and text, then calls and why the answer ended."""
        yield from self.more(reasoning, text)
        for place, block in enumerate(blocks(done)):
            # A block is identified by its place, since the policy may choose its id, and repeat one.
            if block["type"] == "tool_use":
                yield from self._switch(f"call {place}", block | {"input": {}})
                arguments = msgspec.json.encode(block["input"]).decode()
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield from self._close()
        usage = {"output_tokens": done.sampled_tokens}
        yield {"type": "message_delta", "delta": stop(done), "usage": usage}
        yield {"type": "message_stop"}

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the error."""
        yield error_body(error)

    def _switch(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        """Open a block, unless it is the open one."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
            self._index, self._open = self._index + 1, ""

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
