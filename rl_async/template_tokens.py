"""Encodes what a chat template prints, so that only the template writes special tokens and never the text inside it.

Text from outside (a data set's, a tool's, a client's) may contain the characters of a special token. `escape` replaces
them by marks before the template prints the text, and `encode` turns the marks back into characters and encodes these
as plain text: a tool's `<|im_end|>` is text about a token, and ends no turn.
"""

import json
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from types import FrameType
from typing import Any, TypeVar

import jinja2
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from rl_async.errors import ConfigError

T = TypeVar("T")

# Seconds of computing and printed characters, for a few short messages.
TEMPLATE_S = 1.0
MOST_PRINTED = 1 << 20
# What a template's expressions raise that do not fit the messages.
MISFITS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
# Characters.
LONG = 10_000
_SKELETON = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}, {"role": "tool", "content": "x"})


def read_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a folder. Raises ValueError if its files are missing or damaged."""
    try:
        return PreTrainedTokenizerFast.from_pretrained(path)
    # The library raises a bare Exception for a damaged tokenizer.json, and any other for JSON of another form.
    except Exception as error:
        raise ValueError(str(error).strip().partition("\n")[0] or type(error).__name__) from error


class TemplateTokens:
    """The special tokens of one tokenizer, and all added tokens that its chat template prints by itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        printed = {i for text in _printed(tokenizer) for i in self._backend.encode(text, add_special_tokens=False).ids}
        # Some tokenizers have the token that ends a turn as an ordinary one.
        printed |= {*tokenizer.all_special_ids}
        control = {i: token for i, token in added.items() if token.special or i in printed}
        self._control = frozenset(control)
        # No text from outside can contain it.
        nonce = f"rlasync{secrets.token_hex(16)}"
        self._nonce, self._nothing = nonce, f"{nonce}nothing"
        contents = [token.content for token in control.values()]
        self._marks = {content: f"{nonce}mark{number}of" for number, content in enumerate(contents)}
        self._names = {content: f"{nonce}token{number}of" for number, content in enumerate(contents)}
        self._token = _any_of(contents)
        self._mark = _any_of([*self._marks.values(), self._nothing])
        self._unmarked = {mark: content for content, mark in self._marks.items()} | {self._nothing: ""}
        self._beginnings = frozenset(content[:size] for content in contents for size in range(1, len(content)))
        self._longest = max(map(len, contents), default=0)
        self._plain, self._ids = self._plain_backend(control)
        # In characters, which stand for bytes in byte-level vocabularies.
        self.longest_token = max(map(len, tokenizer.get_vocab()))

    def _plain_backend(self, control: dict[int, AddedToken]) -> tuple[Tokenizer, dict[int, int]]:
        """Return a copy of the tokenizer that knows control tokens by secret names only, and the ids behind these."""
        plain = Tokenizer.from_str(self._backend.to_str())
        plain.add_special_tokens([_as_special(token) for token in control.values()])
        # Special tokens are encoded as plain text.
        plain.encode_special_tokens = True
        plain.add_tokens(
            [
                AddedToken(
                    self._names[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                    special=False,
                )
                for token in control.values()
            ]
        )
        ids = {plain.token_to_id(self._names[token.content]): i for i, token in control.items()}
        return plain, {secret: i for secret, i in ids.items() if secret is not None}

    def escape(self, value: T) -> T:
        """Return a message or other JSON value with marks in place of the control tokens in its texts."""
        escaped: T = self._escape(value)
        return escaped

    def _escape(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, dict):
            return {self._escape(key): self._escape(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._escape(part) for part in value]
        return value

    def _escape_text(self, text: str) -> str:
        marked = self._token.sub(lambda match: self._marks[match[0]], text)
        kept = marked.rstrip()
        for size in range(min(self._longest - 1, len(kept)), 0, -1):
            # The text that the template prints next could complete a token.
            if kept[-size:] in self._beginnings:
                return kept + self._nothing + marked[len(kept) :]
        normalizer = self._backend.normalizer
        if marked == text and normalizer is not None and self._token.search(normalizer.normalize_str(text)):
            start = len(text) - len(text.lstrip()) + 1
            # Normalisation would turn look-alikes into tokens.
            return text[:start] + self._nothing + text[start:]
        return marked

    def least(self, printed: str) -> int:
        """Return how many tokens there are at least in what the template printed of escaped messages."""
        if self._nonce in printed:
            printed = self._mark.sub(lambda match: self._unmarked[match[0]], printed)
        return len(printed) // self.longest_token

    def encode(self, printed: str) -> list[int]:
        """Encode what the template printed of escaped messages; no special tokens are added."""
        if self._nonce not in printed:
            return encode(self._backend, printed)
        return self.encode_outside(self._named(printed))

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Encode pieces of the template's output as one text.

        Returns the tokens, and for each whether a piece that is true has a part of it.
        """
        marked = any(self._nonce in text for text, _ in pieces)
        texts = [self._named(text) if marked else text for text, _ in pieces]
        found = (self._plain if marked else self._backend).encode("".join(texts), add_special_tokens=False)
        ends = list(accumulate(map(len, texts)))
        spans = [(end - len(text), end) for end, text, (_, chosen) in zip(ends, texts, pieces) if chosen]
        ids, chosen, place = list[int](), list[bool](), 0
        for token, (start, end) in zip(found.ids, found.offsets):
            if marked and token in self._control:
                continue
            while place < len(spans) and spans[place][1] <= start:
                place += 1
            ids.append(self._ids.get(token, token) if marked else token)
            chosen.append(place < len(spans) and spans[place][0] < end)
        return ids, chosen

    def encode_continued(self, printed: str) -> list[int]:
        """Encode what the template printed behind other text, without the space that some tokenizers put first."""
        ids = encode(self._unprefixed, self._named(printed))
        return [self._ids.get(i, i) for i in ids if i not in self._control]

    @cached_property
    def _unprefixed(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(_without_prefix(json.loads(self._plain.to_str()))))

    def _named(self, printed: str) -> str:
        """Return text with the secret names of its control tokens, and with the characters behind its marks."""
        named = self._token.sub(lambda match: self._names[match[0]], printed)
        return self._mark.sub(lambda match: self._unmarked[match[0]], named)

    def encode_outside(self, text: str) -> list[int]:
        """Encode text as plain text, even if it spells special tokens."""
        ids = encode(self._plain, text)
        # Some models (Unigram, WordLevel) hold control tokens as ordinary pieces, too: such a piece is left out.
        return [self._ids.get(i, i) for i in ids if i not in self._control]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text without adding special tokens. A long one does not keep other threads from running."""
    if len(text) < LONG:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    # Unlike encode, encode_batch releases the GIL.
    return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)


def _without_prefix(part: Any) -> Any:
    """Return a tokenizer's description without the parts that put a space before a text."""
    if isinstance(part, list):
        return [_without_prefix(inner) for inner in part if not _prepends(inner)]
    if not isinstance(part, dict):
        return part
    changed = {
        key: None if _prepends(inner) else _without_prefix(inner) for key, inner in part.items() if key != "vocab"
    }
    if "prepend_scheme" in part:
        changed["prepend_scheme"] = "never"
    if "add_prefix_space" in part:
        changed["add_prefix_space"] = False
    return part | changed


def _prepends(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of the texts, the longest first; of none, it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@contextmanager
def ending(tokenizer: PreTrainedTokenizerFast, seconds: float = TEMPLATE_S) -> Iterator[None]:
    """Raise ConfigError if the chat template computes for longer than ``seconds`` of this thread's time in the block.

    A loop over two ranges has as many turns as its author wants, and a thread cannot be ended from outside.
    """
    deadline, before = time.thread_time() + seconds, sys.gettrace()

    def watch(frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > deadline:
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path} did not end within {seconds:g} s of computing; use "
                "another model, or correct its template"
            )
        return watch if frame.f_code.co_filename == "<template>" else None

    sys.settrace(watch)
    try:
        yield
    except RecursionError as error:
        raise ConfigError(f"the chat template of {tokenizer.name_or_path} calls itself without end") from error
    finally:
        sys.settrace(before)


def bounded(tokenizer: PreTrainedTokenizerFast, printed: str) -> str:
    """Return what the chat template printed of a few short messages. Raises ConfigError if that is too much."""
    if len(printed) > MOST_PRINTED:
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path} prints {len(printed)} characters for short messages; use "
            "another model, or correct its template"
        )
    return printed


def _printed(tokenizer: PreTrainedTokenizerFast) -> Iterable[str]:
    """Yield what the template prints for short conversations, as far as it accepts them."""
    for count in range(1, len(_SKELETON) + 1):
        try:
            with ending(tokenizer):
                text = str(
                    tokenizer.apply_chat_template(list(_SKELETON[:count]), tokenize=False, add_generation_prompt=True)
                )
            yield bounded(tokenizer, text)
        # The template may have no tool results.
        except (jinja2.TemplateError, *MISFITS):
            continue
