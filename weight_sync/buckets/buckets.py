"""Packs named tensors into flat byte buffers of bounded size, and unpacks them.

A bucket concatenates the bytes of its pieces in order; each offset is rounded up to the piece's item size. A piece is
a whole parameter or, if that is larger than a bucket, a contiguous box of it: some rows, or a part of one row. Both
sides compute the offsets from the manifest alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import Box, TensorSpec, lengths, volume, whole
from rl_async.weight_sync.protocol import UpdateInfo

# Those that parameters have and ``copy_`` converts; torch has others, of less than a byte for example.
DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    }
)
MOST_ELEMENTS = 1 << 48  # of the tensors of a manifest, which comes over the network


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``start + data.numel()`` of the flattened parameter ``name``; ``data`` is [numel]."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    data: Tensor

    @property
    def whole(self) -> bool:
        """Whether the piece is the whole parameter."""
        return self.data.numel() == math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Bytes to send, uint8[nbytes] on the host, and the manifest of what they hold."""

    data: Tensor
    info: UpdateInfo

    @property
    def nbytes(self) -> int:
        """Number of bytes that are sent."""
        return self.data.numel()


@dataclass(frozen=True)
class EmptyBucket:
    """A bucket to be filled: ``boxes`` are views of ``data``, each in its box's shape, in order."""

    data: Tensor
    boxes: list[tuple[str, Box, Tensor]]
    info: UpdateInfo  # without a checksum

    def seal(self) -> Bucket:
        """Return the bucket with its checksum; call it once all boxes have their values."""
        return Bucket(data=self.data, info=msgspec.structs.replace(self.info, checksum=checksum(self.data)))


class PlannedPiece(NamedTuple):
    """A box of a tensor, planned to go into a bucket."""

    name: str
    spec: TensorSpec
    box: Box


def divide(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[PlannedPiece]]:
    """Divide tensors among buckets of at most ``max_bytes``, in the order given.

    A tensor that fits into a bucket is never cut. Raises ValueError if a bucket cannot hold a single element.
    """
    if max_bytes < 1:
        raise ValueError(f"a bucket must have at least one byte, not {max_bytes}")
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
    """Allocate the buckets into which ``divide`` puts the tensors; the caller fills and seals them."""
    return [_allocate(pieces) for pieces in divide(specs, max_bytes)]


def unpack(data: Tensor, info: UpdateInfo) -> list[Piece]:
    """Return the pieces of a bucket as views of ``data``, uint8[nbytes].

    Raises WeightSyncError if the manifest is malformed or does not cover exactly these bytes.
    """
    dtypes, numels, starts = _manifest(info)
    offsets, total = _layout(dtypes, numels)
    if data.numel() != total:
        raise WeightSyncError(f"the bucket has {data.numel()} bytes, but its manifest says {total}")
    return [
        Piece(name, tuple(shape), start, data[at : at + numel * dtype.itemsize].view(dtype))
        for name, shape, start, dtype, numel, at in zip(info.names, info.shapes, starts, dtypes, numels, offsets)
    ]


def manifest_bytes(info: UpdateInfo) -> int:
    """Return the size of the bucket that ``info`` describes. Raises WeightSyncError for a malformed manifest."""
    dtypes, numels, _ = _manifest(info)
    return _layout(dtypes, numels)[1]


def wire_bytes(info: UpdateInfo) -> int:
    """Return the number of bytes sent for this bucket. Raises WeightSyncError for a malformed manifest."""
    return info.payload_bytes if info.kind == "delta" else manifest_bytes(info)


def item_size(info: UpdateInfo) -> int:
    """Return the bucket's smallest item size in bytes, which divides every offset and the size; 1 if it is empty."""
    dtypes, numels, _ = _manifest(info)
    return min((dtype.itemsize for dtype in dtypes), default=1) if any(numels) else 1


def checksum(data: Tensor) -> str:
    """Return the xxh3_128 of a host tensor's bytes (uint8[nbytes], contiguous), in hex."""
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def verify(data: Tensor, info: UpdateInfo) -> None:
    """Raise WeightSyncError unless the bytes have the manifest's checksum."""
    found = checksum(data)
    if found != info.checksum:
        raise WeightSyncError(f"bucket from {info.names[0]!r} on has checksum {found}, expected {info.checksum}")


def _cut(name: str, spec: TensorSpec, max_bytes: int) -> Iterator[Box]:
    """Yield contiguous boxes of at most ``max_bytes``: whole rows if a row fits, else parts of each row."""
    if max_bytes < spec.itemsize:
        raise ValueError(f"a bucket of {max_bytes} bytes cannot hold one element of {name} ({spec.itemsize} bytes)")
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


def _allocate(pieces: Sequence[PlannedPiece]) -> EmptyBucket:
    dtypes = [_dtype(piece.spec.dtype) for piece in pieces]
    numels = [volume(piece.box) for piece in pieces]
    offsets, total = _layout(dtypes, numels)
    data = torch.zeros(total, dtype=torch.uint8)  # the padding is part of the checksum
    boxes = [
        (piece.name, piece.box, data[at : at + numel * dtype.itemsize].view(dtype).view(lengths(piece.box)))
        for piece, dtype, numel, at in zip(pieces, dtypes, numels, offsets, strict=True)
    ]
    cut = any(piece.box != whole(piece.spec.shape) for piece in pieces)
    info = UpdateInfo(
        names=[piece.name for piece in pieces],
        dtype_names=[piece.spec.dtype for piece in pieces],
        shapes=[list(piece.spec.shape) for piece in pieces],
        starts=[_first(piece.spec.shape, piece.box) for piece in pieces] if cut else [],
        numels=numels if cut else [],
        checksum="",
    )
    return EmptyBucket(data, boxes, info)


def _first(shape: Sequence[int], box: Box) -> int:
    """Return the index of the box's first element in the flattened tensor."""
    at = 0
    for size, (start, _) in zip(shape, box, strict=True):
        at = at * size + start
    return at


def _manifest(info: UpdateInfo) -> tuple[list[torch.dtype], list[int], list[int]]:
    """Return type, number of elements and first element of each piece. Raises WeightSyncError if they are invalid."""
    count = len(info.names)
    lengths = (len(info.dtype_names), len(info.shapes))
    if lengths != (count, count) or len(info.starts) not in (0, count) or len(info.numels) != len(info.starts):
        raise WeightSyncError(
            f"manifest with {count} names, {lengths[0]} dtypes and {lengths[1]} shapes, "
            f"{len(info.starts)} starts and {len(info.numels)} numels"
        )
    totals = [math.prod(shape) for shape in info.shapes]
    if sum(totals) > MOST_ELEMENTS:
        raise WeightSyncError(f"a manifest of tensors with {sum(totals)} elements")
    starts, numels = info.starts or [0] * count, info.numels or totals
    for name, start, numel, total in zip(info.names, starts, numels, totals):
        if not 0 <= start <= start + numel <= total:
            raise WeightSyncError(f"elements {start} to {start + numel} of {name!r}, which has {total}")
    return [_dtype(name) for name in info.dtype_names], numels, starts


def _layout(dtypes: Sequence[torch.dtype], numels: Sequence[int]) -> tuple[list[int], int]:
    """Return each piece's offset and the bucket's size, at least one byte because transports refuse empty ones."""
    offsets, end = [], 0
    for dtype, numel in zip(dtypes, numels):
        at = _aligned(end, dtype.itemsize)
        offsets.append(at)
        end = at + numel * dtype.itemsize
    return offsets, max(end, 1)


def _aligned(offset: int, itemsize: int) -> int:
    return -(-offset // itemsize) * itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as manifests and layouts spell it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name not in DTYPES:
        raise WeightSyncError(f"unknown dtype {name!r} in a manifest")
    return dtype
