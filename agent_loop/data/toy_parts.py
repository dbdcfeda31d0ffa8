"""What generated tasks and their demonstrations are made of."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from rl_async.agent_loop.chat_formats.hermes import CALL_END, CALL_START

Message = dict[str, str]


class ToyTask(NamedTuple):
    """One generated task. ``state`` goes into ``extra_info``, where an environment finds it."""

    prompt: str
    answer: str
    state: dict[str, Any]


class ToyTaskKind(NamedTuple):
    """How to draw a task and a demonstration of it. ``agent`` is the name of its loop.

    ``held_out``: held-out tasks, as many as leave enough others to train on. ``demonstrated`` draws the tasks of
    demonstrations if they are others. ``system`` is the system message of all.
    """

    agent: str
    ability: str
    sample: Callable[[random.Random], ToyTask]
    demonstrate: Callable[[ToyTask, random.Random], list[Message]] | None
    held_out: int = 256
    demos: int = 16384
    demonstrated: Callable[[random.Random], ToyTask] | None = None
    system: str = ""


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool_result(text: str) -> Message:
    return {"role": "tool", "content": text}


def tool_call(name: str, **arguments: str) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"{CALL_START}\n{body}\n{CALL_END}"


def broken(call: str) -> str:
    """Drop the call's last brace, so that no parser accepts it."""
    return call.replace('"}}', '"}')


def corrupt(text: str, random_source: random.Random) -> str:
    """Replace one character by a digit or operator, possibly by itself."""
    at = random_source.randrange(len(text))
    new = str(random_source.randint(1, 9)) if text[at].isdigit() else random_source.choice("+-*")
    return text[:at] + new + text[at + 1 :]


def corrupted(text: str, random_source: random.Random) -> str:
    """Apply ``corrupt`` until the text differs."""
    while (other := corrupt(text, random_source)) == text:
        pass
    return other


def wild_guess(random_source: random.Random, highest: int) -> Message:
    return assistant(str(random_source.randint(0, highest)))
