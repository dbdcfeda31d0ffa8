"""A model behind an OpenAI-compatible URL in place of the engines, to be evaluated like the policy."""

from collections.abc import Callable
from typing import Any

import msgspec

from rl_async.agent_loop.chat_formats.message_lines import Call, Said, line, read_arguments, read_lines
from rl_async.configs.schema.user import EndpointConfig
from rl_async.errors import EngineLost, EngineRejected
from rl_async.files import UNDECODABLE
from rl_async.messages import Version, VersionRun
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.api_keys import read_api_key
from rl_async.reward_loop.post import poster_of
from rl_async.rollout_server.api import FinishReason, GenerateRequest, GenerateResult

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
