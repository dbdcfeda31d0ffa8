"""`gymnasium:NAME`: environments of Gymnasium that can be played in text."""

from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.environments.adapters.seeds import seed_of
from rl_async.agent_loop.step import Step
from rl_async.errors import ConfigError
from rl_async.extraction import last_number
from rl_async.messages import Task


class Gymnasium:
    """Options are those of ``gymnasium.make``; with ``render_mode: ansi`` the rendering is what the model sees.

    The action is the answer itself in a Text space, and the last number of the answer in a Discrete one. Every step's
    reward is its turn's; an answer that is no action has none, and the model is told.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._task, self._options = name, task, options

    def reset(self) -> str:
        import gymnasium

        self._world: Any = gymnasium.make(self._name, **self._options)
        space = self._world.action_space
        self._discrete = isinstance(space, gymnasium.spaces.Discrete)
        if not self._discrete and not isinstance(space, gymnasium.spaces.Text):
            raise ConfigError(f"agent.environment: actions of gymnasium:{self._name} are {space}, not text or a number")
        observation, _ = self._world.reset(seed=seed_of(self._task))
        return "\n".join(filter(None, [self._shown(observation), self._how()]))

    def step(self, answer: str) -> Step:
        action = self._action(answer)
        if action is None:
            return Step(self._how(), reason="no action")
        observation, reward, terminated, truncated, _ = self._world.step(action)
        return Step(self._shown(observation), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        if hasattr(self, "_world"):
            self._world.close()

    def _action(self, answer: str) -> Any:
        space = self._world.action_space
        if not self._discrete:
            return answer if answer in space else None
        number = last_number(answer)
        action = int(number) if number is not None and number.lstrip("-").isdecimal() else None
        return action if action is not None and space.start <= action < space.start + space.n else None

    def _how(self) -> str:
        space = self._world.action_space
        return f"Answer with a number from {space.start} to {space.start + space.n - 1}." if self._discrete else ""

    def _shown(self, observation: Any) -> str:
        return str(self._world.render() if self._world.render_mode == "ansi" else observation)
