"""Encodes conversations and marks the assistant's tokens, which are trained on with the token that ends each turn.

Chat templates may mark them (``{% generation %}``), and families of the package renderers know them. With any other
template, a turn starts where the rendering of everything before it ends and extends to its end-of-turn token. The text
before a turn is encoded on its own, as an engine would get it, so the model is trained on the very tokens that it is to
sample.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.harmony import HarmonyFormat
from rl_async.agent_loop.chat_formats.library import LibraryFormat
from rl_async.agent_loop.chat_formats.registry import choose
from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.data.chats import Chat
from rl_async.configs.schema.chat_formats import ChatFormatName
from rl_async.errors import ConfigError, DataError

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
        self._tokenizer = tokenizer
        self._encode: Callable[[Chat], ChatTokens] = self._marked
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
            self._family, self._encode = chat, self._by_family
            return
        assert isinstance(chat, ChatRenderer)
        self._renderer = chat
        self._end = self._renderer.decode([self._renderer.end_of_turn])

    def encode(self, chat: Chat) -> ChatTokens:
        """Encode a conversation. Raises DataError, naming it, if the assistant's tokens cannot be determined."""
        try:
            tokens = self._encode(chat)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"{chat.place}: the model's chat template refuses it: {error}") from error
        if not tokens.learned.any():
            raise DataError(f"{chat.place}: the chat template marks nothing of it as the assistant's")
        return tokens

    def _marked(self, chat: Chat) -> ChatTokens:
        encoded: Any = self._tokenizer.apply_chat_template(
            chat.messages, tools=[*chat.tools] or None, return_dict=True, return_assistant_tokens_mask=True
        )
        return ChatTokens(np.array(encoded["input_ids"], np.int32), np.array(encoded["assistant_masks"], bool))

    def _by_family(self, chat: Chat) -> ChatTokens:
        ids, learned = self._family.row(chat.messages, chat.tools)
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _by_prefixes(self, chat: Chat) -> ChatTokens:
        ids: list[int] = []
        learned: list[bool] = []
        for text, spoken in self._pieces(chat):
            piece = self._renderer.encode_printed(text)
            ids += piece
            learned += [spoken] * len(piece)
        return ChatTokens(np.array(ids, np.int32), np.array(learned, bool))

    def _pieces(self, chat: Chat) -> Iterator[tuple[str, bool]]:
        """Yield the text up to the end of the last assistant turn, piece by piece; True marks the assistant's."""
        chat = self._escaped(chat)
        whole, done = self._render(chat, len(chat.messages)), 0
        for number, message in enumerate(chat.messages):
            place = f"{chat.place}, message {number}"
            if message["role"] in ("system", "developer") and str(message["content"]).strip() not in whole:
                raise DataError(
                    f"{place}: the chat template does not print a {message['role']} message; change its role"
                )
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
            yield whole[done : len(before)], False
            done = end + len(self._end)
            yield whole[len(before) : done], True

    def _escaped(self, chat: Chat) -> Chat:
        """Escape what the assistant does not say; in its own turns, special tokens may be what it is to learn."""
        messages = [m if m["role"] == "assistant" else self._renderer.escape(m) for m in chat.messages]
        return chat._replace(messages=messages)

    def _render(self, chat: Chat, count: int) -> str:
        """Render the first ``count`` messages and, unless these are all, the opening of an assistant's turn."""
        return str(
            self._tokenizer.apply_chat_template(
                chat.messages[:count],
                tools=[*chat.tools] or None,
                tokenize=False,
                add_generation_prompt=count < len(chat.messages),
            )
        )
