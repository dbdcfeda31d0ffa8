"""An environment in use by one episode: calls what it has of the protocol, each call with a deadline."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.calls import call_user
from rl_async.agent_loop.plain_text import without_escapes
from rl_async.agent_loop.step import Step
from rl_async.agent_loop.tools.tool import CallableTool
from rl_async.errors import EnvironmentFailed, RlAsyncError
from rl_async.messages import Task
from rl_async.reward_loop.api import Score, ScorerFailed, finite_number, to_score
from rl_async.transfer_queue.chat_messages import ROLES

log = logging.getLogger("rl_async.agent_loop")


class Answering(Protocol):
    """What answers the turns of one conversation. Raises EnvironmentFailed."""

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the answer to a turn, and what it says as messages: none where the episode is over."""
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
        """Begin the episode; return a step ``to`` the role that speaks first, and what it is told."""

    @abstractmethod
    def tools(self) -> Mapping[str, Sequence[CallableTool]]:
        """Return the tools of each role."""

    @abstractmethod
    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the game's answer to the role that spoke, which also says who is next, and what that one is told."""

    @abstractmethod
    async def reward(self) -> Mapping[str, Score]:
        """Return the reward of each role; 0 if the game gives rewards to turns alone."""


class Environments(Protocol):
    """Where a worker's episodes get their environments from."""

    def open(self, task: Task) -> AbstractAsyncContextManager[OpenEnvironment | OpenGame]:
        """Make an environment for an episode, and close it at the episode's end."""
        ...


class UserSession:
    """An async context manager around a user's environment (``interface.py``), whose methods are all optional.

    ``own_deadlines`` of a built-in environment says that what it waits for has deadlines. Every method raises
    EnvironmentFailed if the environment raises, misses its deadline or returns something unusable, except for errors
    that name a user's mistake, which pass through. ``start_limited``: the caller bounds how long ``__aenter__`` and
    ``reset`` take.
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
            log.warning("%s, after %s", failure, type(error).__name__)  # the first error is the one to report

    def _has(self, method: str) -> bool:
        return hasattr(self._environment, method)

    async def _call(self, target: Any, method: str, *arguments: Any) -> Any:
        limit = None if self._start_limited and method in ("__aenter__", "reset") else self._timeout_s
        what = f"environment {self._name}: {method}()"
        return await call_user(what, getattr(target, method), *arguments, timeout_s=limit)

    def _answer(self, method: str, step: Any) -> tuple[Step, list[Message]]:
        """Check what the environment answered; return it, and its observation as messages."""
        if not isinstance(step, Step):
            raise self._unusable(method, step, "a Step")
        reward = None if step.reward is None else finite_number(step.reward)
        if step.reward is not None and reward is None:
            raise self._unusable(method, step.reward, "a reward that is a finite number")
        step = step._replace(reward=reward, done=bool(step.done), reason=str(step.reason))
        messages = self._messages(method, step.observation)
        if any(message["role"] == "assistant" for message in messages):
            raise self._unusable(method, messages, "without messages of the assistant, which the model alone writes")
        return step, [] if step.done else messages

    def _messages(self, method: str, observation: Any) -> list[Message]:
        if observation is None:
            return []
        if isinstance(observation, str):
            return [{"role": "user", "content": without_escapes(observation)}]
        if not isinstance(observation, list | tuple) or not all(map(_is_message, observation)):
            raise self._unusable(method, observation, "a text or messages with role and content as text")
        return [message | {"content": without_escapes(message["content"])} for message in observation]

    def _score(self, reward: Any) -> Score:
        try:
            return to_score(reward)
        except ScorerFailed as error:
            raise EnvironmentFailed(f"environment {self._name}: reward() {error}") from None

    def _unusable(self, method: str, answer: object, wanted: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment {self._name}: {method}() returned {answer!r:.80}, not {wanted}")


class Session(UserSession):
    """A session of an environment without roles (``interface.Environment``)."""

    async def reset(self) -> list[Message]:
        """Begin the episode; return the messages to append to the task's prompt."""
        if not self._has("reset"):
            return []
        return self._messages("reset", await self._call(self._environment, "reset"))

    def tools(self) -> Sequence[CallableTool]:
        """Return the environment's tools."""
        return self._environment.tools() if self._has("tools") else ()

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the environment's answer to a turn, and what it says as messages: none where the episode is over."""
        if not self._has("step"):
            return Step(done=True), []
        return self._answer("step", await self._call(self._environment, "step", answer))

    async def reward(self) -> Score | None:
        """Return the episode's reward; None if the environment gives none, 0 if it gives rewards to turns alone."""
        if not self._has("reward"):
            return Score(0.0) if self._has("step") else None
        return self._score(await self._call(self._environment, "reward"))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and value.get("role") in ROLES and isinstance(value.get("content"), str)


def joined(prompt: Sequence[Message], observation: Sequence[Message]) -> list[Message]:
    """Return a prompt with what the environment says first.

    Many chat templates refuse two user messages in a row, so those become one.
    """
    if not (prompt and observation) or {prompt[-1]["role"], observation[0]["role"]} != {"user"}:
        return [*prompt, *observation]
    text = f"{prompt[-1]['content']}\n\n{observation[0]['content']}"
    return [*prompt[:-1], prompt[-1] | {"content": text}, *observation[1:]]
