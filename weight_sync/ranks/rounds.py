"""Which rank sends which parts of which tensors in each round of a publication. Pure; every rank finds the same.

Tensors go in the order of the layout, and a round has at most ``bucket_bytes`` of them, from all ranks together. So an
engine completes one tensor after the other, and a tensor is only divided among rounds if it is larger than a bucket.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl_async.weight_sync.buckets.buckets import divide, first_element
from rl_async.weight_sync.layout import Box, Layout, Shard, TensorSpec, common, lengths, volume, whole
from rl_async.weight_sync.reshard.plan import moves

Needs = Mapping[str, tuple[Box, ...]]  # of one worker, by the name of a tensor; empty: nothing of it


class Part(NamedTuple):
    """A box of a tensor that one rank sends, from its shard ``held``."""

    name: str
    held: Shard
    box: Box


class Cut(NamedTuple):
    """What a worker gets of a part: the fields of a ``Piece`` but for its data."""

    part: Part
    boxes: tuple[Box, ...]  # of the tensor, within the part
    start: int
    total: int
    run: bool  # the boxes are one, which is elements ``start`` on of the flattened tensor


@dataclass(frozen=True)
class Rounds:
    """The parts of every round, from all ranks."""

    tensors: Mapping[str, TensorSpec]
    parts: tuple[tuple[Part, ...], ...]

    @property
    def senders(self) -> list[int]:
        """The ranks that send anything, in ascending order."""
        return sorted({part.held.rank for parts in self.parts for part in parts})

    def of_rank(self, rank: int) -> list[list[Part]]:
        """Return what ``rank`` sends in each round to a worker that needs everything."""
        return [[part for part in parts if part.held.rank == rank] for parts in self.parts]

    def cut(self, rank: int, needs: Needs | None) -> list[list[Cut]]:
        """Return what ``rank`` sends in each round to a worker with these needs (None: everything)."""
        wanted = {n: (whole(spec.shape),) if needs is None else needs[n] for n, spec in self.tensors.items()}
        by_name: dict[str, list[tuple[int, Part, tuple[Box, ...]]]] = defaultdict(list)
        for number, parts in enumerate(self.parts):
            for part in parts:
                found = (common(box, part.box) for box in wanted[part.name])
                if boxes := tuple(box for box in found if box is not None):
                    by_name[part.name].append((number, part, boxes))
        rounds: list[list[Cut]] = [[] for _ in self.parts]
        for name, pieces in by_name.items():
            shape, sent = self.tensors[name].shape, 0
            total = sum(map(volume, wanted[name]))
            runs = total == volume(whole(shape)) and all(_is_run(shape, boxes) for _, _, boxes in pieces)
            for number, part, boxes in pieces:
                if part.held.rank == rank:
                    start = first_element(shape, boxes[0]) if runs else sent
                    rounds[number].append(Cut(part, boxes, start, total, runs))
                sent += sum(map(volume, boxes))
        return rounds


def plan_rounds(layout: Layout, bucket_bytes: int) -> Rounds:
    """Divide the tensors of ``layout`` among rounds of at most ``bucket_bytes`` and among the ranks that hold them.

    Of several holders of an element, that which has least to send so far sends it. Raises WeightSyncError if nobody
    holds an element, and ValueError if a bucket cannot hold one.
    """
    engine = max(layout.ranks) + 1  # a rank that holds nothing yet
    sent: dict[int, int] = defaultdict(int)
    rounds: list[tuple[Part, ...]] = []
    for pieces in divide(layout.tensors, bucket_bytes):
        parts: list[Part] = []
        for piece in pieces:
            for move in moves(piece.name, layout, Shard(engine, piece.box), sent):
                sent[move.source.rank] += move.nbytes
                parts.append(Part(piece.name, move.source, move.box))
        rounds.append(tuple(parts))
    return Rounds(layout.tensors, tuple(rounds))


def _is_run(shape: Sequence[int], boxes: tuple[Box, ...]) -> bool:
    """Whether the boxes are one, whose elements are consecutive in the flattened tensor."""
    if len(boxes) != 1:
        return False
    cut = [length > 1 for length in lengths(boxes[0])]
    begin = cut.index(True) if any(cut) else len(cut)
    return all(length == size for length, size in list(zip(lengths(boxes[0]), shape, strict=True))[begin + 1 :])
