"""`reasoning_gym:DATASET`: a question of reasoning-gym, drawn by the task's seed, and its own score of the answer."""

from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.environments.adapters.seeds import seed_of
from rl_async.agent_loop.step import Step
from rl_async.errors import ConfigError
from rl_async.messages import Task


class ReasoningGym:
    """Options are the data set's parameters. The answer is what is between ``<answer>`` tags, or all of it."""

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        self._name, self._seed, self._options = name, seed_of(task), options
        self._score = 0.0

    def reset(self) -> str:
        import reasoning_gym

        try:
            self._dataset = reasoning_gym.create_dataset(self._name, size=1, seed=self._seed, **self._options)
        except (ValueError, TypeError, AssertionError) as error:  # no such data set, or no such parameter
            raise ConfigError(f"agent.environment: reasoning_gym:{self._name}: {error}") from error
        self._entry = self._dataset[0]
        return str(self._entry["question"])

    def step(self, answer: str) -> Step:
        from reasoning_gym.utils import extract_answer

        said = extract_answer(answer) or answer
        try:
            self._score = float(self._dataset.score_answer(said.strip(), self._entry))
        # Some scorers raise on an answer of another form; an episode that is played again for it would bias training.
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            self._score = 0.0
        return Step(done=True)

    def reward(self) -> float:
        return self._score
