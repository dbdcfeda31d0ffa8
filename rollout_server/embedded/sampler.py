"""Samples one token per row, with its log-probability under the sampled distribution.

llguidance (the extra ``json``) computes the masks of tokens that keep an answer within a JSON schema. As in vLLM, a
mask is applied to the logits before anything else, so log-probabilities are those of the policy's distribution over the
allowed tokens, renormalised.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

from rl_async.messages import Sampling
from rl_async.rollout_server import json_schemas
from rl_async.torch_shared import to_device

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# The number of tokens whose probabilities are summed first.
BLOCK = 256


class Sampler:
    """Sampling parameters of the running rows, as tensors that are built once per change of the batch."""

    def __init__(
        self, rows: Sequence[Sampling], generators: Sequence[torch.Generator | None], device: torch.device
    ) -> None:
        def column(values: list[float]) -> Tensor:
            return to_device(torch.tensor(values, dtype=torch.float32)[:, None], device)

        self._generators = generators if any(g is not None for g in generators) else None
        greedy = [row.greedy for row in rows]
        self._greedy = to_device(torch.tensor(greedy), device) if any(greedy) else None
        self._all_greedy = all(greedy)
        self._temperature = None
        if any(row.temperature != 1.0 and not g for row, g in zip(rows, greedy, strict=True)):
            self._temperature = column([1.0 if g else row.temperature for row, g in zip(rows, greedy, strict=True)])
        self._truncates = any(row.truncating for row in rows)
        if self._truncates:
            self._top_p = column([row.top_p for row in rows])
            self._top_k = to_device(torch.tensor([row.top_k or 2**31 for row in rows])[:, None], device)
            self._min_p = column([row.min_p for row in rows])

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample from logits [N, V]; return token ids int64 [N] and log-probabilities float32 [N].

        A row with temperature 0 takes the most likely token and reports its log-probability at temperature 1.
        """
        return self.draw(self.distribution(logits))

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities [N, V] after processing: temperature, then top-k, top-p, min-p."""
        logits = logits.float()
        if self._temperature is not None:
            logits = logits / self._temperature
        if self._truncates:
            logits = self._truncate(logits)
        return torch.log_softmax(logits, -1)

    @property
    def kind(self) -> tuple[bool, bool, bool, bool]:
        """Samplers of one kind, for equally many rows, run the same operations and differ in ``_columns`` alone."""
        return self._all_greedy, self._greedy is not None, self._temperature is not None, self._truncates

    def adopt(self, other: "Sampler") -> None:
        """Sample as another sampler of this kind does, with this one's tensors, which graphs read."""
        self._generators = other._generators
        for mine, theirs in zip(self._columns(), other._columns(), strict=True):
            mine.copy_(theirs)

    def _columns(self) -> list[Tensor]:
        optional = [column for column in (self._greedy, self._temperature) if column is not None]
        return optional + ([self._top_p, self._top_k, self._min_p] if self._truncates else [])

    def draw(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Take a token of each row of a ``distribution``; return token ids and log-probabilities [N]."""
        drawn = torch.empty((len(logprobs), 1), dtype=torch.float64, device=logprobs.device)
        self.draw_numbers(drawn)
        return self.choose(logprobs, drawn)

    def draw_numbers(self, drawn: Tensor) -> None:
        """Fill float64 [N, 1] with the random numbers that ``choose`` needs, from the generators of seeded rows."""
        if self._all_greedy:
            return
        drawn.uniform_()
        for row, generator in enumerate(self._generators or ()):
            if generator is not None:
                drawn[row].uniform_(generator=generator)

    def choose(self, logprobs: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens [N] that these random numbers choose from a ``distribution``, and log-probabilities [N]."""
        if self._all_greedy:
            tokens = logprobs.argmax(-1)
        else:
            tokens = self._drawn(logprobs, drawn)
            if self._greedy is not None:
                tokens = torch.where(self._greedy, logprobs.argmax(-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)

    def _drawn(self, logprobs: Tensor, drawn: Tensor) -> Tensor:
        """Draw a token for each row by inverting its cumulative distribution, with one random number per row.

        A block is drawn first, then a token in it, so that only one block is cumulated token by token. Longer sums are
        in float64, since over a large vocabulary rounding in float32 would bias samples.
        """
        count, vocab = logprobs.shape
        blocks = pad(logprobs.exp(), (0, -vocab % BLOCK)).view(count, -1, BLOCK)
        cumulated = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
        below = drawn * cumulated[:, -1:]
        block = _found(cumulated, below)
        # The total probability of the previous blocks.
        before = pad(cumulated, (1, 0)).gather(1, block)
        inside = blocks[torch.arange(count, device=blocks.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
        tokens = block * BLOCK + _found(inside, below - before)
        # A row of NaNs has no valid place; the log-probability of its token is NaN, too.
        return tokens.squeeze(1).clamp_(max=vocab - 1)

    def _truncate(self, logits: Tensor) -> Tensor:
        """Set logits outside top-k, top-p and min-p to minus infinity, but never that of the most likely token."""
        ordered, index = logits.sort(-1, descending=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        dropped = rank >= self._top_k
        p = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
        dropped |= p.cumsum(-1) - p >= self._top_p
        p = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
        dropped |= p < self._min_p * p[:, :1]
        dropped[:, 0].fill_(False)
        return logits.masked_fill(torch.zeros_like(dropped).scatter(1, index, dropped), -torch.inf)


def _found(cumulated: Tensor, below: Tensor) -> Tensor:
    """Return the first place [N, 1] where cumulated [N, M] exceeds ``below``, which may be too large by rounding."""
    total = cumulated[:, -1:]
    below = torch.minimum(below, torch.nextafter(total, torch.zeros_like(total)))
    # With right=True, a place of probability 0 is never found.
    places = torch.searchsorted(cumulated, below, right=True)
    return places.clamp_(max=cumulated.shape[1] - 1)


NOTHING_FITS = "none of the model's tokens can come next in the answer; choose a schema that it can spell"
# The number of compiled schemas that are cached.
REMEMBERED = 64
# llguidance itself converts tokens of these decoders to bytes.
_BYTE_DECODERS = ("ByteLevel", "ByteFallback")


class Matcher:
    """Follows one answer through its grammar, and determines the allowed next tokens."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> np.ndarray:
        """Return the mask of allowed next tokens, bool [V]; all False if this vocabulary cannot continue the answer."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return np.zeros_like(allowed) if self._matcher.is_error() else allowed

    @property
    def problem(self) -> str:
        """The reason why no token is allowed."""
        return self._matcher.get_error()[: json_schemas.SHOWN] or NOTHING_FITS

    def accept(self, token: int) -> None:
        """Advance past ``token``, which was allowed."""
        self._matcher.consume_token(token)

    def copy(self) -> "Matcher":
        """Return a matcher in the same state, for another answer."""
        return Matcher(self._matcher.deep_copy(), self._vocab_size)


def restrict(logits: Tensor, matchers: Sequence[Matcher | None]) -> dict[int, str]:
    """Set logits [N, V] of tokens that a row's matcher does not allow to minus infinity, in place.

    Returns the reason for each row without any allowed token; the logits of such rows stay.
    """
    bound = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
    allowed = {row: matcher.allowed() for row, matcher in bound.items()}
    stuck = {row: bound[row].problem for row, tokens in allowed.items() if not tokens.any()}
    if rows := [row for row in allowed if row not in stuck]:
        disallowed = torch.from_numpy(np.stack([~allowed[row] for row in rows])).to(logits.device)
        logits[rows] = logits[rows].masked_fill(disallowed, -torch.inf)
    return stuck


class Grammars:
    """Compiles schemas for the tokenizer in ``folder`` and a model with logits for ``vocab_size`` tokens.

    May be called from several threads.
    """

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        # Tokenizers by the tokens that may end an answer.
        self._tokenizers: dict[frozenset[int], LLTokenizer] = {}
        self._lock = threading.Lock()
        self._compiled = lru_cache(REMEMBERED)(self._compile)

    def matcher(self, schema: str, stop_token_ids: frozenset[int]) -> Matcher:
        """Compile a schema, JSON text. The answer ends, once it is complete, with one of ``stop_token_ids``.

        The first call takes about a second. Raises ValueError for a schema that is invalid, too large or has an
        unsupported keyword, and without a stop token or llguidance.
        """
        return self._compiled(schema, stop_token_ids).copy()

    def _compile(self, schema: str, stop_token_ids: frozenset[int]) -> Matcher:
        if not stop_token_ids:
            raise ValueError("structured_outputs needs stop_token_ids, with which a complete answer ends")
        if find_spec(json_schemas.PACKAGE) is None:
            raise ValueError(f"structured_outputs needs {json_schemas.PACKAGE}: {json_schemas.INSTALL}")
        if found := json_schemas.beyond_bounds(schema):
            raise ValueError(f"structured_outputs.json: {found}")
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer(stop_token_ids), json_schemas.grammar(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs.json: {matcher.get_error()[: json_schemas.SHOWN]}")
        return Matcher(matcher, self._vocab_size)

    def _tokenizer(self, stop_token_ids: frozenset[int]) -> "LLTokenizer":
        with self._lock:
            if stop_token_ids not in self._tokenizers:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(self._folder)
                self._tokenizers[stop_token_ids] = _wrapped(tokenizer, self._vocab_size, sorted(stop_token_ids))
            return self._tokenizers[stop_token_ids]


def _wrapped(tokenizer: PreTrainedTokenizerFast, vocab_size: int, stop_token_ids: list[int]) -> "LLTokenizer":
    """Return a tokenizer for llguidance, which needs the bytes of each token."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    printed = tokenizer.backend_tokenizer.to_str()
    if any(f'"type":"{name}"' in printed for name in _BYTE_DECODERS):
        return from_tokenizer(tokenizer, vocab_size, stop_token_ids)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, stop_token_ids[0])), vocab_size, stop_token_ids)


class _Vocabulary:
    """The vocabulary of a tokenizer that decodes by concatenating the texts of tokens."""

    bos_token_id = None

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_token_id: int) -> None:
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_id = eos_token_id
        ids = range(self._backend.get_vocab_size(with_added_tokens=True))
        self.tokens = [self._backend.decode([token], skip_special_tokens=False).encode() for token in ids]
        added = tokenizer.added_tokens_decoder
        self.special_token_ids = [token for token, kind in added.items() if kind.special]

    def __call__(self, text: Any) -> list[int]:
        """Encode a text. llguidance first passes bytes, to find out whether they are accepted."""
        if isinstance(text, bytes):
            raise TypeError("this tokenizer encodes text")
        return list(self._backend.encode(text, add_special_tokens=False).ids)
