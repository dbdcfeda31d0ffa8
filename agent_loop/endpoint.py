"""Plays episodes on a model that takes messages instead of tokens: one behind an OpenAI-compatible endpoint.

``MessageLines`` is its chat format. Its tokens are the bytes of the conversation as JSON lines: the offered tools,
then a message each. So any endpoint can serve what an episode asks of a chat format, and calls stay as structured as
the endpoint gave them. ``Endpoint`` is the engine: it reads those lines, asks the endpoint, and returns a line.
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
    Settled,
    TooLong,
)
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.errors import EngineLost, EngineRejected
from rl_async.files import UNDECODABLE
from rl_async.messages import CallProblem, Version, VersionRun
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.model_client import poster_of, read_api_key
from rl_async.rollout_server.api import FinishReason, GenerateRequest, GenerateResult

END = ord("\n")  # of a line, which JSON itself never has
TOKEN_CHARS = 4  # about as many as a token of most models has


class Function(msgspec.Struct, kw_only=True):
    """A function that a message calls. ``arguments`` is the JSON text that the model wrote."""

    name: str
    arguments: str = "{}"


class Call(msgspec.Struct, kw_only=True):
    """A tool call of a chat completion."""

    id: str = ""
    type: str = "function"
    function: Function


class Said(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message of the assistant, as a line has it."""

    role: str
    content: str = ""
    tool_calls: list[Call] = []
    reasoning: str = ""


def line(value: Any) -> list[int]:
    """Return a line as tokens."""
    return [*msgspec.json.encode(value), END]


def read_lines(token_ids: Sequence[int]) -> tuple[list[dict[str, Any]], list[Message]]:
    """Return the tools and the messages that tokens say."""
    tools, *messages = msgspec.json.Decoder().decode_lines(bytes(token_ids))
    return tools, messages


class MessageLines:
    """A `ChatFormat` of JSON lines."""

    name = "messages"
    prints_tools = True
    plain_turns = False

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
        """Encode what ``messages`` append. Raises TooLong unless these are fewer than ``limit`` tokens."""
        return _within(limit, self._lines(messages))

    def _lines(self, messages: Sequence[Message]) -> list[int]:
        return [token for message in messages for token in line(message)]

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Answer:
        """Read a turn."""
        said = _last_said(token_ids)
        return Answer(_with_calls(said), said.content, [_parsed(call) for call in said.tool_calls], said.reasoning)

    def settled(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Settled:
        """Settle nothing before the end of the turn."""
        return Settled()

    def call_opening(self, name: str = "") -> list[int]:
        """Return nothing: how a call begins is the endpoint's."""
        return []

    def keeps_past(
        self,
        messages: Sequence[Message],
        place: int,
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> bool:
        """Return True: what becomes of earlier reasoning is the endpoint's."""
        return True

    def encode(self, text: str) -> list[int]:
        """Encode text as its bytes."""
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
        """Return None: there is no template to depart from."""
        return None


def _within(limit: int, token_ids: list[int]) -> list[int]:
    if len(token_ids) >= limit:
        raise TooLong(len(token_ids))
    return token_ids


def _last_said(token_ids: Sequence[int]) -> Said:
    """Read a turn; one without tokens says nothing."""
    return msgspec.json.decode(bytes(token_ids), type=Said) if token_ids else Said(role="assistant")


def _with_calls(said: Said) -> str:
    calls = (HERMES.render(call.function.name, call.function.arguments or "{}") for call in said.tool_calls)
    return "\n".join(filter(None, [said.content, *calls]))


def _parsed(call: Call) -> ParsedCall:
    function = call.function
    arguments, problem = read_arguments(function.arguments)
    raw = f'{{"name": {msgspec.json.encode(function.name).decode()}, "arguments": {function.arguments or "{}"}}}'
    return ParsedCall(function.name, arguments, raw, problem, call.id)


def read_arguments(text: str) -> tuple[dict[str, object] | None, CallProblem | None]:
    """Read the arguments of a call; None, and what is wrong with them, if they are no JSON object. None at all are
    an empty one."""
    try:
        value = msgspec.json.decode(text or "{}")
    except UNDECODABLE:
        return None, "bad_json"
    return (value, None) if isinstance(value, dict) else (None, "bad_arguments")


SECTION = "eval.endpoint"
ATTEMPTS_TO_REACH = 4  # with pauses of 7 s in all, before it ever answered: more likely its address is wrong
SHOWN = 300  # characters of an answer that go into an error


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[Call] | None = None
    reasoning: str | None = None  # of OpenRouter, and of vLLM from 0.11 on
    reasoning_content: str | None = None  # of DeepSeek, SGLang, and vLLM before


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
        """Ask for the next message of the conversation that ``request`` says.

        Raises EngineLost if no attempt was answered, and EngineRejected for an answer that is no chat completion.
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
        token_ids = line(_said(choice.message))
        return GenerateResult(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            versions=[VersionRun(Version(), 0, len(token_ids))],
            finish_reason=_reason(choice),
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


def _said(message: _Message) -> Said:
    reasoning = message.reasoning or message.reasoning_content or ""
    content = message.content or message.refusal or ""
    return Said(role="assistant", content=content, tool_calls=message.tool_calls or [], reasoning=reasoning)


def _reason(choice: _Choice) -> FinishReason:
    """Return ``length`` for an answer that was cut; whatever else ended it, the model had its say."""
    return "length" if choice.finish_reason == "length" else "stop"


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as endpoints take it.

    They get no reasoning back, no name of the tool beside the id of its call, and only arguments that are JSON: vLLM
    refuses a conversation in which a call has others, so these are sent as the text that they are.
    """
    if message["role"] == "tool":
        return {key: value for key, value in message.items() if key != "name"}
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return {key: value for key, value in message.items() if key != "reasoning"}
    said = msgspec.convert(message, Said)
    for call in said.tool_calls:
        if read_arguments(call.function.arguments)[0] is None:
            call.function.arguments = msgspec.json.encode({"malformed": call.function.arguments}).decode()
    return {"role": "assistant", "content": said.content or None, "tool_calls": msgspec.to_builtins(said.tool_calls)}
