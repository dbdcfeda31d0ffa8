"""Language models that speak in an episode beside the policy, and the services that a worker's environments share.

A ``Speaker`` plays a user or an opponent: the policy itself, or a model behind a URL. ``Services`` holds the config,
the sandbox and the speaker that plays users.
"""

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from rl_async.agent_loop.chat_formats.format import ChatFormat, Message, SampledTurn, TooLong
from rl_async.configs.schema.rollout import RolloutConfig, SpeakerConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EnvironmentFailed
from rl_async.messages import Sampling
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.model_client import poster_of, read_api_key, read_completion
from rl_async.rollout_server.api import GenerateRequest, Generator
from rl_async.sandbox.api import Sandbox
from rl_async.sandbox.kinds import make_sandbox


class Said(NamedTuple):
    """A speaker's text, ``whole`` unless it was cut off."""

    text: str
    whole: bool


class SpeechTooLong(EnvironmentFailed):
    """The prompt and the reasoning leave the speaker no tokens to answer."""


class Speaker(Protocol):
    """A language model that speaks."""

    async def say(self, messages: Sequence[Message]) -> Said:
        """Return the next message of the assistant. Raises EnvironmentFailed or EngineError."""
        ...

    async def close(self) -> None: ...


class ServedSpeaker:
    """A model behind an OpenAI-compatible URL. ``section`` is its place in the config.

    Raises ConfigError if the environment lacks its API key.
    """

    def __init__(self, config: SpeakerConfig, section: str) -> None:
        self._config, self._section = config, section
        key = read_api_key(config.api_key_env, f"{section}.api_key_env")
        self._poster = poster_of(config, config.url, section, key)

    async def say(self, messages: Sequence[Message]) -> Said:
        config = self._config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": list(messages),
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        } | config.extra_body
        try:
            raw = await self._poster.post({key: value for key, value in body.items() if value is not None})
            choice = read_completion(raw, self._poster.url).choices[0]
        except ScorerFailed as error:
            raise EnvironmentFailed(f"{self._section}: {error}") from None
        message, cut_off = choice.message, choice.finish_reason == "length"
        if message.refusal or message.content is None:
            kind = SpeechTooLong if cut_off else EnvironmentFailed
            raise kind(f"{self._section}: {self._poster.url} said nothing: {message.refusal or ''!s:.200}")
        return Said(message.content, whole=not cut_off)

    async def close(self) -> None:
        await self._poster.close()


class PolicySpeaker:
    """The policy itself. Its turns here are sampled by the same engines and never trained on."""

    def __init__(
        self, config: SpeakerConfig, section: str, rollout: RolloutConfig, chat: ChatFormat, generator: Generator
    ) -> None:
        self._chat, self._generator, self._section = chat, generator, section
        self._limit, self._max_tokens = rollout.max_model_len, config.max_tokens
        self._sampling = Sampling(temperature=config.temperature)

    async def say(self, messages: Sequence[Message]) -> Said:
        try:
            prompt = self._chat.prompt(messages, limit=self._limit)
        except TooLong as error:
            raise SpeechTooLong(
                f"{self._section}: what it has to read is {error}, and an engine takes {self._limit} "
                "(rollout.max_model_len)"
            ) from None
        name = f"{self._section}.{uuid.uuid4().hex}"
        request = GenerateRequest(
            request_id=name,
            token_ids=prompt,
            sampling=self._sampling,
            max_tokens=min(self._max_tokens, self._limit - len(prompt)),
            stop_token_ids=self._chat.stop_token_ids,
        )
        result = await self._generator.generate(request, session=name)
        text = self._chat.parse(SampledTurn(result.token_ids, prompt)).text
        return Said(text, whole=result.finish_reason == "stop")

    async def close(self) -> None:
        """Nothing is open: the engines are the worker's."""


def make_opponents(config: RunConfig, chat: ChatFormat, generator: Generator) -> dict[str, Speaker]:
    """Make the models of ``agent.opponents``, by role. Raises ConfigError if the environment lacks an API key."""
    made: dict[str, Speaker] = {}
    for role, speaker in config.agent.opponents.items():
        section = f"agent.opponents.{role}"
        if speaker.url:
            made[role] = ServedSpeaker(speaker, section)
        else:
            made[role] = PolicySpeaker(speaker, section, config.rollout, chat, generator)
    return made


USER = "agent.user"


class Services:
    """One for each worker. Without ``chat`` and ``generator`` the policy says nothing.

    Raises ConfigError if the environment lacks the API key of ``agent.user``.
    """

    def __init__(self, config: RunConfig, chat: ChatFormat | None = None, generator: Generator | None = None) -> None:
        self.config = config
        self._sandbox: Sandbox | None = None
        user = config.agent.user
        self.user: Speaker | None = None
        # The policy in its own role, in conversations that nothing is learned from.
        self.policy: Speaker | None = None
        if chat is not None and generator is not None:
            sampling = SpeakerConfig(temperature=config.rollout.temperature, max_tokens=config.rollout.max_tokens)
            self.policy = PolicySpeaker(sampling, "rollout", config.rollout, chat, generator)
        if user is not None and user.url:
            self.user = ServedSpeaker(user, USER)
        elif user is not None and chat is not None and generator is not None:
            self.user = PolicySpeaker(user, USER, config.rollout, chat, generator)

    def sandbox(self) -> Sandbox:
        """Return the sandbox, made at the first call. Raises ConfigError where none can be."""
        if self._sandbox is None:
            self._sandbox = make_sandbox(self.config.sandbox)
        return self._sandbox

    async def close(self) -> None:
        """Close connections."""
        if self.user is not None:
            await self.user.close()
