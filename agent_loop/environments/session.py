"""An environment in use by one episode: a ``Session``, or a ``GameSession`` if it has several roles.

Users' methods are awaited or run in a thread, with a deadline; errors name the method and the line. Observations
reach the model as plain text, without ANSI escapes. In a game each role has a conversation of its own.
"""

import asyncio
import inspect
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.tools.tool import CallableTool, Step, checked
from rl_async.concurrency import DaemonCalls, Overdue, contained, time_limit, within
from rl_async.errors import ConfigError, EnvironmentFailed, RlAsyncError
from rl_async.messages import Task
from rl_async.reward_loop.api import Score, ScorerFailed, to_score
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
USER_CALLS = DaemonCalls("environment", KEY)


async def call_user(what: str, function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Any:
    """Call a function of an environment, a plain one in a thread. Errors call it ``what``; None means no deadline.

    Raises EnvironmentFailed if it raises or misses its deadline, except for errors of ours, which pass through.
    """
    limit_s = math.inf if timeout_s is None else timeout_s
    deadline: asyncio.Timeout | None = None
    try:
        if not inspect.iscoroutinefunction(function):
            return await within(limit_s, USER_CALLS.call(lambda: function(*arguments)))
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
    """An async context manager around a user's environment (``interface.py``), whose methods are all optional.

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
