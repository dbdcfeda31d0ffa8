"""Refuses conversations with parts that a chat template leaves out: tools, calls, reasoning, the content of a role.

Demonstrations and prompts of tasks are checked by the same code. Trained on such a demonstration, a model learns to end
its turn where a call was; after such a prompt it answers another question than the one that is scored.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jinja2

from rl_async.agent_loop.chat_formats.format import ChatFormat, Message, with_names
from rl_async.errors import DataError
from rl_async.messages import Task
from rl_async.template_tokens import MISFITS

# Data sets have the reasoning of a turn under such keys, or as part of its content, up to this tag.
_REASONING = re.compile("reasoning|thinking|thought")
_THOUGHT = "</think>"

Tools = list[dict[str, Any]]


class PrintedParts:
    """Checks conversations with one template; ``render`` prints messages and tools with it."""

    def __init__(self, render: Callable[[list[Message], Tools], str]) -> None:
        self._render = render
        # Shapes of conversations that the template prints completely.
        self._complete: set[str] = set()

    def check(self, messages: Sequence[Message], tools: Tools, place: str) -> None:
        """Raise DataError, naming ``place`` and the message, for a part that the template leaves out.

        The check prints a conversation of the same shape with a mark in each place, once for all of that shape.
        """
        shape = _shape(messages, tools)
        if shape in self._complete:
            return
        marked, offered, marks = _with_marks(messages, tools)
        printed = self._render(marked, offered)
        for mark, part, problem in marks:
            if mark not in printed:
                raise DataError(f"{place}{part}: the chat template does not print {problem}")
        self._complete.add(shape)


def check_prompts(tasks: Iterable[tuple[str, Task]], load: Callable[[], ChatFormat]) -> None:
    """Raise DataError, naming the place, for the first prompt with a part that the chat format leaves out.

    The format is only loaded for a prompt with more than texts of the user, which every template prints. Tools are the
    format's own check.
    """
    parts: PrintedParts | None = None
    for place, task in tasks:
        if all(message["role"] == "user" and message.keys() == {"role", "content"} for message in task.prompt):
            continue
        if parts is None:
            chat = load()
            parts = PrintedParts(lambda messages, tools, chat=chat: _prompt_text(chat, messages))  # type: ignore[misc]
        try:
            parts.check(task.prompt, [], place)
        except (jinja2.TemplateError, *MISFITS) as error:
            raise DataError(f"{place}: the model's chat template refuses it: {error}") from error


def _prompt_text(chat: ChatFormat, messages: list[Message]) -> str:
    return chat.turn_text(chat.prompt(with_names(messages)))


class _Mark(NamedTuple):
    """A text that a template must print, its place in a conversation, and the error if it is missing."""

    text: str
    place: str
    problem: str


def _shape(messages: Sequence[Message], tools: Tools) -> str:
    """Describe which parts the messages of a conversation have; conversations of one shape are printed alike."""
    parts = [
        (
            message["role"],
            bool(message["content"].strip()),
            _THOUGHT in message["content"],
            [bool(call["function"]["arguments"]) for call in message.get("tool_calls", ())],
            _reasoning(message),
        )
        for message in messages
    ]
    return json.dumps([parts, [sorted(tool) for tool in tools]])


def _reasoning(message: Message) -> list[str]:
    return [key for key in message if _REASONING.match(key) and message[key]]


def _with_marks(messages: Sequence[Message], tools: Tools) -> tuple[list[Message], Tools, list[_Mark]]:
    """Return the conversation with marks in place of contents, reasoning, calls and tools, and these marks."""
    marks: list[_Mark] = []

    def mark(kind: str, place: str, problem: str) -> str:
        marks.append(_Mark(f"zq{len(marks)}{kind}", place, problem))
        return marks[-1].text

    offered = []
    for tool in tools:
        named = {"name": mark("tool", "", "tools; leave them out, or take a model whose template does")}
        offered.append(tool | ({"function": tool["function"] | named} if "function" in tool else named))
    marked, shorter = [], "leave it out, or let the row end with this turn"
    for number, message in enumerate(messages):
        place, role = f", message {number}", message["role"]
        made = {key: value for key, value in message.items() if key != "images"}
        if message["content"].strip():
            made["content"] = mark("content", place, f"a {role} message; change its role, or leave it out")
            if _THOUGHT in message["content"]:
                thought = mark("thought", place, f"the reasoning of this turn; {shorter}")
                made["content"] = f"<think>\n{thought}\n{_THOUGHT}\n\n{made['content']}"
        for key in _reasoning(message):
            made[key] = mark("reasoning", place, f"{key}, the reasoning of this turn; {shorter}")
        if calls := message.get("tool_calls"):
            hint = "the tool calls of this turn; write them into its content, as the model is to write them"
            made["tool_calls"] = []
            for call in calls:
                name, value = mark("name", place, hint), mark("value", place, hint)
                function = call["function"] | {"name": name, "arguments": {f"{value}key": value}}
                made["tool_calls"].append(call | {"function": function})
        marked.append(made)
    return marked, offered, marks
