"""Chat messages to token ids, one turn at a time, so that what was sampled is never tokenised again.

The prompt is rendered by the tokenizer's chat template. A tool result is rendered after a placeholder conversation, and
only the text that it adds is encoded, so the tokens sampled before it stay as they are.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerFast

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.chat_formats.registry import CHAT_FORMATS, DEFAULT
from rl_async.errors import ConfigError

Message = dict[str, Any]

_MARK = "rendermark"  # the assistant's text in the placeholder conversation


class ChatRenderer:
    """Renders with one tokenizer. Raises ValueError for a template that alters an assistant's text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, format: ChatFormat = CHAT_FORMATS[DEFAULT], cache_size: int = 8192
    ) -> None:
        self.format = format
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._prompt = functools.lru_cache(cache_size)(self._render_prompt)
        self._delta = functools.lru_cache(cache_size)(self._render_delta)
        special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(special)) if special else None
        closing = self._after_mark([])
        first = self.encode(closing)[:1]
        if not first or first[0] not in tokenizer.added_tokens_decoder:
            raise ValueError(f"the chat template ends an assistant's turn with {closing!r}, not with a special token")
        self.end_of_turn: int = first[0]
        self._end_text = tokenizer.added_tokens_decoder[first[0]].content
        self.stop_token_ids: list[int] = sorted({self.end_of_turn, tokenizer.eos_token_id or self.end_of_turn})

    def encode(self, text: str) -> list[int]:
        """Encode ``text`` without adding special tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ``token_ids``, keeping special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def turn_text(self, token_ids: Sequence[int]) -> str:
        """Decode an assistant's sampled tokens, without the token that ended the turn."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return self.decode(token_ids[:-1] if ended else token_ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Encode the conversation so far and the opening of the assistant's turn. ``tools`` are JSON schemas."""
        return list(self._prompt(msgspec.json.encode((messages, tools))))

    def delta(self, messages: Sequence[Message]) -> list[int]:
        """Encode what ``messages`` add after a finished assistant turn, up to the opening of the next one."""
        return list(self._delta(msgspec.json.encode(messages)))

    def clean(self, text: str, tokens: int) -> str:
        """Remove special tokens, which could end the turn, from a tool's text, and cut it to ``tokens`` tokens."""
        if self._special is not None:
            text = self._special.sub("", text)
        if len(text.encode(errors="replace")) <= tokens:  # no token is shorter than a byte
            return text
        token_ids = self.encode(text)
        return text if len(token_ids) <= tokens else self.decode(token_ids[:tokens])

    def check(
        self, messages: Sequence[Message], token_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()
    ) -> int | None:
        """Return the position of the first token that departs from the full chat template's text; None if all agree.

        Texts are compared rather than ids, because a model may spell a text with other tokens than the tokenizer does.
        """
        expected = self.decode(self.encode(self._render(messages, tools, generate=False)))
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

    def _render_prompt(self, key: bytes) -> tuple[int, ...]:
        messages, tools = msgspec.json.decode(key)
        return tuple(self.encode(self._render(messages, tools, generate=True)))

    def _render_delta(self, key: bytes) -> tuple[int, ...]:
        text = self._after_mark(msgspec.json.decode(key), generate=True)
        return tuple(self.encode(text.removeprefix(self._end_text)))

    def _after_mark(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        """Return what the template prints after an assistant's text when ``messages`` follow it."""
        placeholder = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        text = self._render([*placeholder, *messages], (), generate=generate)
        _, mark, after = text.partition(_MARK)
        if not mark:
            raise ValueError("the chat template does not print the assistant's text")
        return after


def load_renderer(model_path: str) -> ChatRenderer:
    """Make the renderer of a model folder. Raises ConfigError if its tokenizer or chat template cannot be used."""
    try:
        return ChatRenderer(PreTrainedTokenizerFast.from_pretrained(model_path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model_path} has no usable tokenizer with a chat template: {error}") from error
