"""Packs numbers per token of many rows: the rows are concatenated in tensors [M], without padding.

A long row among short ones then only costs its own tokens. Formulas take packed tensors with their ``Rows``, or padded
tensors [N, T] without ``Rows``, which are a micro-batch or the batch for users' functions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# ``by_rows`` passes at most this many padded positions at once, unless a single row is longer.
PART = 1 << 18


@dataclass(frozen=True)
class Rows:
    """The places of N rows in packed tensors of M tokens."""

    lengths: Tensor  # int64 [N]

    @cached_property
    def starts(self) -> Tensor:
        """The position of each row's first token, int64 [N]."""
        return self.lengths.cumsum(0) - self.lengths

    def positions(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Return the positions of the tokens of these rows, in this order, int64 [m]."""
        lengths = self.lengths[rows]
        shifts = self.starts[rows] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)

    def there(self, rows: Sequence[int] | Tensor, width: int) -> Tensor:
        """Return the positions of padded rows that are tokens, bool [B, width]."""
        return torch.arange(width) < self.lengths[rows][:, None]

    def pad(self, values: Tensor, rows: Sequence[int] | Tensor, width: int | None = None, fill: float = 0) -> Tensor:
        """Copy these rows from packed values [M], padded on the right to [B, width], by default to the longest row."""
        there = self.there(rows, max(int(self.lengths[rows].max()), 1) if width is None else width)
        padded = values.new_full(there.shape, fill)
        padded[there] = values[self.positions(rows)]
        return padded

    def pad_all(self, values: Tensor, fill: float = 0) -> Tensor:
        """Pad all rows of packed values [M] to the longest, [N, T]."""
        return self.pad(values, torch.arange(len(self.lengths)), fill=fill)

    def pack(self, padded: Tensor) -> Tensor:
        """Undo ``pad_all``."""
        return padded[self.there(torch.arange(len(self.lengths)), padded.shape[1])]

    def similar(self) -> Iterator[Tensor]:
        """Yield the indexes of all rows in parts of similar length, so that padded parts contain little padding."""
        order = self.lengths.argsort(descending=True, stable=True)
        lengths = self.lengths[order].tolist()
        start = 0
        for end in range(1, len(lengths) + 1):
            longest = max(lengths[start], 1)
            if end == len(lengths) or 2 * lengths[end] < longest or (end + 1 - start) * longest > PART:
                yield order[start:end]
                start = end


def row_sums(values: Tensor, rows: Rows | None) -> Tensor:
    """Sum the values of each row in float64, [N]."""
    if rows is None:
        return values.sum(1, dtype=torch.float64)
    index = torch.arange(len(rows.lengths)).repeat_interleave(rows.lengths)
    return torch.zeros(len(rows.lengths), dtype=torch.float64).index_add_(0, index, values.double())


def on_tokens(values: Tensor, rows: Rows | None) -> Tensor:
    """Repeat a value per row [N] for each of its tokens, [M]; for padded rows return [N, 1], which broadcasts."""
    return values[:, None] if rows is None else values.repeat_interleave(rows.lengths)


def by_rows(function: Callable[..., tuple[Tensor, ...]], rows: Rows | None, *values: Tensor) -> tuple[Tensor, ...]:
    """Apply a function of padded tensors [B, T] whose results, [B, T] or [B, 1], only depend on their own row.

    It gets packed values [M] in padded parts, which bounds the memory for padding, and its results are packed.
    """
    if rows is None:
        return function(*values)
    whole = list[Tensor]()
    for part in rows.similar():
        padded = [rows.pad(tensor, part) for tensor in values]
        there, positions = rows.there(part, padded[0].shape[1]), rows.positions(part)
        results = function(*padded)
        whole = whole or [torch.zeros_like(values[0], dtype=result.dtype) for result in results]
        for tensor, result in zip(whole, results, strict=True):
            tensor[positions] = result.expand(there.shape)[there]
    return tuple(whole)
