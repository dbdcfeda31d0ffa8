"""Plays episodes on a model that takes messages instead of tokens: one behind an OpenAI-compatible endpoint.

``MessageLines`` is its chat format. Its tokens are the bytes of the conversation as JSON lines: the offered tools,
then a message each. So any endpoint can serve as an episode's engine, and calls keep the structure that the endpoint
gave them. ``Endpoint`` is that engine: it reads those lines, asks the endpoint, and returns a line.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from rl_async.agent_loop.chat_formats.format import (
    HERMES,
    THINK_END,
    THINK_START,
    Answer,
    Message,
    ParsedCall,
    SampledTurn,
    Settled,
    TooLong,
)
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import DataError, EngineLost, EngineRejected
from rl_async.files import UNDECODABLE
from rl_async.messages import CallProblem, Version, VersionRun
from rl_async.pictures import PictureProcessor
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.model_client import poster_of, read_api_key
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Image
from rl_async.transfer_queue.images import images_of

# Ends a line; encoded JSON never contains it.
END = ord("\n")
# The average length of a token in most models.
TOKEN_CHARS = 4


class Function(msgspec.Struct, kw_only=True):
    """A function that a message calls. ``arguments`` is the JSON text that the model wrote."""

    name: str
    arguments: str = "{}"


class Call(msgspec.Struct, kw_only=True):
    """A tool call of a chat completion."""

    id: str = ""
    type: str = "function"
    function: Function


class AssistantLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the assistant, as a line has it."""

    role: str
    content: str = ""
    tool_calls: list[Call] = []
    reasoning: str = ""


def line(value: Any) -> list[int]:
    """Return a line as tokens."""
    return [*msgspec.json.encode(value), END]


def read_lines(token_ids: Sequence[int]) -> tuple[list[dict[str, Any]], list[Message]]:
    """Decode tokens to the tools and the messages."""
    tools, *messages = msgspec.json.Decoder().decode_lines(bytes(token_ids))
    return tools, messages


class MessageLines:
    """A `ChatFormat` of JSON lines."""

    name = "messages"
    prints_tools = True
    plain_turns = False
    pictures: PictureProcessor | None = None

    def __init__(self) -> None:
        self.stop_token_ids = [END]

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode the conversation so far. Raises TooLong unless there are fewer than ``limit`` tokens."""
        return _within(limit, [*line(list(tools)), *self._lines(messages)])

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode the lines of ``messages``. Raises TooLong unless these are fewer than ``limit`` tokens."""
        return _within(limit, self._lines(messages))

    def expand(
        self, token_ids: list[int], messages: Sequence[Message], *, start: int = 0, limit: int = sys.maxsize
    ) -> tuple[list[int], list[Image]]:
        """Return the tokens as they are. Raises DataError for images, since a line of them would be all tokens."""
        if images_of(messages):
            raise DataError(f"{SECTION}: images are not sent to endpoints; evaluate their tasks with a model folder")
        return token_ids, []

    def _lines(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in line(message)]

    def parse(self, turn: SampledTurn) -> Answer:
        said = _last_said(turn.token_ids)
        return Answer(_with_calls(said), said.content, [_parsed(call) for call in said.tool_calls], said.reasoning)

    def settled(self, turn: SampledTurn) -> Settled:
        """Settle nothing before the end of the turn."""
        return Settled()

    def call_opening(self, name: str = "") -> list[int]:
        """Return nothing, since the endpoint decides how a call begins."""
        return []

    def keeps_past(
        self,
        messages: Sequence[Message],
        place: int,
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> bool:
        """Return True, since the endpoint decides about earlier reasoning."""
        return True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Write a turn as one text, with its reasoning and calls as Hermes' format has them."""
        said = _last_said(token_ids)
        thought = f"{THINK_START}\n{said.reasoning}\n{THINK_END}\n\n" if said.reasoning else ""
        return thought + _with_calls(said)

    def cut(self, text: str, tokens: int) -> str:
        """Cut a tool's text to about ``tokens`` tokens of a model, whose tokenizer is unknown here."""
        return text[: tokens * TOKEN_CHARS]

    def check(
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> int | None:
        """Return None, since no template exists here."""
        return None


def _within(limit: int, token_ids: list[int]) -> list[int]:
    if len(token_ids) >= limit:
        raise TooLong(len(token_ids))
    return token_ids


def _last_said(token_ids: Sequence[int]) -> AssistantLine:
    """Read a turn; one without tokens says nothing."""
    return msgspec.json.decode(bytes(token_ids), type=AssistantLine) if token_ids else AssistantLine(role="assistant")


def _with_calls(said: AssistantLine) -> str:
    calls = (HERMES.render(call.function.name, call.function.arguments or "{}") for call in said.tool_calls)
    return "\n".join(filter(None, [said.content, *calls]))


def _parsed(call: Call) -> ParsedCall:
    function = call.function
    arguments, problem = read_arguments(function.arguments)
    raw = f'{{"name": {msgspec.json.encode(function.name).decode()}, "arguments": {function.arguments or "{}"}}}'
    return ParsedCall(function.name, arguments, raw, problem, call.id)


def read_arguments(text: str) -> tuple[dict[str, object] | None, CallProblem | None]:
    """Read the arguments of a call, or return None and the problem if they are not a JSON object. An empty text counts
    as an empty object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except UNDECODABLE:
        return None, "bad_json"
    return (value, None) if isinstance(value, dict) else (None, "bad_arguments")


SECTION = "eval.endpoint"
# An endpoint that never answered in these attempts, which pause for 7 s in all, probably has a wrong address.
ATTEMPTS_TO_REACH = 4
# Errors quote so many characters of an answer.
SHOWN = 300


class _Message(msgspec.Struct):
    """OpenRouter, and vLLM from 0.11 on, send ``reasoning``; DeepSeek, SGLang and older vLLM ``reasoning_content``."""

    content: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Endpoint:
    """A `Generator` of conversations in the format of `MessageLines`.

    Its "tokens" have no log-probabilities, and say nothing about how many the endpoint sampled. Raises ConfigError if
    the environment lacks the API key. ``tell`` is called with the first failure of a request that is retried.
    """

    def __init__(self, config: EndpointConfig, tell: Callable[[str], None] | None = None) -> None:
        self._config = config
        key = read_api_key(config.api_key_env, f"{SECTION}.api_key_env")
        self._poster = poster_of(config, config.url, SECTION, key, attempts_to_reach=ATTEMPTS_TO_REACH, tell=tell)

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Ask for the next message of the conversation in ``request``.

        Raises EngineLost if no attempt was answered, and EngineRejected unless the answer is a chat completion.
        """
        tools, messages = read_lines(request.token_ids)
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [_sent(message) for message in messages],
            "temperature": sampling.temperature,
            "max_tokens": request.max_tokens,
        }
        if tools:
            body["tools"] = tools
        body |= self._config.extra_body
        try:
            raw = await self._poster.post({key: value for key, value in body.items() if value is not None})
        except ScorerFailed as error:
            raise EngineLost(f"{SECTION}: {error}") from None
        choice = self._choice(raw)
        message = choice.message
        said = AssistantLine(
            role="assistant",
            content=message.content or message.refusal or "",
            tool_calls=message.tool_calls or [],
            reasoning=message.reasoning or message.reasoning_content or "",
        )
        token_ids = line(said)
        return GenerateResult(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            versions=[VersionRun(Version(), 0, len(token_ids))],
            finish_reason="length" if choice.finish_reason == "length" else "stop",
            engine=self._config.model,
        )

    def _choice(self, raw: bytes) -> _Choice:
        try:
            choices = msgspec.json.decode(raw, type=_Completion).choices
        except UNDECODABLE as error:
            shown = raw[:SHOWN].decode(errors="replace")
            raise EngineRejected(
                f"{SECTION}: {self._poster.url} answered with no chat completion ({error}): {shown}"
            ) from error
        if not choices:
            raise EngineRejected(f"{SECTION}: {self._poster.url} answered with a chat completion without a choice")
        return choices[0]

    async def close(self) -> None:
        """Close the connections."""
        await self._poster.close()


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as endpoints take it.

    They get no reasoning back, no name of the tool beside the id of its call, and only arguments that are JSON: vLLM
    refuses a conversation if a call has others, so malformed ones are wrapped as text.
    """
    if message["role"] == "tool":
        return {key: value for key, value in message.items() if key != "name"}
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return {key: value for key, value in message.items() if key != "reasoning"}
    said = msgspec.convert(message, AssistantLine)
    for call in said.tool_calls:
        if read_arguments(call.function.arguments)[0] is None:
            call.function.arguments = msgspec.json.encode({"malformed": call.function.arguments}).decode()
    return {"role": "assistant", "content": said.content or None, "tool_calls": msgspec.to_builtins(said.tool_calls)}
