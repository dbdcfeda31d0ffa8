"""Simulated users: environments that answer the policy as a person would, by a script or by a language model."""

from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.services import Services
from rl_async.agent_loop.step import Observation, Step
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.extraction import last_number
from rl_async.messages import Task
from rl_async.transfer_queue.dataset import fill

# A chat begins with a user's message for most models, and here the model is the user.
GREETING = "Hi! How can I help you?"


class ScriptedUser:
    """Says the texts of ``extra_info.user_turns``, one after each answer, whatever the answer was."""

    def __init__(self, task: Task, services: Services) -> None:
        turns = task.extra.get("user_turns")
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"task {task.task_id}: scripted_user needs extra_info.user_turns, a list of texts")
        self._left = list(turns)

    async def step(self, answer: str) -> Step:
        return Step(self._left.pop(0) if self._left else None)


class SimulatedUser:
    """A language model in the role that ``agent.user.system`` describes; it sees the conversation from its own side.

    It sees the user's messages of the task and the policy's answers to them, but no system message, tool call or tool
    result. It ends the conversation with ``agent.user.stop``.
    """

    own_deadlines = True  # waiting for other conversations' requests does not count

    def __init__(self, task: Task, services: Services) -> None:
        if services.user is None or services.config.agent.user is None:
            raise ConfigError("agent.environment=simulated_user needs agent.user")
        self._config, self._model = services.config.agent.user, services.user
        self._stopped, self._said = False, 0
        spoken = (message for message in task.prompt if message["role"] in ("user", "assistant"))
        # A past call may say nothing to the user.
        asked = [message for message in spoken if message["content"]]
        place, row = f"task {task.task_id}", task.extra | {"ground_truth": task.ground_truth}
        self._score = fill(self._config.score, row, place)
        self._chat: list[Message] = [
            {"role": "system", "content": fill(self._config.system, row, place)},
            {"role": "user", "content": GREETING},
            *({"role": _OTHER[message["role"]], "content": message["content"]} for message in asked),
        ]
        self._begins = not asked

    async def reset(self) -> Observation:
        """Let the user begin where the task has no message of the user."""
        return await self._speak() if self._begins else None

    async def step(self, answer: str) -> Step:
        self._chat.append({"role": "user", "content": answer})
        return Step(await self._speak(), done=self._stopped)

    async def reward(self) -> Mapping[str, Any]:
        """Return the user's own score between 0 and 1; without ``agent.user.score`` 1 if the user ended it, else 0."""
        counted = {"user_turns": self._said, "stopped": float(self._stopped)}
        if not self._score:
            return {"score": float(self._stopped), **counted}
        answer = (await self._model.say([*self._chat, {"role": "user", "content": self._score}])).text
        found = last_number(answer)
        value = None if found is None else float(found)
        lowest, highest = self._config.lowest, self._config.highest
        if value is None or not lowest <= value <= highest:
            raise EnvironmentFailed(f"agent.user.score: {answer!r:.200} has no number from {lowest:g} to {highest:g}")
        return {"score": (value - lowest) / (highest - lowest), "raw": value, **counted}

    async def _speak(self) -> str | None:
        """Return what the user says next; None if nothing is left once the stop text and what follows is cut off."""
        text = (await self._model.say(self._chat)).text
        before, stop, _ = text.partition(self._config.stop)
        self._stopped = bool(stop)
        self._said += 1
        self._chat.append({"role": "assistant", "content": text})
        return before.strip() or None


_OTHER = {"user": "assistant", "assistant": "user"}
