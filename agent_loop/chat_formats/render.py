"""Chat messages to token ids, one turn at a time, so that what was sampled is never tokenised again.

The prompt is rendered by the tokenizer's chat template. A tool result is rendered after a placeholder conversation, and
only the text that it adds is encoded, so the tokens sampled before it stay as they are. What messages say is plain
text, even where it spells a special token; only what the policy sampled itself may hold special tokens (``sampled``).
"""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.cache import TokenCache
from rl_async.agent_loop.chat_formats.format import Answer, Message, TooLong, before_stops, text_size
from rl_async.agent_loop.chat_formats.hermes import HERMES
from rl_async.agent_loop.chat_formats.syntax import CallSyntax
from rl_async.template_tokens import TemplateTokens, encode

CACHE_BYTES = 64 << 20
TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
_MARK = "rendermark"  # the assistant's text in the placeholder conversation


class ChatRenderer:
    """The chat format that follows a tokenizer's own chat template, with calls in ``syntax``.

    Raises ValueError for a template that alters an assistant's text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        name: str = "hermes",
        syntax: CallSyntax = HERMES,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.name, self._syntax = name, syntax
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.cache = TokenCache(cache_bytes)
        self._tokens = TemplateTokens(tokenizer)
        self.prints_tools = self._prints_tools()
        closing = self._after_mark([])
        first = self.encode(closing)[:1]
        if not first or first[0] not in tokenizer.added_tokens_decoder:
            raise ValueError(f"the chat template ends an assistant's turn with {closing!r}, not with a special token")
        self.end_of_turn: int = first[0]
        self._end_text = tokenizer.added_tokens_decoder[first[0]].content
        self.stop_token_ids: list[int] = sorted({self.end_of_turn, tokenizer.eos_token_id or self.end_of_turn})

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

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
        limit: int = sys.maxsize,
    ) -> list[int]:
        """Return what ``messages`` append to a prompt and the turn sampled after it, up to the next turn's opening.

        A turn that was cut short is ended first. Raises TooLong unless these are fewer than ``limit`` tokens.
        """
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids
        closing = [] if ended else [self.end_of_turn]
        return closing + self.delta(messages, sampled=sampled, limit=limit - len(closing))

    def parse(self, token_ids: Sequence[int], *, stops: Sequence[str] = ()) -> Answer:
        """Read a sampled turn up to the first of the texts ``stops``."""
        text = before_stops(self.turn_text(token_ids), stops)
        calls = self._syntax.parse(text)
        return Answer(text, text.partition(self._syntax.call_start)[0].strip() if calls else text, calls)

    def delta(
        self, messages: Sequence[Message], *, sampled: Collection[int] = (), limit: int = sys.maxsize
    ) -> list[int]:
        """Encode what ``messages`` add after a finished assistant turn, up to the opening of the next one.

        Raises TooLong unless these are fewer than ``limit`` tokens.
        """
        return self._within(limit, messages, (messages, sorted(sampled)), self._render_delta)

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
            token_ids = render(*msgspec.json.decode(key))
        if len(token_ids) >= limit:
            raise TooLong(len(token_ids))
        self.cache.put(key, token_ids)
        return list(token_ids)

    def cut(self, text: str, tokens: int) -> str:
        """Cut a tool's text to ``tokens`` tokens; only as much is encoded as that many tokens can hold."""
        if len(text.encode(errors="replace")) <= tokens:  # no token is shorter than a byte
            return text
        text = text[: tokens * self._tokens.longest_token]
        token_ids = self._tokens.encode_outside(text)
        return text if len(token_ids) <= tokens else self.decode(token_ids[:tokens])

    def escape(self, message: Message) -> Message:
        """Mark control tokens in a message of others, for text that is rendered elsewhere and encoded here."""
        return self._tokens.escape(message)

    def encode_printed(self, text: str) -> list[int]:
        """Encode what the chat template printed of escaped messages."""
        return self._tokens.encode(text)

    def check(
        self,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        *,
        sampled: Collection[int] = (),
    ) -> int | None:
        """Return the position of the first token that departs from the full chat template's text; None if all agree.

        Texts are compared rather than ids, because a model may spell a text with other tokens than the tokenizer does.
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

    def demo_row(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Tokenise a demonstration turn by turn, as an episode would; return (token_ids, loss_mask).

        The mask is true on the assistant's tokens and on the tokens that end its turns.
        """
        token_ids: list[int] = []
        mask: list[bool] = []
        context: list[Message] = []
        for message in messages:
            if message["role"] != "assistant":
                context.append(message)
                continue
            opening = self.delta(context) if token_ids else self.prompt(context)
            spoken = [*self.encode(message["content"]), self.end_of_turn]
            token_ids += opening + spoken
            mask += [False] * len(opening) + [True] * len(spoken)
            context = []
        return token_ids, mask

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generate: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
        )
        return str(text)

    def _escaped(self, messages: Sequence[Message], sampled: Collection[int]) -> list[Message]:
        written = [self._written(message) for message in messages]
        return [m if place in sampled else self._tokens.escape(m) for place, m in enumerate(written)]

    def _written(self, message: Message) -> Message:
        """Write the calls of a message into its text, the way the model would have written them."""
        if not message.get("tool_calls"):
            return message
        calls = [self._syntax.render(call["name"], call["arguments"]) for call in message["tool_calls"]]
        return {"role": message["role"], "content": "\n".join([*filter(None, [message["content"]]), *calls])}

    def _render_prompt(self, messages: list[Message], tools: list[Any], sampled: list[int]) -> tuple[int, ...]:
        printed = self._render(self._escaped(messages, sampled), self._tokens.escape(tools), generate=True)
        return tuple(self._tokens.encode(printed))

    def _render_delta(self, messages: list[Message], sampled: list[int]) -> tuple[int, ...]:
        text = self._after_mark(self._escaped(messages, sampled), generate=True)
        return tuple(self._tokens.encode(text.removeprefix(self._end_text)))

    def _prints_tools(self) -> bool:
        probe: list[Message] = [{"role": "user", "content": "x"}]
        return self._render(probe, [TOOL], generate=True) != self._render(probe, (), generate=True)

    def _after_mark(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Return what the template prints after an assistant's text when ``messages`` follow it."""
        placeholder = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        text = self._render([*placeholder, *messages], (), generate=generate)
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise ValueError("the chat template does not print the assistant's text")
        return after
