"""An environment in use by one episode: a ``Session``, or a ``GameSession`` if it has several roles.

Users' methods are awaited or run in a thread, with a deadline; errors name the method and the line. Observations
reach the model as plain text, without ANSI escapes. In a game each role has a conversation of its own.

``Environment`` and ``Game`` list the methods of users' classes. A ``Speaker`` is a language model that speaks in an
episode beside the policy: it plays a user or an opponent, as the policy itself or as a model behind a URL. ``Services``
holds the config, the sandbox and the speakers that a worker's environments share.
"""

import asyncio
import inspect
import logging
import math
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from rl_async.agent_loop.chat_formats.format import ChatFormat, Message, SampledTurn, TooLong
from rl_async.agent_loop.tools.tool import CallableTool, Observation, Step, Tool, checked
from rl_async.concurrency import DaemonCalls, Overdue, contained, time_limit
from rl_async.configs.schema.rollout import RolloutConfig, SpeakerConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, EnvironmentFailed, RlAsyncError
from rl_async.messages import Sampling, Task
from rl_async.reward_loop.api import Score, ScorerFailed, to_score
from rl_async.reward_loop.model_client import poster_of, read_api_key, read_completion
from rl_async.rollout_server.api import GenerateRequest, Generator
from rl_async.sandbox import Sandbox
from rl_async.sandbox.kinds import make_sandbox
from rl_async.transfer_queue.chat_messages import ROLES
from rl_async.transfer_queue.images import canonical, images_of
from rl_async.userload import encodable, raised_at, told

log = logging.getLogger("rl_async.agent_loop")

# CSI (colours, movements of the cursor), OSC (titles, links), strings for devices, and other escapes. A title or string
# that does not end takes no more than its line, or nothing.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b\]|\x9d)(?:[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c|\Z))?"
    r"|\x1b[PX^_](?:[^\x1b]*\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
)
_HIGHLIGHT = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:4[0-7]|10[0-7])(?:;[0-9;]*)?m([^\x1b\n]+)\x1b\[(?:0|49)?m")


def without_escapes(text: str) -> str:
    """Remove ANSI escapes, and half surrogate pairs. A text on a coloured background, such as the player's position, is
    put in brackets."""
    text = encodable(text)
    if "\x1b" not in text and "\x9b" not in text and "\x9d" not in text:
        return text
    return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", text))


KEY = "agent.environment_timeout_s"
USER_CALLS = DaemonCalls(KEY)


async def call_user(what: str, function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Any:
    """Call a function of an environment, a plain one in a thread. Errors call it ``what``; None means no deadline.

    Raises EnvironmentFailed if it raises or misses its deadline, except for errors of ours, which pass through.
    """
    limit_s = math.inf if timeout_s is None else timeout_s
    deadline: asyncio.Timeout | None = None
    try:
        if not inspect.iscoroutinefunction(function):
            return await USER_CALLS.call(lambda: function(*arguments), limit_s)
        # In this task and not in one of its own, which `within` would need: what one of an environment's coroutines
        # enters, such as a task group of anyio, another one of them leaves.
        async with time_limit(timeout_s) as deadline:
            return await contained(function(*arguments))
    except RlAsyncError:
        raise
    # An environment is the user's code and may raise anything; its sample fails and is given out again.
    except Exception as error:
        if isinstance(error, Overdue) or (isinstance(error, TimeoutError) and deadline and deadline.expired()):
            raise EnvironmentFailed(f"{what} did not finish within {limit_s:g} s ({KEY})") from None
        raise EnvironmentFailed(f"{what} raised {told(error)} ({raised_at(error)})") from error


class Answering(Protocol):
    """The other side of one conversation. Raises EnvironmentFailed."""

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the answer to a turn, and its observation as messages, which are empty if the episode is over."""
        ...


class OpenEnvironment(Answering, Protocol):
    """An environment in use by one episode, in this process or in another one. Methods raise EnvironmentFailed."""

    async def reset(self) -> list[Message]:
        """Begin the episode; return the messages to append to the task's prompt."""
        ...

    def tools(self) -> Sequence[CallableTool]:
        """Return the environment's tools."""
        ...

    async def reward(self) -> Score | None:
        """Return the episode's reward; None if the environment gives none, 0 if it gives rewards to turns alone."""
        ...


class OpenGame(ABC):
    """A game of several roles in use by one episode, in this process or in another one. Methods raise
    EnvironmentFailed."""

    roles: Sequence[str]

    @abstractmethod
    async def reset(self) -> tuple[Step, list[Message]]:
        """Begin the episode; return a step ``to`` the role that speaks first, and the messages to it."""

    @abstractmethod
    def tools(self) -> Mapping[str, Sequence[CallableTool]]:
        """Return the tools of each role."""

    @abstractmethod
    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the game's answer to the role that spoke, a step ``to`` the next role, and the messages to that."""

    @abstractmethod
    async def reward(self) -> Mapping[str, Score]:
        """Return the reward of each role; 0 if the game gives rewards to turns alone."""


class Environments(Protocol):
    """Opens the environments of a worker's episodes."""

    def open(self, task: Task) -> AbstractAsyncContextManager[OpenEnvironment | OpenGame]:
        """Make an environment for an episode, and close it at the episode's end."""
        ...


class UserSession:
    """An async context manager around a user's environment (``Environment``), whose methods are all optional.

    A built-in environment with ``own_deadlines`` gets none from here. Every method raises EnvironmentFailed if the
    environment raises, misses its deadline or returns something unusable, except for errors that name a user's mistake,
    which pass through. With ``start_limited``, the caller bounds the time of ``__aenter__`` and ``reset``.
    """

    def __init__(self, name: str, environment: Any, timeout_s: float, *, start_limited: bool = False) -> None:
        self._name, self._start_limited = name, start_limited
        self._timeout_s = None if getattr(environment, "own_deadlines", False) else timeout_s
        self._context = self._environment = environment

    async def __aenter__(self) -> Self:
        if self._has("__aenter__"):
            self._environment = await self._call(self._context, "__aenter__")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if self._has("close"):
                    await self._call(self._environment, "close")
            finally:
                if hasattr(self._context, "__aexit__"):
                    await self._call(self._context, "__aexit__", kind, error, trace)
        except RlAsyncError as failure:
            if error is None:
                raise
            # The first error is the one to report.
            log.warning("%s, after %s", failure, type(error).__name__)

    def _has(self, method: str) -> bool:
        return hasattr(self._environment, method)

    async def _call(self, target: Any, method: str, *arguments: Any) -> Any:
        limit = None if self._start_limited and method in ("__aenter__", "reset") else self._timeout_s
        what = f"environment {self._name}: {method}()"
        return await call_user(what, getattr(target, method), *arguments, timeout_s=limit)

    def _answer(self, method: str, step: Any) -> tuple[Step, list[Message]]:
        """Check the environment's answer; return it, and its observation as messages."""
        if not isinstance(step, Step):
            raise self._unusable(method, step, "a Step")
        try:
            step = checked(step)
        except ValueError as error:
            raise EnvironmentFailed(f"environment {self._name}: {method}() {error}") from None
        messages = self._messages(method, step.observation)
        if any(message["role"] == "assistant" for message in messages):
            raise self._unusable(method, messages, "without messages of the assistant, which the model alone writes")
        return step, [] if step.done else messages

    def _messages(self, method: str, observation: Any) -> list[Message]:
        if observation is None:
            return []
        if isinstance(observation, str):
            return [{"role": "user", "content": without_escapes(observation)}]
        if not isinstance(observation, list | tuple) or not all(
            isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str | list)
            for m in observation
        ):
            raise self._unusable(method, observation, "a text or messages with role and content as text or parts")
        try:
            messages = [canonical(message) for message in observation]
        except ValueError as error:
            raise EnvironmentFailed(f"environment {self._name}: {method}() returned a message that {error}") from None
        return [message | {"content": without_escapes(message["content"])} for message in messages]

    def _score(self, reward: Any) -> Score:
        try:
            return to_score(reward)
        except ScorerFailed as error:
            raise EnvironmentFailed(f"environment {self._name}: reward() {error}") from None

    def _unusable(self, method: str, answer: object, wanted: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment {self._name}: {method}() returned {answer!r:.80}, not {wanted}")


class Session(UserSession):
    """The `OpenEnvironment` of an environment without roles (``interface.Environment``)."""

    async def reset(self) -> list[Message]:
        if not self._has("reset"):
            return []
        return self._messages("reset", await self._call(self._environment, "reset"))

    def tools(self) -> Sequence[CallableTool]:
        return self._environment.tools() if self._has("tools") else ()

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        if not self._has("step"):
            return Step(done=True), []
        return self._answer("step", await self._call(self._environment, "step", answer))

    async def reward(self) -> Score | None:
        if not self._has("reward"):
            return Score(0.0) if self._has("step") else None
        return self._score(await self._call(self._environment, "reward"))


def joined(prompt: Sequence[Message], observation: Sequence[Message]) -> list[Message]:
    """Append the environment's first observation to a prompt.

    Many chat templates refuse two user messages in a row, so those become one.
    """
    if not (prompt and observation) or {prompt[-1]["role"], observation[0]["role"]} != {"user"}:
        return [*prompt, *observation]
    one = prompt[-1] | {"content": f"{prompt[-1]['content']}\n\n{observation[0]['content']}"}
    if images := images_of([prompt[-1], observation[0]]):
        one["images"] = images
    return [*prompt[:-1], one, *observation[1:]]


# Names of roles become part of metrics and of a key of the config, and a mapping of reward() has this other key.
ROLE = re.compile(r"[\w-]+")
NO_ROLE = "score"


class GameSession(UserSession, OpenGame):
    """A session of an environment with ``roles`` (``interface.Game``). Raises EnvironmentFailed unless these are
    distinct names."""

    def __init__(self, name: str, environment: Any, timeout_s: float, *, start_limited: bool = False) -> None:
        super().__init__(name, environment, timeout_s, start_limited=start_limited)
        self.roles = _roles(name, environment.roles)
        # Roles that were asked to speak.
        self._told = set[str]()

    async def reset(self) -> tuple[Step, list[Message]]:
        first: Any = Step(to=self.roles[0])
        if self._has("reset"):
            first = await self._call(self._environment, "reset")
        if isinstance(first, Step) and first.done:
            raise self._unusable("reset", first, "a Step to the role that speaks first")
        return self._next("reset", first)

    def tools(self) -> Mapping[str, Sequence[CallableTool]]:
        tools = self._environment.tools() if self._has("tools") else ()
        if not isinstance(tools, Mapping):
            return dict.fromkeys(self.roles, tools)
        if unknown := tools.keys() - set(self.roles):
            raise self._unusable("tools", sorted(unknown), f"tools of its roles alone: {', '.join(self.roles)}")
        return {role: tools.get(role, ()) for role in self.roles}

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        return self._next("step", await self._call(self._environment, "step", answer))

    async def reward(self) -> Mapping[str, Score]:
        reward: Any = 0.0
        if self._has("reward"):
            reward = await self._call(self._environment, "reward")
        if not (isinstance(reward, Mapping) and reward.keys() & set(self.roles)):
            return dict.fromkeys(self.roles, self._score(reward))
        if reward.keys() != set(self.roles):
            raise self._unusable("reward", reward, f"a reward for each role: {', '.join(self.roles)}")
        return {role: self._score(reward[role]) for role in self.roles}

    def _next(self, method: str, answer: Any) -> tuple[Step, list[Message]]:
        step, messages = self._answer(method, answer)
        if step.done:
            return step, []
        if step.to not in self.roles:
            raise self._unusable(method, step, f"a Step that is done or to one of {', '.join(self.roles)}")
        if step.to in self._told and not messages:
            raise self._unusable(method, step, f"a Step with an observation: {step.to} has had a turn before")
        self._told.add(step.to)
        return step, messages


def check_opponents(roles: Sequence[str], opponents: Collection[str]) -> None:
    """Raise ConfigError unless the opponents play some of a game's roles, and not all of them."""
    if unknown := set(opponents) - set(roles):
        raise ConfigError(f"agent.opponents: the game has no role {min(unknown)!r}; its roles: {', '.join(roles)}")
    if len(opponents) == len(roles):
        raise ConfigError("agent.opponents: they play all roles of the game, which leaves none to train; leave one out")


def _roles(name: str, roles: Any) -> Sequence[str]:
    if isinstance(roles, Sequence) and not isinstance(roles, str):
        fit = [isinstance(role, str) and ROLE.fullmatch(role) and role != NO_ROLE for role in roles]
        if all(fit) and len(set(roles)) == len(roles):
            return tuple(roles)
    raise EnvironmentFailed(
        f"environment {name}: its roles are {roles!r:.80}, not a list of different names of letters, digits, _ and -, "
        f"and other than {NO_ROLE!r}"
    )


class Environment:
    """A world or a simulated user that lives for one episode. Made from the episode's task; deriving is optional.

    ``prepare``, a static method, may do work beforehand that does not depend on the task; see
    ``environment_registry.EnvironmentKind``. Called in this order: ``reset``, ``tools``, then ``step`` after every turn
    without tool calls until one is done, ``reward``, and always ``close``. The optional ``__aenter__`` and
    ``__aexit__`` enclose them all. One with ``roles`` is a game, whose methods are those of ``Game``.
    """

    def reset(self) -> Observation:
        """Begin; return the observation to append to the task's prompt."""
        return None

    def tools(self) -> Sequence[Tool]:
        """Return this episode's tools, which the model gets in addition to the config's. Must not block."""
        return ()

    def step(self, answer: str) -> Step:
        """Answer a turn of the model without tool calls. ``answer`` is the turn without its reasoning."""
        return Step()

    def reward(self) -> float | Mapping[str, Any]:
        """Return the episode's reward beyond its turns' rewards: the value of the scorer ``environment``.

        A mapping has it as ``score``, and further numbers to record.
        """
        return 0.0

    def close(self) -> None:
        """Release what the episode holds."""


class Game:
    """An environment of several roles, which speak in turn. Deriving is optional; ``roles`` makes a game of it.

    Each role has a conversation of its own, which begins with the task's prompt and the first messages to the role. If
    these begin with a system message, they replace the prompt.
    """

    roles: Sequence[str] = ()

    def reset(self) -> Step:
        """Begin; the step's observation goes ``to`` the role that speaks first."""
        return Step(to=self.roles[0])

    def tools(self) -> Sequence[Tool] | Mapping[str, Sequence[Tool]]:
        """Return the tools of all roles, or those of each. Must not block."""
        return ()

    def step(self, answer: str) -> Step:
        """Answer the turn of a role. The reward is that role's; ``to`` is the role that speaks next."""
        return Step(done=True)

    def reward(self) -> float | Mapping[str, Any]:
        """Return the reward of each role beyond its turns' rewards, by role, or one reward for all of them."""
        return 0.0

    def close(self) -> None:
        """Release what the episode holds."""


class Said(NamedTuple):
    """A speaker's text, ``whole`` unless it was cut off."""

    text: str
    whole: bool


class SpeechTooLong(EnvironmentFailed):
    """The prompt and the reasoning leave the speaker no tokens to answer."""


class Speaker(Protocol):
    """Answers in a conversation in place of a person: a served model or the policy."""

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
        """Close the connections to the model's server."""
        if self.user is not None:
            await self.user.close()
