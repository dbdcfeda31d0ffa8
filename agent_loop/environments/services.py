"""What the built-in environments of a worker share: the config, and the model that plays users."""

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from rl_async.agent_loop.chat_formats.format import ChatFormat, Message, TooLong
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.user import UserConfig
from rl_async.errors import EnvironmentFailed
from rl_async.messages import Sampling
from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.api_keys import read_api_key
from rl_async.reward_loop.completion import read_completion
from rl_async.reward_loop.post import Poster
from rl_async.rollout_server.api import GenerateRequest, Generator


class UserModel(Protocol):
    """A language model that plays users."""

    async def say(self, messages: Sequence[Message]) -> str:
        """Return the next message of the assistant. Raises EnvironmentFailed or EngineError."""
        ...

    async def close(self) -> None: ...


class Services:
    """One for each worker. Without ``chat`` and ``generator`` the policy plays no user.

    Raises ConfigError if the environment lacks the API key of ``agent.user``.
    """

    def __init__(self, config: RunConfig, chat: ChatFormat | None = None, generator: Generator | None = None) -> None:
        self.config = config
        user = config.agent.user
        self.user: UserModel | None = None
        if user is not None and user.url:
            self.user = ServedUser(user)
        elif user is not None and chat is not None and generator is not None:
            self.user = PolicyUser(config, user, chat, generator)

    async def close(self) -> None:
        """Close connections."""
        if self.user is not None:
            await self.user.close()


class ServedUser:
    """A model behind an OpenAI-compatible URL."""

    def __init__(self, config: UserConfig) -> None:
        self._config = config
        self._poster = Poster(
            f"{config.url.rstrip('/')}/chat/completions",
            section="agent.user",
            timeout_s=config.timeout_s,
            attempts=config.attempts,
            backoff_s=config.backoff_s,
            max_concurrent=config.max_concurrent,
            api_key=read_api_key(config.api_key_env, "agent.user.api_key_env"),
        )

    async def say(self, messages: Sequence[Message]) -> str:
        config = self._config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": list(messages),
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        } | config.extra_body
        try:
            raw = await self._poster.post({key: value for key, value in body.items() if value is not None})
            message = read_completion(raw, self._poster.url).choices[0].message
        except ScorerFailed as error:
            raise EnvironmentFailed(f"agent.user: {error}") from None
        if message.refusal or message.content is None:
            raise EnvironmentFailed(f"agent.user: {self._poster.url} said nothing: {message.refusal or ''!s:.200}")
        return message.content

    async def close(self) -> None:
        await self._poster.close()


class PolicyUser:
    """The policy itself. What it says as a user is sampled by the same engines and is never trained."""

    def __init__(self, config: RunConfig, user: UserConfig, chat: ChatFormat, generator: Generator) -> None:
        self._chat, self._generator = chat, generator
        self._limit, self._max_tokens = config.rollout.max_model_len, user.max_tokens
        self._sampling = Sampling(temperature=user.temperature)

    async def say(self, messages: Sequence[Message]) -> str:
        try:
            prompt = self._chat.prompt(messages, limit=self._limit)
        except TooLong as error:
            raise EnvironmentFailed(
                f"agent.user: what the user has to read is {error}, and an engine takes {self._limit} "
                "(rollout.max_model_len)"
            ) from None
        name = f"user.{uuid.uuid4().hex}"
        request = GenerateRequest(
            request_id=name,
            token_ids=prompt,
            sampling=self._sampling,
            max_tokens=min(self._max_tokens, self._limit - len(prompt)),
            stop_token_ids=self._chat.stop_token_ids,
        )
        result = await self._generator.generate(request, session=name)
        return self._chat.parse(result.token_ids, prompt_ids=prompt).text

    async def close(self) -> None:
        """Nothing is open: the engines are the worker's."""
