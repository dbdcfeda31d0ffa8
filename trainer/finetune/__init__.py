"""Supervised fine-tuning: the command ``rl-async sft``, config section ``finetune``, on trainer ranks of its own.

In come conversations that the launcher encoded, whose files are described here; out go checkpoints and a Hugging Face
folder. ``loop`` builds the parts of a rank, finds where to continue, and trains. The warm start of the tiny model and
the training of reward models are ``launcher/runs/tiny_model.py`` and ``reward_model.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from rl_async.configs.schema.data import FinetuneConfig
from rl_async.messages import Media

# Folders within the run folder; images are those of both kinds of rows.
ROWS, HELD_OUT, IMAGES = "rows", "held-out", "images"
MEDIA = "media.json"


class EncodedRow(NamedTuple):
    """A conversation's token ids, which of them to learn, and the images that they show."""

    ids: np.ndarray
    learned: np.ndarray
    media: Sequence[Media] = ()


class RowSize(NamedTuple):
    """The properties of an example that ``batch_layout.layout`` reads. None shares its prompt, so that is empty."""

    tokens: int
    baseline: bool = False
    prompt_tokens: int = 0
    prompt: None = None


@dataclass(frozen=True)
class ChatRows:
    """R conversations, N tokens in all, concatenated. ``ends[r]`` is the index after the last token of row r.

    An example is one row, or, if ``each`` is 2, a pair: the better row and the worse one. ``media`` are the images of
    rows that show some, and ``images`` is the folder of their files, by SHA-256.
    """

    ids: np.ndarray  # int32 [N]
    learned: np.ndarray  # bool [N]
    ends: np.ndarray  # int64 [R]
    each: int = 1
    media: Mapping[int, list[Media]] = field(default_factory=dict)
    images: Path | None = None

    @classmethod
    def of(cls, rows: Sequence[EncodedRow]) -> Self:
        """Concatenate rows that were encoded one by one, without the files of their images."""
        return cls(
            np.concatenate([np.empty(0, np.int32), *(row.ids for row in rows)]).astype(np.int32),
            np.concatenate([np.empty(0, bool), *(row.learned for row in rows)]).astype(bool),
            np.cumsum([len(row.ids) for row in rows], dtype=np.int64),
            media={number: list(row.media) for number, row in enumerate(rows) if row.media},
        )

    @classmethod
    def map(cls, folder: Path, each: int = 1) -> Self:
        """Map the files that ``write`` made; their pages are read when they are first used."""
        ids, learned, ends = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "learned", "ends"))
        # Versions before images wrote no such file.
        file = folder / MEDIA
        media = msgspec.json.decode(file.read_bytes(), type=dict[int, list[Media]]) if file.is_file() else {}
        return cls(ids, learned, ends, each, media, folder.parent / IMAGES)

    def write(self, folder: Path) -> None:
        """Write the three arrays as .npy files, and the places of images, into ``folder``, which must exist."""
        for name in ("ids", "learned", "ends"):
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)
        (folder / MEDIA).write_bytes(msgspec.json.encode(self.media))

    def image(self, sha256: str) -> bytes:
        """Read the file of an image."""
        assert self.images is not None
        return (self.images / sha256).read_bytes()

    def __len__(self) -> int:
        """Count the examples: rows, or pairs of rows."""
        return len(self.ends) // self.each

    def rows_of(self, examples: Iterable[int]) -> list[int]:
        """Return the rows of examples, in order."""
        return [row for number in examples for row in range(self.each * number, self.each * (number + 1))]

    def span(self, row: int) -> slice:
        """Return where row ``row`` lies in ``ids`` and ``learned``."""
        return slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))

    def size(self, example: int) -> RowSize:
        """Return the properties of an example that its layout depends on."""
        spans = [self.span(row) for row in self.rows_of([example])]
        return RowSize(spans[-1].stop - spans[0].start)

    def targets(self, example: int) -> int:
        """Count the tokens of an example to learn; never the first of a row, which nothing predicts."""
        spans = [self.span(row) for row in self.rows_of([example])]
        return sum(int(np.count_nonzero(self.learned[span.start + 1 : span.stop])) for span in spans)


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
