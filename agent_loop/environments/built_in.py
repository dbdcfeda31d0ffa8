"""The built-in environments: simulated and scripted users, and the worlds of the presets `order`, `shop` and `grid`.

``collaborative_user`` is a simulated user that rewards each answer for what it makes of the conversation:

    answer ──> futures: the user and the policy speak on, several times ──> their mean score is the turn's reward
           └─> the user answers, and the episode goes on

In `order` a scripted customer tells wishes when asked and leaves with an order. In `shop` a tool looks up prices. In
`grid` a tool shows a part of an image larger.
"""

import copy
import functools
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from PIL import Image, ImageDraw

from rl_async.agent_loop.chat_formats.format import Message
from rl_async.agent_loop.environments.session import Services
from rl_async.agent_loop.tools.tool import Observation, Step, Tool
from rl_async.agent_loop.tools.tool_registry import CALCULATOR
from rl_async.concurrency import gather_or_cancel
from rl_async.errors import ConfigError, DataError, EnvironmentFailed
from rl_async.extraction import last_number
from rl_async.messages import Task
from rl_async.transfer_queue.dataset import fill

log = logging.getLogger("rl_async.agent_loop")


class ScriptedUser:
    """Says the texts of ``extra_info.user_turns``, one after each answer, regardless of its content."""

    def __init__(self, task: Task, services: Services) -> None:
        turns = task.extra.get("user_turns")
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise DataError(f"task {task.task_id}: scripted_user needs extra_info.user_turns, a list of texts")
        self._left = list(turns)

    async def step(self, answer: str) -> Step:
        return Step(self._left.pop(0) if self._left else None)


# A chat begins with a user's message for most models, and here the model is the user.
GREETING = "Hi! How can I help you?"
_OTHER = {"user": "assistant", "assistant": "user"}


class SimulatedUser:
    """A language model in the role that ``agent.user.system`` describes; it sees the conversation from its own side.

    It sees the user's messages of the task and the policy's answers to them, but no system message, tool call or tool
    result. It ends the conversation with ``agent.user.stop``.
    """

    # The model's requests have deadlines of their own, which exclude the wait for other conversations' requests.
    own_deadlines = True

    def __init__(self, task: Task, services: Services) -> None:
        if services.user is None or services.config.agent.user is None:
            raise ConfigError("agent.environment=simulated_user needs agent.user")
        self._config, self._model = services.config.agent.user, services.user
        self._stopped, self._said, self._cut = False, 0, 0
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
        counted = {"user_turns": self._said, "stopped": float(self._stopped), "cut_turns": self._cut}
        if not self._score:
            return {"score": float(self._stopped), **counted}
        answer, whole = await self._model.say([*self._chat, {"role": "user", "content": self._score}])
        found = last_number(answer)
        value = None if found is None else float(found)
        lowest, highest = self._config.lowest, self._config.highest
        if not whole:
            raise EnvironmentFailed(f"agent.user.score: {answer!r:.200} was cut off (agent.user.max_tokens)")
        if value is None or not lowest <= value <= highest:
            raise EnvironmentFailed(f"agent.user.score: {answer!r:.200} has no number from {lowest:g} to {highest:g}")
        return {"score": (value - lowest) / (highest - lowest), "raw": value, **counted}

    async def _speak(self) -> str | None:
        """Return the user's next text up to the stop text, or None if that is empty. One that was cut says so."""
        text, whole = await self._model.say(self._chat)
        before, stop, _ = text.partition(self._config.stop)
        self._stopped = bool(stop)
        self._said += 1
        self._chat.append({"role": "assistant", "content": text})
        if not (whole or stop):
            self._cut += 1
            log_cut_turns(self._config.max_tokens)
            return f"{before.strip()}\n{CUT}".lstrip()
        return before.strip() or None


# The last line of a message of the user that was cut.
CUT = "[cut: the message was too long]"


@functools.cache
def log_cut_turns(tokens: int) -> None:
    """Log, once per process, that messages of users are cut after so many tokens."""
    log.warning(
        "a message of the user was cut after %d tokens, and says so; raise agent.user.max_tokens if that is too little "
        "(logged once; environment/cut_turns in reward_parts counts them)",
        tokens,
    )


WISHES = {
    "colour": ("red", "green", "blue", "white", "black", "pink"),
    "day": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
}
NOT_UNDERSTOOD = "pardon?"


def reply(answer: str, state: Mapping[str, Any]) -> str | None:
    """Return the customer's answer, or None to an order, which ends the conversation."""
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


# The demonstrations show the model this error.
NO_SUCH_ITEM = "no such item"


class Shop:
    """One item with a hidden price, which the tool ``lookup`` returns and ``calculator`` computes with."""

    def __init__(self, task: Task, services: Services) -> None:
        try:
            self._item, self._price = str(task.extra["item"]), str(task.extra["price"])
        except KeyError as error:
            raise DataError(f"task {task.task_id}: environment shop needs extra_info.{error.args[0]}") from error

    def tools(self) -> Sequence[Tool]:
        return (_LOOKUP.bound(self.lookup), CALCULATOR)

    def lookup(self, item: str) -> str:
        """The price of an item."""
        if item != self._item:
            raise ValueError(NO_SUCH_ITEM)
        return self._price


_LOOKUP = Tool(Shop.lookup, name="lookup", quick=True)


# A grid has so many cells on a side, each of so many pixels; its quarters are numbered by rows.
CELLS, CELL = 4, 8
QUARTERS = ("1", "2", "3", "4")
# The colours of the columns, which are darker from row to row. A tiny model can tell the cells apart by them, while a
# tower without absolute positions takes long to learn where a patch lies.
COLUMNS = ((255, 120, 120), (120, 255, 120), (120, 120, 255), (255, 255, 120))


def draw_grid(state: Mapping[str, Any], quarter: str = "") -> bytes:
    """Draw a shape in the cell at ``column`` and ``row`` as a PNG file, or a quarter of the grid twice as large."""
    side = CELLS * CELL
    image = Image.new("RGB", (side, side))
    pencil = ImageDraw.Draw(image)
    for row in range(CELLS):
        for column, colour in enumerate(COLUMNS):
            left, top = CELL * column, CELL * row
            tint = tuple(level * (5 - row) // 5 for level in colour)
            pencil.rectangle((left, top, left + CELL - 1, top + CELL - 1), fill=tint)
    left, top = CELL * state["column"] + state["x"], CELL * state["row"] + state["y"]
    pencil.ellipse((left, top, left + 4, top + 4), fill=(state["shade"],) * 3)
    if quarter:
        down, right = divmod(QUARTERS.index(quarter), 2)
        half = side // 2
        image = image.crop((half * right, half * down, half * right + half, half * down + half))
        image = image.resize((side, side), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Grid:
    """A grid with a shape in one of its cells, of which the tool ``zoom`` shows a quarter."""

    def __init__(self, task: Task, services: Services) -> None:
        missing = [key for key in ("column", "row", "x", "y", "shade") if key not in task.extra]
        if missing:
            raise DataError(f"task {task.task_id}: environment grid needs extra_info.{missing[0]}")
        self._state = task.extra

    def tools(self) -> Sequence[Tool]:
        return (_ZOOM.bound(self.zoom),)

    def zoom(self, quarter: str) -> bytes:
        """Show a quarter of the image, 1 to 4, larger."""
        if quarter not in QUARTERS:
            raise ValueError("quarters are 1 to 4")
        return draw_grid(self._state, quarter)


_ZOOM = Tool(Grid.zoom, name="zoom", quick=True)


@dataclass(frozen=True)
class Futures:
    """The options of ``collaborative_user``: conversations per answer, their further turns, and the price of a word."""

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
    Source: the multiturn-aware reward of CollabLLM (arXiv:2502.00640), section 3.
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
