"""Encoded conversations on disk, as the launcher writes and every rank maps them. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from rl_async.configs.schema.finetune import FinetuneConfig
from rl_async.files import drop_torn_line, replace_file

ROWS, HELD_OUT = "rows", "held-out"  # folders in the run folder


class RowSize(NamedTuple):
    """What ``batching.layout`` asks of a row."""

    tokens: int
    baseline: bool = False


@dataclass(frozen=True)
class ChatRows:
    """R conversations one behind the other. ``ends[r]`` is where row r ends."""

    ids: np.ndarray  # int32 [N]
    learned: np.ndarray  # bool [N]
    ends: np.ndarray  # int64 [R]

    @classmethod
    def of(cls, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Self:
        """From the (ids, learned) of each row."""
        return cls(
            np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in rows)]).astype(np.int32),
            np.concatenate([np.empty(0, bool), *(learned for _, learned in rows)]).astype(bool),
            np.cumsum([len(ids) for ids, _ in rows], dtype=np.int64),
        )

    @classmethod
    def map(cls, folder: Path) -> Self:
        """What ``write`` wrote, read when it is needed."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "learned", "ends")))

    def write(self, folder: Path) -> None:
        """Three files into a folder that exists."""
        for name in ("ids", "learned", "ends"):
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, row: int) -> slice:
        """Where a row stands."""
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def size(self, row: int) -> RowSize:
        """How long a row is."""
        span = self.span(row)
        return RowSize(span.stop - span.start)

    def targets(self, row: int) -> int:
        """Tokens to learn of a row; its first can never be, for nothing predicts it."""
        span = self.span(row)
        return int(np.count_nonzero(self.learned[span.start + 1 : span.stop]))


def steps_per_epoch(rows: int, batch_size: int) -> int:
    """How many batches of about ``batch_size`` rows an epoch has."""
    return -(-rows // batch_size)


def batch_of(step: int, rows: int, batch_size: int, *, seed: int, shuffle: bool) -> list[int]:
    """The rows that ``step`` trains: every epoch another order, cut into batches whose sizes differ by one at most."""
    per_epoch = steps_per_epoch(rows, batch_size)
    epoch, number = divmod(step, per_epoch)
    order = np.arange(rows)
    if shuffle:
        order = np.random.default_rng([seed & 0xFFFFFFFF, epoch]).permutation(rows)
    return [int(row) for row in np.array_split(order, per_epoch)[number]]


def total_steps(rows: int, config: FinetuneConfig) -> int:
    """Steps of all epochs, or as many as the config allows."""
    planned = steps_per_epoch(rows, config.batch_size) * config.epochs
    return min(planned, config.steps) if config.steps else planned


def keep_lines(path: Path, key: str, highest: int) -> None:
    """Leave those JSON lines whose ``key`` is at most ``highest``. Nobody may be writing the file."""
    if not path.exists():
        return
    drop_torn_line(path)
    lines = path.read_bytes().splitlines(keepends=True)
    replace_file(path, b"".join(line for line in lines if msgspec.json.decode(line)[key] <= highest))
