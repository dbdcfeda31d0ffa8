"""Draws one token per row, with its log-probability under the distribution that it was drawn from."""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_async.messages import Sampling

BLOCK = 256  # tokens


class Sampler:
    """Sampling parameters of the running rows, as tensors that are built once per change of the batch."""

    def __init__(self, rows: Rows[Sampling], generators: Rows[torch.Generator | None], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._generators = generators if any(g is not None for g in generators) else None
        greedy = [row.greedy for row in rows]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._all_greedy = all(greedy)
        self._temperature = None
        if any(row.temperature != 1.0 and not g for row, g in zip(rows, greedy, strict=True)):
            self._temperature = column([1.0 if g else row.temperature for row, g in zip(rows, greedy, strict=True)])
        self._truncates = any(row.truncating for row in rows)
        if self._truncates:
            self._top_p = column([row.top_p for row in rows])
            self._top_k = torch.tensor([row.top_k or 2**31 for row in rows], device=device)[:, None]
            self._min_p = column([row.min_p for row in rows])

    def sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [N, V] -> token ids int64 [N], log-probabilities float32 [N].

        The log-probability is that of the processed distribution: temperature, then top-k, top-p, min-p. A row of
        temperature 0 takes the most likely token and reports its log-probability at temperature 1.
        """
        logits = logits.float()
        if self._temperature is not None:
            logits = logits / self._temperature
        if self._truncates:
            logits = self._truncate(logits)
        logprobs = torch.log_softmax(logits, -1)
        if self._all_greedy:
            tokens = logprobs.argmax(-1)
        else:
            tokens = self._draw(logprobs)
            if self._greedy is not None:
                tokens = torch.where(self._greedy, logprobs.argmax(-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)

    def _draw(self, logprobs: Tensor) -> Tensor:
        """Draw a token of each row by inverting its cumulative distribution, with one random number per row.

        First a block of tokens, then a token of it, so that only one block is cumulated token by token. Sums of more
        than a block are in float64: over a large vocabulary rounding in float32 would bias samples.
        """
        count, vocab = logprobs.shape
        blocks = pad(logprobs.exp(), (0, -vocab % BLOCK)).view(count, -1, BLOCK)
        cumulated = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
        drawn = torch.rand_like(cumulated[:, -1:])
        for row, generator in enumerate(self._generators or ()):
            if generator is not None:
                drawn[row].uniform_(generator=generator)
        below = drawn * cumulated[:, -1:]
        block = _found(cumulated, below)
        before = pad(cumulated, (1, 0)).gather(1, block)  # the probability of the blocks before it
        inside = blocks[torch.arange(count, device=blocks.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
        tokens = block * BLOCK + _found(inside, below - before)
        return tokens.squeeze(1).clamp_(max=vocab - 1)  # a row of NaNs finds none; its log-probability is NaN

    def _truncate(self, logits: Tensor) -> Tensor:
        """Set logits outside top-k, top-p and min-p to minus infinity; the most likely token always stays."""
        ordered, index = logits.sort(-1, descending=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        dropped = rank >= self._top_k
        p = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
        dropped |= p.cumsum(-1) - p >= self._top_p
        p = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
        dropped |= p < self._min_p * p[:, :1]
        dropped[:, 0] = False
        return logits.masked_fill(torch.zeros_like(dropped).scatter(1, index, dropped), -torch.inf)


def _found(cumulated: Tensor, below: Tensor) -> Tensor:
    """Return the first place [N, 1] where cumulated [N, M] exceeds ``below``, however rounding left that."""
    total = cumulated[:, -1:]
    below = torch.minimum(below, torch.nextafter(total, torch.zeros_like(total)))
    places = torch.searchsorted(cumulated, below, right=True)  # right: never a place of probability 0
    return places.clamp_(max=cumulated.shape[1] - 1)
