"""Layouts of a model's weights: for every tensor, which rank holds which box of it. Pure; no torch.

A box is a hyper-rectangle of a whole tensor under its Hugging Face name, whatever the holder calls that part or fuses
it with. A rank may hold several boxes of a tensor, and several ranks the same one (a replica). Source and target of a
transfer number their ranks in one process group, so that a rank that is in both is recognised.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rl_async.errors import WeightSyncError

Box = tuple[tuple[int, int], ...]  # first element and end, per dimension


ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class TensorSpec(NamedTuple):
    """A whole tensor. ``dtype`` is torch's name of the type in which it is sent; the holder's may be wider."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of an element. Raises WeightSyncError for a type that cannot be sent."""
        if self.dtype not in ITEM_BYTES:
            raise WeightSyncError(f"weights of type {self.dtype} cannot be sent; only {', '.join(ITEM_BYTES)}")
        return ITEM_BYTES[self.dtype]


class Shard(NamedTuple):
    """A box that a rank holds as one tensor of that shape."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Layout:
    """Which ranks hold which boxes of which tensors; empty boxes are left out.

    ``shards`` of a tensor are in the order in which they lie in a rank's memory, where that matters. Raises
    WeightSyncError if a shard is not within its tensor, or a rank holds an element twice.
    """

    tensors: Mapping[str, TensorSpec]
    shards: Mapping[str, tuple[Shard, ...]]

    def __post_init__(self) -> None:
        if self.tensors.keys() != self.shards.keys():
            raise WeightSyncError(
                f"a layout has only a shape, or only shards, of {sorted(self.tensors.keys() ^ self.shards.keys())[:3]}"
            )
        for name, shards in self.shards.items():
            _check(name, self.tensors[name], shards)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold at least one shard, in ascending order."""
        return tuple(sorted({shard.rank for shards in self.shards.values() for shard in shards}))

    def nbytes(self, name: str, box: Box) -> int:
        """Return the number of bytes of a box of the tensor ``name``."""
        return volume(box) * self.tensors[name].itemsize

    def held(self, rank: int) -> list[tuple[str, Box]]:
        """List the boxes that ``rank`` holds, with their tensors' names, in order."""
        return [(name, s.box) for name, shards in self.shards.items() for s in shards if s.rank == rank]

    def placed(self, ranks: Sequence[int]) -> "Layout":
        """Return this layout on other ranks: ``ranks[i]`` holds what rank i held."""
        moved = {
            name: tuple(Shard(ranks[shard.rank], shard.box) for shard in shards) for name, shards in self.shards.items()
        }
        return Layout(self.tensors, moved)


def joined(layouts: Sequence[Layout]) -> Layout:
    """Join layouts of the same tensors on disjoint ranks, such as those of all engines of a run, into one."""
    first = layouts[0]
    return Layout(
        first.tensors, {name: tuple(s for layout in layouts for s in layout.shards[name]) for name in first.tensors}
    )


def fsdp2(tensors: Mapping[str, TensorSpec], ranks: int, replicas: int = 1) -> Layout:
    """Return FSDP2's layout, ``Shard(0)`` of torch's DTensor: rows as by ``torch.chunk``, so the last ranks may have
    none.

    With ``replicas`` (HSDP) rank ``replica * ranks + i`` holds what rank i does, as on a mesh (replicate, shard).
    """
    shards = {}
    for name, tensor in tensors.items():
        if not tensor.shape:
            raise WeightSyncError(f"{name} is a scalar, which FSDP2 does not shard")
        rows = tensor.shape[0]
        step = -(-rows // ranks)
        parts = [range(min(i * step, rows), min((i + 1) * step, rows)) for i in range(ranks)]
        held = ((copy * ranks + i, part) for copy in range(replicas) for i, part in enumerate(parts))
        shards[name] = shards_of((rank, cut(tensor.shape, 0, part)) for rank, part in held)
    return Layout(tensors, shards)


def shards_of(held: Iterable[tuple[int, Box]]) -> tuple[Shard, ...]:
    """Make shards of (rank, box) pairs, leaving out empty boxes."""
    return tuple(Shard(rank, box) for rank, box in held if volume(box))


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers all of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def cut(shape: Sequence[int], dimension: int, part: range) -> Box:
    """Return the box that covers ``part`` of one dimension and all of the others."""
    return tuple((part.start, part.stop) if d == dimension else (0, size) for d, size in enumerate(shape))


def volume(box: Box) -> int:
    """Return the number of elements of a box; 1 for a scalar's."""
    return math.prod(stop - start for start, stop in box)


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Return ``box`` minus ``hole``, which lies within it, as disjoint boxes: at most two per dimension."""
    rest, inner = [], list(box)
    for dimension, ((start, stop), (first, end)) in enumerate(zip(box, hole, strict=True)):
        for low, high in ((start, first), (end, stop)):
            if low < high:
                rest.append((*inner[:dimension], (low, high), *inner[dimension + 1 :]))
        inner[dimension] = (first, end)
    return rest


def slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices of ``box`` within a tensor that holds the box ``outer``."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def lengths(box: Box) -> tuple[int, ...]:
    """Return the shape of a tensor that holds a box."""
    return tuple(stop - start for start, stop in box)


def _check(name: str, tensor: TensorSpec, shards: Sequence[Shard]) -> None:
    by_rank: dict[int, list[Box]] = {}
    for rank, box in shards:
        outside = len(box) != len(tensor.shape) or any(
            not 0 <= start < stop <= size for (start, stop), size in zip(box, tensor.shape, strict=False)
        )
        if outside:
            raise WeightSyncError(f"rank {rank} cannot hold {box} of {name}, whose shape is {tensor.shape}")
        by_rank.setdefault(rank, []).append(box)
    for rank, boxes in by_rank.items():
        boxes.sort()
        for i, box in enumerate(boxes):  # sorted by their first rows, so only the next few can overlap
            for later in boxes[i + 1 :]:
                if box and later[0][0] >= box[0][1]:
                    break
                if common(box, later) is not None:
                    raise WeightSyncError(f"rank {rank} would hold elements of {name} twice: {box} and {later}")
