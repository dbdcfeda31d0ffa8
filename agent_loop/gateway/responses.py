"""OpenAI's Responses dialect: items and tools in as chat messages; responses and typed events out. Pure.

Requests become the same chat messages as those of chat completions, so they are recorded in the same rows. Items of one
answer (reasoning, message, calls) are one message of the assistant. Earlier answers are kept, since later requests of
the episode may name them instead of sending them again. Events come in the same order as from OpenAI's server.
"""

import base64
import binascii
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rl_async.agent_loop.gateway.chat import (
    ASSISTANT,
    COMMENT,
    RESPONSES,
    RESPONSES_TEXT,
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
    take_format,
    text_of,
    tool_refused,
    unobeyed,
)
from rl_async.agent_loop.gateway.openai import Limit
from rl_async.errors import RequestRefused
from rl_async.files import UNDECODABLE

# OpenAI's server runs these tools, and clients offer them unasked.
SEARCHES = ("web_search", "web_search_preview")
ENCRYPTED = "reasoning.encrypted_content"
TEXT = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Item(msgspec.Struct):
    """An item of the input, of any type; messages need not name theirs."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    encrypted_content: str | None = None


class Tool(msgspec.Struct):
    """A function, or a namespace of functions."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: "list[Tool]" = []


class ResponsesBody(msgspec.Struct):
    """The fields of a request that have an effect."""

    input: str | list[Item] = []
    model: str = ""
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None


class FunctionName(NamedTuple):
    """A client's name of a function."""

    name: str
    namespace: str = ""

    @property
    def printed(self) -> str:
        """The name that the model sees."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


class ResponsesRequest(NamedTuple):
    """A request as chat messages, with the data that its response needs besides the answer.

    ``said`` are the new messages without instructions, which do not carry over. ``names`` are the functions by the
    names that the model sees. A response repeats the fields ``echoed``.
    """

    chat: ChatRequest
    said: list[ChatMessage]
    names: dict[str, FunctionName]
    body: ResponsesBody
    echoed: dict[str, Any]

    @property
    def previous(self) -> str:
        """The id of the response that this one continues; may be empty."""
        return self.body.previous_response_id or ""

    @property
    def encrypted(self) -> bool:
        """Whether reasoning is returned in a form to send back."""
        return ENCRYPTED in (self.body.include or ())


class _Said(NamedTuple):
    """A message of a conversation, and the number of the one before it, -1 for the first."""

    before: int
    message: ChatMessage


class KeptResponses:
    """Responses by their ids, and their output items by the items' ids.

    Conversations share their beginnings, so a client that sends the whole conversation each time costs no extra memory.
    """

    def __init__(self) -> None:
        # The number of a response's last message, by the response's id.
        self._ends: dict[str, int] = {}
        self._said: list[_Said] = []
        self._numbers: dict[_Said, int] = {}
        self._items: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        """Return the number of messages that are kept."""
        return len(self._said)

    def keep(self, name: str, previous: str, messages: Sequence[ChatMessage], output: Sequence[dict[str, Any]]) -> None:
        """Remember the messages that the response ``name`` adds to the conversation up to ``previous``, if given."""
        end = self._ends[previous] if previous else -1
        for message in messages:
            said = _Said(end, message)
            end = self._numbers.setdefault(said, len(self._said))
            if end == len(self._said):
                self._said.append(said)
        self._ends[name] = end
        self._items |= {item["id"]: item for item in output}

    def history(self, name: str) -> list[ChatMessage]:
        """Return the conversation up to and including a response. Raises RequestRefused if it is not kept."""
        if (end := self._ends.get(name)) is None:
            raise RequestRefused(
                f"there is no response {name[:80]} in this episode, or it was made with store=false",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        found = []
        while end >= 0:
            end, message = self._said[end]
            found.append(message)
        return found[::-1]

    def item(self, name: str) -> dict[str, Any]:
        """Return an output item. Raises RequestRefused if it is not kept."""
        if (found := self._items.get(name)) is None:
            raise RequestRefused(
                f"there is no item {name[:80]} in this episode, or its response was made with store=false",
                code="invalid_request",
                param="input",
            )
        return found


def read_request(body: bytes, kept: KeptResponses) -> ResponsesRequest:
    """Decode a request. Raises RequestRefused naming a field that is not supported."""
    fields, wanted = read_fields(body, ResponsesBody)
    asked = unobeyed(fields, ResponsesBody.__struct_fields__, RESPONSES)
    asked |= {f"text.{name}": value for name, value in unobeyed(wanted.text or {}, (), RESPONSES_TEXT).items()}
    if searches := [tool.type for tool in wanted.tools or () if tool.type in SEARCHES]:
        asked["tools"] = searches
    names, tools = _tools([tool for tool in wanted.tools or () if tool.type not in SEARCHES])
    items = [Item(role="user", content=wanted.input)] if isinstance(wanted.input, str) else wanted.input
    said = messages(items, kept)
    system = [ChatMessage("system", wanted.instructions)] if wanted.instructions else []
    offered = [] if wanted.tool_choice == "none" else tools
    if (forces := forceable(_forced(wanted.tool_choice, names), offered)) is not None:
        del asked["tool_choice"]
    past = kept.history(wanted.previous_response_id) if wanted.previous_response_id else []
    chat = ChatRequest(
        messages=[*system, *past, *said],
        tools=offered,
        stops=[],
        max_tokens=wanted.max_output_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        stream=bool(wanted.stream),
        usage=True,
        model=wanted.model,
        format=take_format(asked, "text.format"),
        unobeyed=asked,
        size=len(body),
        conversation="input",
        forces=forces,
    )
    echoed = {name: fields[name] for name in ("tools", "metadata", "reasoning", "text") if fields.get(name)}
    return ResponsesRequest(chat, said, names, wanted, echoed)


def _forced(choice: Any, names: Mapping[str, FunctionName]) -> str | None:
    """Return the printed name of the function that must be called, "" for any, or None if no call is forced."""
    match choice:
        case "required":
            return ""
        case {"type": "function", "name": str(name)}:
            meant = [printed for printed, function in names.items() if function.name == name]
            return meant[0] if len(meant) == 1 else named(name)
    return None


def messages(items: Iterable[Item], kept: KeptResponses) -> list[ChatMessage]:
    """Convert items. Reasoning, text and calls that follow one another are one message of the assistant.

    Raises RequestRefused for items that no chat template prints.
    """
    said: list[ChatMessage] = []
    # The assistant's message that still collects items.
    answer: _Answer | None = None
    for number, item in enumerate(items):
        at = f"input[{number}]"
        if item.type == "item_reference":
            item = msgspec.convert(kept.item(item.id or ""), Item)
        if item.type in ("reasoning", "function_call") or (item.type, item.role) == ("message", ASSISTANT):
            if answer is not None and not answer.takes(item):
                said.append(answer.message)
                answer = None
            answer = answer or _Answer()
            answer.add(item, at)
            continue
        if answer is not None:
            said.append(answer.message)
            answer = None
        said.append(_message(item, at))
    return said if answer is None else [*said, answer.message]


class _Answer:
    """Collects the items of one answer."""

    def __init__(self) -> None:
        self._reasoning = ""
        self._text: str | None = None
        self._calls: list[FunctionCall] = []

    def takes(self, item: Item) -> bool:
        """Whether the item may be of the same answer: reasoning comes before text, and text before calls."""
        if item.type == "function_call":
            return True
        return not self._calls and self._text is None

    def add(self, item: Item, place: str) -> None:
        if item.type == "reasoning":
            self._reasoning += _reasoning(item, place)
        elif item.type == "function_call":
            self._calls.append(_call(item, place))
        else:
            self._text = text_of(item.content, f"{place}.content", TEXT)

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(ASSISTANT, self._text or "", tuple(self._calls), self._reasoning)


def _reasoning(item: Item, place: str) -> str:
    if item.content:
        return text_of(item.content, f"{place}.content", TEXT)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise refused(f"{place}.encrypted_content", "it is not of this gateway") from error


def _message(item: Item, place: str) -> ChatMessage:
    if item.type == "function_call_output":
        if item.output is None:
            raise refused(f"{place}.output", "a function_call_output needs an output")
        text, images = content_of(item.output, f"{place}.output", TEXT)
        return ChatMessage("tool", text, answers=item.call_id or "", images=images)
    if item.type != "message":
        raise not_supported(f"an input item of type {item.type[:80]}", "leave it out", f"{place}.type")
    roles: dict[str, Literal["system", "user"]] = {"developer": "system", "system": "system", "user": "user"}
    if item.role not in roles:
        raise refused(f"{place}.role", f"{item.role[:80]!r} is none of {', '.join([*roles, ASSISTANT])}")
    if not item.content and item.content != "":
        raise refused(f"{place}.content", f"a message of role {item.role} needs a content")
    text, images = content_of(item.content, f"{place}.content", TEXT)
    return ChatMessage(roles[item.role], text, images=images)


def _call(item: Item, place: str) -> FunctionCall:
    arguments = item.arguments or "{}"
    if not item.name:
        raise refused(f"{place}.name", "a function_call needs the name of the function")
    refuse_many_values(arguments, f"{place}.arguments")
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except UNDECODABLE as error:
        raise refused(f"{place}.arguments", f"they must be a JSON object: {error}") from error
    return FunctionCall(FunctionName(item.name, item.namespace or "").printed, arguments, item.call_id or "")


def _tools(tools: Sequence[Tool]) -> tuple[dict[str, FunctionName], list[dict[str, Any]]]:
    """Return the clients' names of functions by the names that the model sees, and the functions' schemas."""
    names: dict[str, FunctionName] = {}
    schemas: list[dict[str, Any]] = []
    for tool in tools:
        namespace = tool.name if tool.type == "namespace" else ""
        for function in tool.tools if tool.type == "namespace" else [tool]:
            if function.type != "function":
                raise tool_refused(function.type)
            if not function.name:
                raise RequestRefused("a function has no name", code="invalid_request", param="tools")
            name = FunctionName(function.name, namespace)
            names[name.printed] = name
            schema: dict[str, Any] = {"name": name.printed, "description": function.description or ""}
            schemas.append({"type": "function", "function": schema | {"parameters": function.parameters or {}}})
    return names, schemas


class ResponseHead:
    """The ids and the fields that a response has before and after it is answered."""

    def __init__(self, asked: ResponsesRequest, episode: str, number: int, model: str) -> None:
        self._asked, self._key, self._model = asked, f"{episode}_{number}", model
        self._number, self._created = number, int(time.time())
        self.id = f"resp_{self._key}"

    def response(
        self, status: str, output: list[dict[str, Any]], done: Completion | None = None, error: Any = None
    ) -> dict[str, Any]:
        """Return the response object. ``done`` has the usage."""
        body = self._asked.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "metadata": {},
            "usage": None if done is None else usage(done),
            **self._asked.echoed,
        }

    def answer(self, done: Completion) -> dict[str, Any]:
        """Return the response object of an answer."""
        return self.response(status(done), self.output(done), done)

    def output(self, done: Completion) -> list[dict[str, Any]]:
        """Return the items of an answer; one that says nothing is an empty message."""
        said = done.message
        reasoning = [self.reasoning(said.reasoning)] if said.reasoning else []
        text = [self.message(said.text, status(done))] if said.text or not said.calls else []
        return [*reasoning, *text, *(self.call(done, place) for place in range(len(said.calls)))]

    def reasoning(self, text: str) -> dict[str, Any]:
        """Return the item of reasoning."""
        item = {"id": f"rs_{self._key}", "type": "reasoning", "summary": []}
        content = [{"type": "reasoning_text", "text": text}]
        # Clients without a store send this text back as it is, so base64 will do.
        opaque = base64.b64encode(text.encode(errors="replace")).decode()
        sealed = {"encrypted_content": opaque} if self._asked.encrypted else {}
        return {**item, "content": content, "status": "completed", **sealed}

    def message(self, text: str, status: str) -> dict[str, Any]:
        """Return the item of a text."""
        return {
            "id": f"msg_{self._key}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
        }

    def call(self, done: Completion, place: int) -> dict[str, Any]:
        """Return the item of a call."""
        call = done.message.calls[place]
        name = self._asked.names.get(call.name, FunctionName(call.name))
        return {
            "id": f"fc_{self._key}_{place}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id or f"call_{self._number}_{place}",
            "name": name.name,
            "arguments": call.arguments,
            **({"namespace": name.namespace} if name.namespace else {}),
        }


def status(done: Completion) -> str:
    """Return ``incomplete`` for an answer that was cut at a limit; calls that are whole count as completed."""
    return "incomplete" if done.finish_reason == "length" and not done.message.calls else "completed"


def usage(done: Completion) -> dict[str, Any]:
    """Return the numbers of tokens."""
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": done.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.sampled_tokens,
    }


class ResponseStream:
    """The events of one response: ``begin``, ``more`` for every piece of text, then ``end`` or ``fail``."""

    named, ping, last = True, COMMENT, b""

    def __init__(self, head: ResponseHead) -> None:
        self._head, self._number = head, 0
        # The finished items.
        self._output: list[dict[str, Any]] = []
        self._open: _OpenText | None = None

    def begin(self) -> Iterator[Event]:
        """Announce the response."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._head.response("in_progress", []))

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Append to the reasoning, then to the text."""
        if reasoning:
            yield from self._append("reasoning", reasoning)
        if text:
            yield from self._append("message", text)

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of reasoning and text, then calls, and the whole response."""
        yield from self.more(reasoning, text)
        if not (done.message.calls or done.message.text):
            yield from self._append("message", "")
        yield from self._close(status(done))
        for place in range(len(done.message.calls)):
            yield from self._call(self._head.call(done, place))
        last = self._head.response(status(done), self._output, done)
        yield self._event(f"response.{last['status']}", response=last)

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the response that failed."""
        code = "server_error" if error.status >= 500 else error.code
        failed = {"code": code, "message": str(error)}
        yield self._event("response.failed", response=self._head.response("failed", self._output, error=failed))

    def _append(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is not None and self._open.kind != kind:
            yield from self._close("completed")
        if self._open is None:
            whole = self._head.reasoning("") if kind == "reasoning" else self._head.message("", "in_progress")
            self._open = _OpenText(kind, whole["content"][0], whole["id"])
            empty = whole | {"content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self._output), item=empty)
            yield self._event("response.content_part.added", **self._place(), part=self._open.part)
        if text:
            self._open.text += text
            yield self._event(f"response.{self._open.name}.delta", **self._place(), **self._logprobs(), delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        """End the reasoning or the message."""
        if (open := self._open) is None:
            return
        reasoning = open.kind == "reasoning"
        whole = self._head.reasoning(open.text) if reasoning else self._head.message(open.text, status)
        yield self._event(f"response.{open.name}.done", **self._place(), **self._logprobs(), text=open.text)
        yield self._event("response.content_part.done", **self._place(), part=whole["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._output), item=whole)
        self._output.append(whole)
        self._open = None

    def _call(self, item: dict[str, Any]) -> Iterator[Event]:
        place = {"output_index": len(self._output), "item_id": item["id"]}
        begun = item | {"arguments": "", "status": "in_progress"}
        said = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.output_item.added", output_index=len(self._output), item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event("response.function_call_arguments.done", **place, **said)
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.item_id, "output_index": len(self._output), "content_index": 0}

    def _logprobs(self) -> dict[str, Any]:
        assert self._open is not None
        return {} if self._open.kind == "reasoning" else {"logprobs": []}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


class _OpenText:
    """The item that text is being appended to."""

    def __init__(self, kind: str, part: dict[str, Any], item_id: str) -> None:
        self.kind, self.part, self.item_id, self.text = kind, part, item_id, ""
        self.name = "reasoning_text" if kind == "reasoning" else "output_text"
