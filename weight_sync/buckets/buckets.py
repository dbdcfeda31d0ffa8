"""Named tensors as flat byte buffers of bounded size, and back.

A bucket concatenates the bytes of its pieces in order; each offset is rounded up to the piece's item size. A piece is
a whole parameter, or where that is larger than a bucket a box of it whose elements follow one another: some rows, or a
part of one. Both sides compute the offsets from the manifest alone.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import Box, TensorSpec, lengths, slices, volume, whole
from rl_async.weight_sync.protocol import UpdateInfo


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``start + data.numel()`` of the flattened parameter ``name``; ``data`` is [numel]."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    data: Tensor

    @property
    def whole(self) -> bool:
        """Whether nothing of the parameter is missing."""
        return self.data.numel() == math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """``data`` is uint8[nbytes] on the host; ``info`` says what it holds."""

    data: Tensor
    info: UpdateInfo

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.data.numel()


@dataclass(frozen=True)
class EmptyBucket:
    """A bucket that is yet to be filled: ``boxes`` are views of ``data``, of each box's shape, in order."""

    data: Tensor
    boxes: list[tuple[str, Box, Tensor]]
    info: UpdateInfo  # without a checksum

    def seal(self) -> Bucket:
        """The bucket, once all boxes have their values."""
        return Bucket(data=self.data, info=msgspec.structs.replace(self.info, checksum=checksum(self.data)))


class PlannedPiece(NamedTuple):
    """A box of a tensor, as it will lie in a bucket."""

    name: str
    spec: TensorSpec
    box: Box


def divide(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[PlannedPiece]]:
    """What goes into each bucket of at most ``max_bytes``, in the order given.

    A tensor that fits into a bucket is never cut. Raises ValueError if not even one element fits.
    """
    if max_bytes < 1:
        raise ValueError(f"a bucket needs at least one byte, not {max_bytes}")
    buckets: list[list[PlannedPiece]] = [[]]
    end = 0
    for name, spec in specs.items():
        for box in _cut(name, spec, max_bytes):
            size = volume(box) * spec.itemsize
            end = _aligned(end, spec.itemsize) + size
            if buckets[-1] and end > max_bytes:
                buckets.append([])
                end = size
            buckets[-1].append(PlannedPiece(name, spec, box))
    return [bucket for bucket in buckets if bucket]


def allocate_buckets(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[EmptyBucket]:
    """Empty buckets for tensors, as ``divide`` says."""
    return [_room(parts) for parts in divide(specs, max_bytes)]


def make_buckets(parameters: Iterable[tuple[str, Tensor]], max_bytes: int) -> list[Bucket]:
    """Copies of whole tensors, from any device, in buckets of at most ``max_bytes``. Raises as ``allocate_buckets``."""
    tensors = dict(parameters)
    specs = {name: TensorSpec(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
    rooms = allocate_buckets(specs, max_bytes)
    for room in rooms:
        for name, box, place in room.boxes:
            place.copy_(tensors[name].detach()[slices(box, whole(tensors[name].shape))])
    return [room.seal() for room in rooms]


def unpack(data: Tensor, info: UpdateInfo) -> list[Piece]:
    """The pieces of a bucket as views of ``data`` (uint8[nbytes]).

    Raises WeightSyncError if the manifest is malformed or does not cover exactly these bytes.
    """
    dtypes, numels, starts = _manifest(info)
    offsets, total = _layout(dtypes, numels)
    if data.numel() != total:
        raise WeightSyncError(f"the bucket has {data.numel()} bytes, its manifest {total}")
    return [
        Piece(name, tuple(shape), start, data[at : at + numel * dtype.itemsize].view(dtype))
        for name, shape, start, dtype, numel, at in zip(info.names, info.shapes, starts, dtypes, numels, offsets)
    ]


def manifest_bytes(info: UpdateInfo) -> int:
    """Size of the bucket that ``info`` describes. Raises WeightSyncError for a malformed manifest."""
    dtypes, numels, _ = _manifest(info)
    return _layout(dtypes, numels)[1]


def wire_bytes(info: UpdateInfo) -> int:
    """Bytes that travel for this bucket. Raises WeightSyncError for a malformed manifest."""
    return info.payload_bytes if info.kind == "delta" else manifest_bytes(info)


def item_size(info: UpdateInfo) -> int:
    """The smallest item of the bucket in bytes, of which every offset and the size are multiples; 1 if it is empty."""
    dtypes, numels, _ = _manifest(info)
    return min((dtype.itemsize for dtype in dtypes), default=1) if any(numels) else 1


def checksum(data: Tensor) -> str:
    """xxh3_128 of a host tensor's bytes (uint8[nbytes], contiguous), in hex."""
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def verify(data: Tensor, info: UpdateInfo) -> None:
    """Raise WeightSyncError unless the bytes are those that were packed."""
    found = checksum(data)
    if found != info.checksum:
        raise WeightSyncError(f"checksum of the bucket from {info.names[0]!r} on is {found}, expected {info.checksum}")


def _cut(name: str, spec: TensorSpec, max_bytes: int) -> Iterator[Box]:
    """Boxes whose elements follow one another: rows as long as one fits, else parts of each row."""
    if max_bytes < spec.itemsize:
        raise ValueError(f"not one element of {name} ({spec.itemsize} bytes) fits into a bucket of {max_bytes} bytes")
    todo = [whole(spec.shape)]
    while todo:
        box = todo.pop(0)
        size = volume(box) * spec.itemsize
        if size <= max_bytes:
            yield box
            continue
        dimension = next(d for d, length in enumerate(lengths(box)) if length > 1)
        start, stop = box[dimension]
        step = max(1, max_bytes // (size // (stop - start)))
        ends = [(first, min(first + step, stop)) for first in range(start, stop, step)]
        todo = [(*box[:dimension], part, *box[dimension + 1 :]) for part in ends] + todo


def _room(parts: Sequence[PlannedPiece]) -> EmptyBucket:
    dtypes = [_dtype(part.spec.dtype) for part in parts]
    numels = [volume(part.box) for part in parts]
    offsets, total = _layout(dtypes, numels)
    data = torch.zeros(total, dtype=torch.uint8)  # the padding is part of the checksum
    boxes = [
        (part.name, part.box, data[at : at + numel * dtype.itemsize].view(dtype).view(lengths(part.box)))
        for part, dtype, numel, at in zip(parts, dtypes, numels, offsets, strict=True)
    ]
    cut = any(part.box != whole(part.spec.shape) for part in parts)
    info = UpdateInfo(
        names=[part.name for part in parts],
        dtype_names=[part.spec.dtype for part in parts],
        shapes=[list(part.spec.shape) for part in parts],
        starts=[_first(part.spec.shape, part.box) for part in parts] if cut else [],
        numels=numels if cut else [],
        checksum="",
    )
    return EmptyBucket(data, boxes, info)


def _first(shape: Sequence[int], box: Box) -> int:
    """Where the box begins in the flattened tensor."""
    at = 0
    for size, (start, _) in zip(shape, box, strict=True):
        at = at * size + start
    return at


def _manifest(info: UpdateInfo) -> tuple[list[torch.dtype], list[int], list[int]]:
    """Type, number of elements and first element of each piece. Raises WeightSyncError if they cannot be."""
    count = len(info.names)
    lengths = (len(info.dtype_names), len(info.shapes))
    if lengths != (count, count) or len(info.starts) not in (0, count) or len(info.numels) != len(info.starts):
        raise WeightSyncError(
            f"manifest with {count} names, {lengths[0]} dtypes and {lengths[1]} shapes, "
            f"{len(info.starts)} starts and {len(info.numels)} numels"
        )
    totals = [math.prod(shape) for shape in info.shapes]
    starts, numels = info.starts or [0] * count, info.numels or totals
    for name, start, numel, total in zip(info.names, starts, numels, totals):
        if not 0 <= start <= start + numel <= total:
            raise WeightSyncError(f"elements {start} to {start + numel} of {name!r}, which has {total}")
    return [_dtype(name) for name in info.dtype_names], numels, starts


def _layout(dtypes: Sequence[torch.dtype], numels: Sequence[int]) -> tuple[list[int], int]:
    """Offset of each piece, and the size of the bucket: at least one byte, since transports refuse none."""
    offsets, end = [], 0
    for dtype, numel in zip(dtypes, numels):
        at = _aligned(end, dtype.itemsize)
        offsets.append(at)
        end = at + numel * dtype.itemsize
    return offsets, max(end, 1)


def _aligned(offset: int, itemsize: int) -> int:
    return -(-offset // itemsize) * itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """As manifests and layouts have it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"unknown dtype {name!r} in a manifest")
    return dtype
