"""Requests in OpenAI's Responses dialect: their items as chat messages, their tools as JSON schemas. Pure.

They become the same chat messages as those of chat completions, so they are recorded in the same rows. Items of one
answer (reasoning, message, calls) are one message of the assistant. What was answered before is kept, since later
requests of the episode may name it instead of sending it again.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rl_async.agent_loop.gateway.dialects.chat import (
    ASSISTANT,
    ChatMessage,
    ChatRequest,
    FunctionCall,
    Part,
    forceable,
    named,
    read_fields,
    refused,
    text_of,
)
from rl_async.agent_loop.gateway.dialects.fields import (
    RESPONSES,
    RESPONSES_TEXT,
    not_supported,
    tool_refused,
    unobeyed,
)
from rl_async.agent_loop.gateway.dialects.formats import take_format
from rl_async.agent_loop.gateway.dialects.openai import Limit
from rl_async.errors import RequestRefused
from rl_async.files import UNDECODABLE

SEARCHES = ("web_search", "web_search_preview")  # run by OpenAI's server, and offered by clients unasked
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
    """What a client calls a function."""

    name: str
    namespace: str = ""

    @property
    def printed(self) -> str:
        """The name that the model sees."""
        return f"{self.namespace}__{self.name}" if self.namespace else self.name


class ResponsesRequest(NamedTuple):
    """A request as chat messages, and what its response needs besides the answer."""

    chat: ChatRequest
    said: list[ChatMessage]  # the messages without instructions, which do not carry over, and without kept ones
    names: dict[str, FunctionName]  # by the name that the model sees
    body: ResponsesBody
    echoed: dict[str, Any]  # fields that a response repeats

    @property
    def previous(self) -> str:
        """The id of the response that this one continues; empty if there is none."""
        return self.body.previous_response_id or ""

    @property
    def encrypted(self) -> bool:
        """Whether reasoning is returned in a form to send back."""
        return ENCRYPTED in (self.body.include or ())


class _Said(NamedTuple):
    """A message of a conversation, and the number of the one before it; -1 if it is the first."""

    before: int
    message: ChatMessage


class KeptResponses:
    """Responses by their ids, and their output items by the items' ids.

    Conversations share what they begin with, so that whole ones in every request take no more than their messages do.
    """

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}  # the number of a response's last message, by the response's id
        self._said: list[_Said] = []
        self._numbers: dict[_Said, int] = {}
        self._items: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        """Return the number of messages that are kept."""
        return len(self._said)

    def keep(self, name: str, previous: str, messages: Sequence[ChatMessage], output: Sequence[dict[str, Any]]) -> None:
        """Remember what the response ``name`` adds to the conversation up to ``previous`` (empty: none)."""
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
    """Return the name that the model sees of the function that must be called; empty for any.

    None if ``tool_choice`` names none.
    """
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
    answer: _Answer | None = None  # the assistant's, to which items are still added
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


def encrypt(reasoning: str) -> str:
    """Encode reasoning as the opaque text that a client without a store sends back."""
    return base64.b64encode(reasoning.encode(errors="replace")).decode()


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
        return ChatMessage("tool", text_of(item.output, f"{place}.output", TEXT), answers=item.call_id or "")
    if item.type != "message":
        raise not_supported(f"an input item of type {item.type[:80]}", "leave it out", f"{place}.type")
    roles: dict[str, Literal["system", "user"]] = {"developer": "system", "system": "system", "user": "user"}
    if item.role not in roles:
        raise refused(f"{place}.role", f"{item.role[:80]!r} is none of {', '.join([*roles, ASSISTANT])}")
    if not item.content and item.content != "":
        raise refused(f"{place}.content", f"a message of role {item.role} needs a content")
    return ChatMessage(roles[item.role], text_of(item.content, f"{place}.content", TEXT))


def _call(item: Item, place: str) -> FunctionCall:
    arguments = item.arguments or "{}"
    if not item.name:
        raise refused(f"{place}.name", "a function_call needs the name of the function")
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except UNDECODABLE as error:
        raise refused(f"{place}.arguments", f"they must be a JSON object: {error}") from error
    return FunctionCall(FunctionName(item.name, item.namespace or "").printed, arguments, item.call_id or "")


def _tools(tools: Sequence[Tool]) -> tuple[dict[str, FunctionName], list[dict[str, Any]]]:
    """Return what clients call the functions, by the names that the model sees, and the functions' schemas."""
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
