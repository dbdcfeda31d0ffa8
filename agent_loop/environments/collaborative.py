"""The environment `collaborative_user`: a simulated user, and rewards for what each answer makes of the conversation.

    answer ──> futures: the user and the policy speak on, several times ──> their mean score is the turn's reward
           └─> the user answers, and the episode goes on

Source: the multiturn-aware reward of CollabLLM (arXiv:2502.00640), section 3.
"""

import copy
from dataclasses import dataclass, fields

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.built_in import SimulatedUser
from rl_async.agent_loop.environments.speakers import Services
from rl_async.agent_loop.step import Step
from rl_async.concurrency import gather_or_cancel
from rl_async.errors import ConfigError
from rl_async.messages import Task


@dataclass(frozen=True)
class Futures:
    """The options of the environment: conversations per answer, their further turns, and the price of a word."""

    samples: int = 3
    turns: int = 2
    word_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.turns < 1 or self.word_penalty < 0:
            raise ConfigError(
                f"agent.environment_options: samples={self.samples} and turns={self.turns} must be 1 or more, and "
                f"word_penalty={self.word_penalty:g} not below 0"
            )


class CollaborativeUser(SimulatedUser):
    """A simulated user; an answer is worth the mean score of conversations that go on from it, sampled and forgotten.

    In each the user and the policy, as it is by then, speak ``turns`` times more at most. Its score is the user's own
    (``agent.user.score``), less ``word_penalty`` for each word of the answer and the policy's further ones, at most 1.
    """

    def __init__(self, task: Task, services: Services) -> None:
        super().__init__(task, services)
        given = services.config.agent.environment_options
        if unknown := given.keys() - {field.name for field in fields(Futures)}:
            names = ", ".join(field.name for field in fields(Futures))
            raise ConfigError(
                f"agent.environment_options: no {min(unknown)!r} of collaborative_user; there are {names}"
            )
        assert services.policy is not None, "a worker's environments can ask the policy"
        self._policy, self._futures = services.policy, Futures(**given)
        self._talk: list[Message] = list(task.prompt)

    async def reset(self) -> str | None:
        said = await self._speak() if self._begins else None
        self._talk += [{"role": "user", "content": said}] if said else []
        return said

    async def step(self, answer: str) -> Step:
        self._talk.append({"role": "assistant", "content": answer})
        scores = await gather_or_cancel(*(self._fork()._future(answer) for _ in range(self._futures.samples)))
        step = await super().step(answer)
        self._talk += [{"role": "user", "content": step.observation}] if isinstance(step.observation, str) else []
        return Step(step.observation, done=step.done, reward=sum(scores) / len(scores))

    def _fork(self) -> "CollaborativeUser":
        """Return a user whose conversation goes on without this one's."""
        fork = copy.copy(self)
        fork._chat, fork._talk = list(self._chat), list(self._talk)
        return fork

    async def _future(self, answer: str) -> float:
        """Speak on after ``answer``; return the score of the whole conversation."""
        words = len(answer.split())
        self._chat.append({"role": "user", "content": answer})
        for turn in range(self._futures.turns):
            said = await self._speak()
            if said is None or self._stopped or turn + 1 == self._futures.turns:
                break
            self._talk.append({"role": "user", "content": said})
            answer = (await self._policy.say(self._talk)).text
            words += len(answer.split())
            self._talk.append({"role": "assistant", "content": answer})
            self._chat.append({"role": "user", "content": answer})
        score: float = (await self.reward())["score"]
        return score - min(self._futures.word_penalty * words, 1.0)
