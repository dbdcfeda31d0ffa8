"""One of verl's interactions (`verl.interactions.base.BaseInteraction`) in use by one episode.

The column `extra_info.interaction_kwargs` of a task has the `name` of its interaction and what that wants to know.
"""

import inspect
import uuid
from collections.abc import Mapping
from typing import Any

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.step import Step
from rl_async.errors import DataError
from rl_async.messages import Task


class EpisodeInteraction:
    """The sum of the turns' scores is the episode's, beside the last one; verl's rewards get them likewise.

    As in verl, ``calculate_score`` is not called from outside.
    """

    def __init__(self, known: Mapping[str, Any], task: Task) -> None:
        given = task.extra.get("interaction_kwargs") or {}
        self._kwargs = {key: value for key, value in given.items() if value is not None}  # Arrow fills other rows' keys
        self._interaction = _chosen(known, self._kwargs.get("name"), task)
        self._id, self._scores = f"{task.task_id}.{uuid.uuid4().hex}", list[float]()
        self._messages: list[Message] = [dict(message) for message in task.prompt]

    async def start(self) -> None:
        """Begin the episode."""
        self._id = await self._interaction.start_interaction(self._id, **self._kwargs)

    async def step(self, answer: str) -> Step:
        """Answer a turn."""
        self._messages.append({"role": "assistant", "content": answer})
        done, text, score, _ = await self._interaction.generate_response(self._id, self._messages, **self._kwargs)
        self._messages.append({"role": "user", "content": text})
        self._scores.append(float(score))
        return Step(text, done=bool(done))

    def reward(self) -> dict[str, float]:
        """Return the episode's score, and the last turn's."""
        return {"score": sum(self._scores), "last": self._scores[-1] if self._scores else 0.0}

    async def finalize(self) -> None:
        """End the episode."""
        finalize = self._interaction.finalize_interaction
        await (finalize(self._id) if inspect.signature(finalize).parameters else finalize())  # the base class has none


def _chosen(known: Mapping[str, Any], name: str | None, task: Task) -> Any:
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None or name not in known:
        raise DataError(
            f"task {task.task_id}: extra_info.interaction_kwargs.name is {name!r}; known: {', '.join(known)}"
        )
    return known[name]
