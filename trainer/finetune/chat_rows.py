"""Encoded conversations on disk: the launcher writes them, every rank maps them into memory. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from rl_async.configs.schema.data import FinetuneConfig

# Folders within the run folder.
ROWS, HELD_OUT = "rows", "held-out"


class RowSize(NamedTuple):
    """The properties of a row that ``batch_layout.layout`` reads. Conversations share no prompt, so it is empty."""

    tokens: int
    baseline: bool = False
    prompt_tokens: int = 0
    prompt: None = None


@dataclass(frozen=True)
class ChatRows:
    """R conversations, N tokens in all, concatenated. ``ends[r]`` is the index after the last token of row r."""

    ids: np.ndarray  # int32 [N]
    learned: np.ndarray  # bool [N]
    ends: np.ndarray  # int64 [R]

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Self:
        """Concatenate rows, each given as (token ids, which of them to learn)."""
        return cls(
            np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in rows)]).astype(np.int32),
            np.concatenate([np.empty(0, bool), *(learned for _, learned in rows)]).astype(bool),
            np.cumsum([len(ids) for ids, _ in rows], dtype=np.int64),
        )

    @classmethod
    def map(cls, folder: Path) -> Self:
        """Map the files that ``write`` made; their pages are read when they are first used."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "learned", "ends")))

    def write(self, folder: Path) -> None:
        """Write the three arrays as .npy files into ``folder``, which must exist."""
        for name in ("ids", "learned", "ends"):
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, row: int) -> slice:
        """Return where row ``row`` lies in ``ids`` and ``learned``."""
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def size(self, row: int) -> RowSize:
        """Return the properties of a row that its layout depends on."""
        span = self.span(row)
        return RowSize(span.stop - span.start)

    def targets(self, row: int) -> int:
        """Count the tokens of a row to learn; never the first, which nothing predicts."""
        span = self.span(row)
        return int(np.count_nonzero(self.learned[span.start + 1 : span.stop]))


def steps_per_epoch(rows: int, batch_size: int) -> int:
    """Return how many batches of at most ``batch_size`` rows an epoch has."""
    return -(-rows // batch_size)


def batch_of(step: int, rows: int, batch_size: int, *, seed: int, shuffle: bool) -> list[int]:
    """Return the rows that ``step`` trains.

    Each epoch has an order of its own, drawn from ``seed`` and the epoch, and is cut into batches whose sizes differ by
    at most one.
    """
    per_epoch = steps_per_epoch(rows, batch_size)
    epoch, number = divmod(step, per_epoch)
    order = np.arange(rows)
    if shuffle:
        order = np.random.default_rng([seed & 0xFFFFFFFF, epoch]).permutation(rows)
    return [int(row) for row in np.array_split(order, per_epoch)[number]]


def total_steps(rows: int, config: FinetuneConfig) -> int:
    """Return the number of steps of all epochs, at most ``config.steps`` if that is set."""
    planned = steps_per_epoch(rows, config.batch_size) * config.epochs
    return min(planned, config.steps) if config.steps else planned
