"""What every chat format does with its tokenizer: encodes, decodes, remembers prompts, compares with the template."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import jinja2
import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.cache import TokenCache
from rl_async.agent_loop.chat_formats.format import Answer, Message, Settled, TooLong, flat_calls, text_size
from rl_async.template_tokens import TemplateTokens, encode, ending

CACHE_BYTES = 64 << 20
# A template is watched while it prints so many conversations; after them it is taken to end. A longer conversation than
# this takes its time, and an endless template prints short ones, too.
WATCHED, WATCHED_BYTES = 20, 10_000
_MARK = "reasoningmark"  # stands for the reasoning of a turn
TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}


class TokenizerFormat(ABC):
    """The part of a `ChatFormat` that only depends on the tokenizer. What messages say is encoded as plain text."""

    stop_token_ids: list[int]

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer, self._renders = tokenizer, 0
        self._backend = tokenizer.backend_tokenizer
        self.cache = TokenCache(cache_bytes)
        self._tokens = TemplateTokens(tokenizer)
        self.prints_tools = self._prints_tools()
        self.plain_turns = False

    @abstractmethod
    def _render_prompt(
        self, messages: list[Message], tools: list[Any], sampled: list[int], limit: int
    ) -> tuple[int, ...]:
        """Encode a conversation and the opening of the assistant's turn; may raise TooLong beyond ``limit`` tokens."""

    @abstractmethod
    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Answer:
        """Read a turn sampled after ``prompt_ids``, up to the first of the texts ``stops``. ``tools`` were offered."""

    def settled(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stops: Sequence[str] = (),
    ) -> Settled:
        """Settle nothing before the end of the turn."""
        return Settled()

    def call_opening(self, name: str = "") -> list[int]:
        """Return nothing: how a call begins is unknown."""
        return []

    @abstractmethod
    def _written(self, message: Message, *, sampled: bool) -> Message:
        """Convert a message, whose calls are `flat_calls`, for the template.

        The content of a sampled one is the text as it was sampled.
        """

    def encode(self, text: str) -> list[int]:
        """Encode text of the policy, in which special tokens count as such; none are added."""
        return encode(self._backend, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ``token_ids``, keeping special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Decode an assistant's sampled tokens, without the token that ended the turn."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self.decode(token_ids[:-1] if ended else token_ids)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Encode the conversation so far and the opening of the assistant's turn. ``tools`` are JSON schemas.

        ``sampled``: positions of the messages that the policy sampled in this episode. Raises TooLong unless there are
        fewer than ``limit`` tokens.
        """
        return self._within(limit, messages, (messages, tools, sorted(sampled)), self._render_prompt)

    def keeps_past(
        self,
        messages: Sequence[Message],
        place: int,
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> bool:
        """Whether ``prompt`` of all messages prints the turn sampled at ``place`` and what came before it as then.

        False if the chat template leaves out reasoning of earlier turns by now, or the empty one that opened a turn.
        """
        before = self.prompt(messages[:place], tools, sampled=[p for p in sampled if p < place])
        said, marked = messages[place]["content"], [*messages]
        reasoning = self._reasoning(said, before)
        if reasoning:
            places = [at for at in range(len(said)) if said.startswith(reasoning, at)]
            texts = (f"{said[:at]}{_MARK}{said[at + len(reasoning) :]}" for at in places)
            text = next((text for text in texts if self._reasoning(text, before) == _MARK), said)
            marked[place] = messages[place] | {"content": text}
        start, now = self.decode(before), self.decode(self.prompt(marked, tools, sampled=sampled))
        return now.startswith(start) and (not reasoning or _MARK in now[len(start) :])

    def _reasoning(self, said: str, before: Sequence[int]) -> str:
        return self.parse(self.encode(said), prompt_ids=before).reasoning.strip()

    def _within(
        self, limit: int, messages: Sequence[Message], given: Any, render: Callable[..., tuple[int, ...]]
    ) -> list[int]:
        """Encode what is ``given``, once for all who give the same; what is too long is not kept."""
        least = text_size(messages) // self._tokens.longest_token
        if least >= limit:
            raise TooLong(least)
        key = msgspec.json.encode(given)
        token_ids = self.cache.get(key)
        if token_ids is None:
            token_ids = render(*msgspec.json.decode(key), limit)
        if len(token_ids) >= limit:
            raise TooLong(len(token_ids))
        self.cache.put(key, token_ids)
        return list(token_ids)

    def _encode_printed(self, printed: str, limit: int, after: str = "") -> tuple[int, ...]:
        """Encode as ``encode_printed`` does. Raises TooLong if the size of the text alone says so."""
        least = self._tokens.least(printed)
        if least >= limit:
            raise TooLong(least)
        return tuple(self.encode_printed(printed, after))

    def cut(self, text: str, tokens: int) -> str:
        """Cut a tool's text to ``tokens`` tokens, between characters; only as much is encoded as they can hold."""
        if len(text.encode(errors="replace")) <= tokens:  # no token is shorter than a byte
            return text
        text = text[: tokens * self._tokens.longest_token]
        token_ids = self._tokens.encode_outside(text)
        return text if len(token_ids) <= tokens else self.decode(token_ids[:tokens]).rstrip("\ufffd")

    def escape(self, message: Message) -> Message:
        """Mark control tokens in a message of others, for text that is rendered elsewhere and encoded here."""
        return self._tokens.escape(message)

    def encode_printed(self, text: str, after: str = "") -> list[int]:
        """Encode what the chat template printed of escaped messages, behind ``after``, the text of a special token.

        Some tokenizers put a space before a text, and others not behind special tokens.
        """
        if not after:
            return self._tokens.encode(text)
        before = self._tokens.encode(after)
        token_ids = self._tokens.encode(after + text)
        if token_ids[: len(before)] != before:
            raise ValueError(f"{after!r} is not encoded by itself")
        return token_ids[len(before) :]

    def encode_continued(self, text: str) -> list[int]:
        """Encode what the chat template printed behind other text, of which its tokens are no part."""
        return self._tokens.encode_continued(text)

    def check(
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> int | None:
        """Return the position of the first token that departs from the full chat template's text; None if all agree.

        Texts are compared rather than ids, because a model may spell a text with other tokens than the tokenizer does;
        so text of the format's own that is split into other tokens than the template's passes, too.
        """
        printed = self._render(self._escaped(messages, sampled), self._tokens.escape(tools), generate=False)
        expected = self.decode(self._tokens.encode(printed))
        actual = self.decode(token_ids)
        if expected.startswith(actual):
            return None
        agreed = next((i for i, (a, b) in enumerate(zip(expected, actual)) if a != b), min(len(expected), len(actual)))
        low, high = 0, len(token_ids) - 1
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(token_ids[: middle + 1])) > agreed:
                high = middle
            else:
                low = middle + 1
        return low

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generate: bool) -> str:
        """Print messages by the chat template. Raises jinja2.TemplateError if it cannot print them."""
        self._renders += 1
        try:
            # The first messages are those by which formats are told apart; tracing makes it some times slower.
            watched = self._renders <= WATCHED and len(msgspec.json.encode([*messages, *tools])) <= WATCHED_BYTES
            with ending(self._tokenizer) if watched else nullcontext():
                text = self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
                )
        except (TypeError, ValueError) as error:  # of a message, call or tool that is not of the form it expects
            raise jinja2.TemplateError(str(error)) from error
        return str(text)

    def _prints_tools(self) -> bool:
        probe: list[Message] = [{"role": "user", "content": "x"}]
        return self._render(probe, [TOOL], generate=True) != self._render(probe, (), generate=True)

    def _escaped(self, messages: Sequence[Message], sampled: Collection[int]) -> list[Message]:
        written = [self._written(_flattened(m), sampled=place in sampled) for place, m in enumerate(messages)]
        return [m if place in sampled else self._tokens.escape(m) for place, m in enumerate(written)]


def _flattened(message: Message) -> Message:
    return message | {"tool_calls": flat_calls(message)} if message.get("tool_calls") else message
