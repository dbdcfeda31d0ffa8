"""A game in use by one episode: an environment of several roles, each with a conversation of its own."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.session import OpenGame, UserSession
from rl_async.agent_loop.step import Step
from rl_async.agent_loop.tools.tool import CallableTool
from rl_async.errors import ConfigError, EnvironmentFailed
from rl_async.reward_loop.api import Score

ROLE = re.compile(r"[\w-]+")  # it becomes part of metrics and of a key of the config
NO_ROLE = "score"  # a key of what reward() returns


class GameSession(UserSession, OpenGame):
    """A session of an environment with ``roles`` (``interface.Game``). Raises EnvironmentFailed for other roles than
    names that differ."""

    def __init__(self, name: str, environment: Any, timeout_s: float, *, start_limited: bool = False) -> None:
        super().__init__(name, environment, timeout_s, start_limited=start_limited)
        self.roles = _roles(name, environment.roles)
        self._told = set[str]()  # roles that have spoken, or were asked to

    async def reset(self) -> tuple[Step, list[Message]]:
        """Begin the episode; return a step ``to`` the role that speaks first, and what it is told."""
        first: Any = Step(to=self.roles[0])
        if self._has("reset"):
            first = await self._call(self._environment, "reset")
        if isinstance(first, Step) and first.done:
            raise self._unusable("reset", first, "a Step to the role that speaks first")
        return self._next("reset", first)

    def tools(self) -> Mapping[str, Sequence[CallableTool]]:
        """Return the tools of each role."""
        tools = self._environment.tools() if self._has("tools") else ()
        if not isinstance(tools, Mapping):
            return dict.fromkeys(self.roles, tools)
        if unknown := tools.keys() - set(self.roles):
            raise self._unusable("tools", sorted(unknown), f"tools of its roles alone: {', '.join(self.roles)}")
        return {role: tools.get(role, ()) for role in self.roles}

    async def step(self, answer: str) -> tuple[Step, list[Message]]:
        """Return the game's answer to the role that spoke, which also says who is next, and what that one is told."""
        return self._next("step", await self._call(self._environment, "step", answer))

    async def reward(self) -> Mapping[str, Score]:
        """Return the reward of each role; 0 if the game gives rewards to turns alone."""
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


def check_unarmed(tools: Mapping[str, Sequence[CallableTool]], opponents: Collection[str]) -> None:
    """Raise ConfigError if a game has tools for an opponent."""
    if armed := [role for role in opponents if tools[role]]:
        raise ConfigError(f"agent.opponents: {armed[0]} has tools in this game, which opponents cannot call")


def _roles(name: str, roles: Any) -> Sequence[str]:
    if isinstance(roles, Sequence) and not isinstance(roles, str):
        fit = [isinstance(role, str) and ROLE.fullmatch(role) and role != NO_ROLE for role in roles]
        if all(fit) and len(set(roles)) == len(roles):
            return tuple(roles)
    raise EnvironmentFailed(
        f"environment {name}: its roles are {roles!r:.80}, not a list of different names of letters, digits, _ and -, "
        f"and other than {NO_ROLE!r}"
    )
