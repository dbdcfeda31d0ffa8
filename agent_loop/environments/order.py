"""The environment of the preset `order`: a scripted customer, who tells wishes when asked and leaves with an order."""

from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.environments.services import Services
from rl_async.agent_loop.step import Step
from rl_async.errors import DataError
from rl_async.messages import Task

WISHES = {
    "colour": ("red", "green", "blue", "white", "black", "pink"),
    "day": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
}
NOT_UNDERSTOOD = "pardon?"


def reply(answer: str, state: Mapping[str, Any]) -> str | None:
    """Return what the customer says; None to an order, which ends the conversation."""
    if answer.startswith("order "):
        return None
    wish = answer.removesuffix("?")
    return str(state[wish]) if answer.endswith("?") and wish in WISHES else NOT_UNDERSTOOD


class Customer:
    """An episode is worth the share of wishes that its order meets, and 0 if it orders something else or nothing."""

    def __init__(self, task: Task, services: Services) -> None:
        missing = [key for key in ("count", "item", *WISHES) if key not in task.extra]
        if missing:
            raise DataError(f"task {task.task_id}: environment order needs extra_info.{missing[0]}")
        self._state, self._asked, self._score = task.extra, 0, 0.0

    async def step(self, answer: str) -> Step:
        said = reply(answer, self._state)
        if said is not None:
            self._asked += 1
            return Step(said)
        _, *words = answer.split()
        if len(words) == 2 + len(WISHES) and words[:2] == [str(self._state["count"]), self._state["item"]]:
            met = [word == self._state[wish] for word, wish in zip(words[2:], WISHES)]
            self._score = sum(met) / len(met)
        return Step(done=True)

    async def reward(self) -> dict[str, float]:
        return {"score": self._score, "asked": float(self._asked)}
