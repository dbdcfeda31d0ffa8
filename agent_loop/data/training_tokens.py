"""Encodes conversations and marks the assistant's tokens, which are trained on with the token that ends each turn.

Chat templates may mark them (``{% generation %}``), and families of the package renderers know them. With any other
template, a turn starts where the rendering of everything before it ends and extends to its end-of-turn token. The text
before a turn is encoded on its own, as an engine would get it, so the model is trained on the very tokens that it is to
sample. A conversation of which the template leaves something out is refused.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from rl_async.agent_loop.chat_formats.format import flat_calls
from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import LibraryFormat
from rl_async.agent_loop.chat_formats.registry import choose
from rl_async.agent_loop.chat_formats.render import ChatRenderer, nested, takes_arguments_as_text
from rl_async.agent_loop.data.chats import Chat
from rl_async.configs.schema.chat_formats import ChatFormatName
from rl_async.errors import ConfigError, DataError
from rl_async.template_tokens import TemplateTokens

Message = dict[str, Any]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The keys in which data sets have the reasoning of a turn, and what ends reasoning that is part of a content.
_REASONING = re.compile("reasoning|thinking|thought")
_THOUGHT = "</think>"


class ChatTokens(NamedTuple):
    """A conversation's token ids, and which of them are trained on; both [T]."""

    ids: np.ndarray  # int32
    learned: np.ndarray  # bool


class ChatEncoder:
    """Encodes with one tokenizer.

    Raises ConfigError if its chat template neither marks turns nor ends them with a special token, and if the tokenizer
    does not go with ``chat_format``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_format: ChatFormatName = "auto") -> None:
        self._tokenizer, self._tokens = tokenizer, TemplateTokens(tokenizer)
        self._encode: Callable[[Chat], ChatTokens] = self._marked
        self._print: Callable[[Chat], str] = self._render
        self._takes_text = takes_arguments_as_text(self._print_past)
        # Shapes of conversations that the template prints whole.
        self._whole: set[str] = set()
        if _MARKER.search(str(tokenizer.get_chat_template())):
            return
        self._encode = self._by_prefixes
        try:
            chat = choose(tokenizer, chat_format)
        except (ValueError, jinja2.TemplateError) as error:
            if chat_format != "auto":
                raise ConfigError(f"agent.chat_format={chat_format}: {error}; use auto or another one") from error
            raise ConfigError(
                f"model.path: the end of an assistant's turn cannot be determined: {error}; put {{% generation %}} and "
                "{% endgeneration %} around what the assistant says in the chat template"
            ) from error
        if isinstance(chat, LibraryFormat | HarmonyFormat):
            self._family, self._encode, self._print = chat, self._by_family, self._print_by_family
            return
        assert isinstance(chat, ChatRenderer)
        self._renderer = chat
        self._end = self._renderer.decode([self._renderer.end_of_turn])

    def encode(self, chat: Chat) -> ChatTokens:
        """Encode a conversation.

        Raises DataError, naming it, if the assistant's tokens cannot be determined, or if the template does not print
        all of it.
        """
        try:
            tokens = self._encode(chat)
            self._check_printed(chat)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{chat.place}: the model's chat template refuses it: {error}") from error
        if not tokens.learned.any():
            raise DataError(f"{chat.place}: the chat template marks nothing of it as the assistant's")
        return tokens

    def _check_printed(self, chat: Chat) -> None:
        """Raise DataError for what the template leaves out of a conversation.

        A conversation of the same shape, with a mark in each place, is printed, once for all of that shape.
        """
        shape = _shape(chat)
        if shape in self._whole:
            return
        marked, marks = _with_marks(chat)
        printed = self._print(marked)
        for mark, place, problem in marks:
            if mark not in printed:
                raise DataError(f"{chat.place}{place}: the chat template does not print {problem}")
        self._whole.add(shape)

    def _marked(self, chat: Chat) -> ChatTokens:
        chat = self._escaped(chat)
        special: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        rendered: Any = render_jinja_template(
            conversations=[self._given(chat.messages)],
            tools=[*chat.tools] or None,
            chat_template=str(self._tokenizer.get_chat_template()),
            return_assistant_tokens_mask=True,
            **special,
        )
        (printed,), (spans,) = rendered
        pieces, done = list[tuple[str, bool]](), 0
        for start, end in spans:
            pieces += [(printed[done:start], False), (printed[start:end], True)]
            done = end
        ids, learned = self._tokens.encode_pieces([*pieces, (printed[done:], False)])
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _by_family(self, chat: Chat) -> ChatTokens:
        ids, learned = self._family.row(chat.messages, chat.tools)
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _print_by_family(self, chat: Chat) -> str:
        return self._family.decode(self._family.row(chat.messages, chat.tools)[0])

    def _by_prefixes(self, chat: Chat) -> ChatTokens:
        ids: list[int] = []
        learned: list[bool] = []
        encode, after = self._renderer.encode_printed, ""
        for before, spoken in self._turns(chat):
            given = encode(before, after)
            both = encode(before + spoken, after)
            # The text of a turn may join the text before it in a token, which an engine could not be given.
            joined = both[: len(given)] != given
            said = self._renderer.encode_continued(spoken) if joined else both[len(given) :]
            ids += [*given, *said]
            learned += [False] * len(given) + [True] * len(said)
            after = self._end
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _turns(self, chat: Chat) -> Iterator[tuple[str, str]]:
        """Yield for each of the assistant's turns the text since the one before, and the text of the turn."""
        chat = self._escaped(chat)
        whole, done = self._render(chat), 0
        for number, message in enumerate(chat.messages):
            place = f"{chat.place}, message {number}"
            if message["role"] != "assistant":
                continue
            if self._end in json.dumps(message, ensure_ascii=False):
                raise DataError(f"{place}: contains {self._end}, which ends a turn; take it out")
            before = self._render(chat, number)
            if not whole.startswith(before) or len(before) < done:
                raise DataError(
                    f"{place}: the chat template prints what comes before this turn differently once the conversation "
                    "goes on (reasoning of earlier turns left out, say), so the model would learn what it never sees; "
                    "make a line of each assistant turn, with what comes before it, or mark the template with "
                    "{% generation %}"
                )
            end = whole.find(self._end, len(before))
            if end < 0:
                raise DataError(f"{place}: the chat template does not end this turn with {self._end}")
            end += len(self._end)
            yield whole[done : len(before)], whole[len(before) : end]
            done = end

    def _escaped(self, chat: Chat) -> Chat:
        """Escape what the assistant does not say; in its own turns, special tokens may be what it is to learn."""
        messages = [m if m["role"] == "assistant" else self._tokens.escape(m) for m in chat.messages]
        return chat._replace(messages=messages, tools=[self._tokens.escape(tool) for tool in chat.tools])

    def _render(self, chat: Chat, count: int | None = None) -> str:
        """Render all messages, or the first ``count`` of them and the opening of an assistant's turn."""
        return str(
            self._tokenizer.apply_chat_template(
                self._given(chat.messages[:count]),
                tools=[*chat.tools] or None,
                tokenize=False,
                add_generation_prompt=count is not None,
            )
        )

    def _given(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the arguments of calls in the form that the template takes."""
        if not self._takes_text:
            return list(messages)
        return [
            m | {"tool_calls": [nested(call, as_text=True) for call in flat_calls(m)]} if m.get("tool_calls") else m
            for m in messages
        ]

    def _print_past(self, messages: list[Message]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except (TypeError, ValueError) as error:
            raise jinja2.TemplateError(str(error)) from error


class _Mark(NamedTuple):
    """A text that a template must print, where it stands in a conversation, and what it stands for."""

    text: str
    place: str
    problem: str


def _shape(chat: Chat) -> str:
    """Describe which parts the messages of a conversation have; conversations of one shape are printed alike."""
    parts = [
        (
            message["role"],
            bool(message["content"].strip()),
            _THOUGHT in message["content"],
            [bool(call["function"]["arguments"]) for call in message.get("tool_calls", ())],
            _reasoning(message),
        )
        for message in chat.messages
    ]
    return json.dumps([parts, [sorted(tool) for tool in chat.tools]])


def _reasoning(message: Message) -> list[str]:
    return [key for key in message if _REASONING.match(key) and message[key]]


def _with_marks(chat: Chat) -> tuple[Chat, list[_Mark]]:
    """Return the conversation with marks in place of contents, reasoning, calls and tools, and these marks."""
    marks: list[_Mark] = []

    def mark(kind: str, place: str, problem: str) -> str:
        marks.append(_Mark(f"zq{len(marks)}{kind}", place, problem))
        return marks[-1].text

    tools = [
        _renamed(tool, mark("tool", "", "tools; leave them out, or take a model whose template does"))
        for tool in chat.tools
    ]
    messages = []
    for number, message in enumerate(chat.messages):
        place, role = f", message {number}", message["role"]
        made = dict(message)
        if message["content"].strip():
            made["content"] = mark("content", place, f"a {role} message; change its role, or leave it out")
            if _THOUGHT in message["content"]:
                thought = mark("thought", place, "the reasoning of this turn; make a line that ends with it")
                made["content"] = f"<think>\n{thought}\n{_THOUGHT}\n\n{made['content']}"
        for key in _reasoning(message):
            made[key] = mark("reasoning", place, f"{key}, the reasoning of this turn; make a line that ends with it")
        if calls := message.get("tool_calls"):
            hint = "the tool calls of this turn; write them into its content, as the model is to write them"
            made["tool_calls"] = [
                _remade(call, mark("name", place, hint), mark("value", place, hint)) for call in calls
            ]
        messages.append(made)
    return Chat(messages, tools, chat.place), marks


def _renamed(tool: dict[str, Any], name: str) -> dict[str, Any]:
    return tool | {"function": tool["function"] | {"name": name}} if "function" in tool else tool | {"name": name}


def _remade(call: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    return call | {"function": call["function"] | {"name": name, "arguments": {f"{value}key": value}}}
