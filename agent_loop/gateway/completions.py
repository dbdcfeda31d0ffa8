"""OpenAI's oldest dialect: a bare prompt in, its continuation out. Pure, but for the tokenizer.

No template is printed. A prompt is encoded like the text of a template: control tokens that it spells count as such,
since its author takes the template's place.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from rl_async.agent_loop.chat_formats.format import (
    Answer,
    ChatFormat,
    SampledTurn,
    Settled,
    before_stops,
    without_beginnings,
)
from rl_async.agent_loop.gateway import openai
from rl_async.agent_loop.gateway.chat import (
    COMMENT,
    COMPLETIONS,
    ChatRequest,
    Completion,
    Event,
    read_fields,
    stops_of,
    unobeyed,
)
from rl_async.errors import RequestRefused

# OpenAI's default.
MAX_TOKENS = 16

Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]], msgspec.Meta(min_length=1)]


class CompletionBody(msgspec.Struct):
    """The fields of a request that have an effect."""

    prompt: Any
    model: str = ""
    max_tokens: openai.Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: openai.StreamOptions | None = None


def read_request(body: bytes) -> tuple[ChatRequest, str | list[int]]:
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


def completion(done: Completion, episode: str, model: str) -> dict[str, Any]:
    """Return an answer that is not streamed."""
    head = _head(done.number, episode, model)
    return head | {"choices": [_choice(done.message.text, done.finish_reason)], "usage": openai.usage(done)}


class CompletionStream:
    """The chunks of a completion, with ``usage`` in the last one if asked for."""

    named, ping, last = False, COMMENT, b"data: [DONE]\n\n"

    def __init__(self, number: int, episode: str, model: str, *, usage: bool) -> None:
        self._head, self._usage = _head(number, episode, model), usage

    def begin(self) -> Iterator[Event]:
        """Send nothing, since every chunk has a text."""
        yield from ()

    def more(self, reasoning: str, text: str) -> Iterator[Event]:
        """Append to the text."""
        if text:
            yield self._head | {"choices": [_choice(text, None)]}

    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]:
        """Send the rest of the text, and why it ended."""
        yield self._head | {"choices": [_choice(text, done.finish_reason)]}
        if self._usage:
            yield self._head | {"choices": [], "usage": openai.usage(done)}

    def fail(self, error: RequestRefused) -> Iterator[Event]:
        """Send the error."""
        yield openai.error_body(error)


def _head(number: int, episode: str, model: str) -> dict[str, Any]:
    return openai.head(number, episode, model, "text_completion") | {"id": f"cmpl-{episode}-{number}"}


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
