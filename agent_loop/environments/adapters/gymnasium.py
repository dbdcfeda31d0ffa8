"""`gymnasium:NAME`: environments of Gymnasium that can be played in text."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.environments.adapters.seeds import seed_of
from rl_async.agent_loop.plain_text import without_escapes
from rl_async.agent_loop.step import Step
from rl_async.errors import ConfigError
from rl_async.extraction import last_number
from rl_async.messages import Task

# A line of the section "Action Space" that Gymnasium's own environments have in their documentation.
_MEANING = re.compile(r"^\s*[-|]\s*(\d+)\s*[:|]\s*([^|\n]+?)\s*(?:\||$)", re.MULTILINE)


class Gymnasium:
    """Options are those of ``gymnasium.make``; with ``render_mode: ansi`` the rendering is what the model sees.

    The action is the answer itself in a Text space, and the last number of the answer in a Discrete one; the model is
    told what the numbers mean, as far as the environment says so. Every step's reward is its turn's; an answer that is
    no action has none, and the model is told.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._task, self._options = name, task, options

    def reset(self) -> str:
        import gymnasium

        try:
            self._world: Any = gymnasium.make(self._name, **self._options)
        except gymnasium.error.Error as error:  # no such environment or version, or a package that it needs
            raise ConfigError(f"agent.environment: gymnasium:{self._name}: {error}") from error
        self._how = how_to_act(f"gymnasium:{self._name}", self._world.action_space, meanings(self._world.unwrapped))
        observation, _ = self._world.reset(seed=seed_of(self._task))
        return "\n".join(filter(None, [self._shown(observation), self._how]))

    def step(self, answer: str) -> Step:
        action = action_of(answer, self._world.action_space)
        if action is None:
            return Step(self._how or "That is no action.", reason="no action")
        observation, reward, terminated, truncated, _ = self._world.step(action)
        return Step(self._shown(observation), reward=float(reward), done=bool(terminated or truncated))

    def close(self) -> None:
        if hasattr(self, "_world"):
            self._world.close()

    def _shown(self, observation: Any) -> str:
        return without_escapes(str(self._world.render() if self._world.render_mode == "ansi" else observation))


def meanings(world: Any) -> dict[int, str]:
    """Return what the numbered actions of an environment mean, as far as it says so."""
    if hasattr(world, "get_action_meanings"):
        return dict(enumerate(map(str, world.get_action_meanings())))
    _, _, section = (inspect.getdoc(type(world)) or "").partition("Action Space")
    return {
        int(number): meaning for number, meaning in _MEANING.findall(section.partition("\n#")[0].partition(" ##")[0])
    }


def how_to_act(name: str, space: Any, known: Mapping[int, str] | None = None) -> str:
    """Return how to answer in an action space; empty where any text is an action.

    Raises ConfigError, naming the environment, for a space of other things than texts or numbers.
    """
    import gymnasium

    if isinstance(space, gymnasium.spaces.Text):
        return ""
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(f"agent.environment: actions of {name} are {space}, not text or a number")
    numbers = range(int(space.start), int(space.start + space.n))
    told = f"Answer with a number from {numbers[0]} to {numbers[-1]}"
    if not known or any(number not in known for number in numbers):
        return f"{told}."
    return f"{told}: {', '.join(f'{number} is {known[number]!r}' for number in numbers)}."


def action_of(answer: str, space: Any) -> Any:
    """Return the action that an answer names; None if it names none."""
    import gymnasium

    if isinstance(space, gymnasium.spaces.Text):
        return answer if answer in space else None
    number = last_number(answer)
    action = int(number) if number is not None and number.lstrip("-").isdecimal() else None
    return action if action is not None and space.start <= action < space.start + space.n else None
