"""`verl:FILE.yaml`: verl's interactions (`verl.interactions.base.BaseInteraction`), unchanged.

FILE is what verl's `multi_turn.interaction_config_path` names: a list `interaction` of `{name, class_name, config}`.
The column `extra_info.interaction_kwargs` of a task has the `name` of its interaction and what that wants to know.
"""

import functools
import inspect
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.step import Step
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Task
from rl_async.userload import load_user_object


class _Entry(msgspec.Struct):
    class_name: str
    name: str = ""
    config: dict[str, Any] = {}


class _File(msgspec.Struct):
    interaction: list[_Entry]


class VerlInteraction:
    """The sum of the turns' scores is the episode's reward, beside the last one; verl's rewards get them likewise.

    As in verl, one object serves all episodes of a process, and ``calculate_score`` is not called from outside.
    """

    def __init__(self, name: str, task: Task, options: Mapping[str, Any]) -> None:
        given = task.extra.get("interaction_kwargs") or {}
        self._kwargs = {key: value for key, value in given.items() if value is not None}  # Arrow fills other rows' keys
        self._interaction = _chosen(interactions(name), self._kwargs.get("name"), task)
        self._id, self._scores = f"{task.task_id}.{uuid.uuid4().hex}", list[float]()
        self._messages: list[Message] = [dict(message) for message in task.prompt]

    async def reset(self) -> None:
        self._id = await self._interaction.start_interaction(self._id, **self._kwargs)

    async def step(self, answer: str) -> Step:
        self._messages.append({"role": "assistant", "content": answer})
        done, text, score, _ = await self._interaction.generate_response(self._id, self._messages, **self._kwargs)
        self._messages.append({"role": "user", "content": text})
        self._scores.append(float(score))
        return Step(text, done=bool(done))

    async def reward(self) -> dict[str, float]:
        return {"score": sum(self._scores), "last": self._scores[-1] if self._scores else 0.0}

    async def close(self) -> None:
        finalize = self._interaction.finalize_interaction
        await (finalize(self._id) if inspect.signature(finalize).parameters else finalize())  # the base class has none


@functools.cache
def interactions(file: str) -> dict[str, Any]:
    """Make the interactions that a file of verl lists, by name. Raises ConfigError naming what is wrong with it."""
    key = f"agent.environment=verl:{file}"
    try:
        entries = msgspec.yaml.decode(Path(file).read_bytes(), type=_File).interaction
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{key}: {error}") from error
    made = {}
    for entry in entries:
        module, _, name = entry.class_name.rpartition(".")
        kind: Callable[[dict[str, Any]], Any] = load_user_object(f"{module}:{name}", key)
        called = entry.name or name.removesuffix("Interaction").lower()  # as verl names those without a name
        made[called] = kind({"name": called, **entry.config})
    if not made:
        raise ConfigError(f"{key}: it lists no interaction")
    return made


def _chosen(known: dict[str, Any], name: str | None, task: Task) -> Any:
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name is None or name not in known:
        raise DataError(
            f"task {task.task_id}: extra_info.interaction_kwargs.name is {name!r}; known: {', '.join(known)}"
        )
    return known[name]
