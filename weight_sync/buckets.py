"""Named tensors as flat byte buffers of bounded size, and back.

A bucket concatenates the bytes of its pieces in order; each offset is rounded up to the piece's item size. A piece is
a whole parameter, or a run of its elements where the parameter is larger than a bucket. Both sides compute the offsets
from the manifest alone.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from rl_async.errors import WeightSyncError
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


def make_buckets(parameters: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Copy tensors, from any device, into buckets of at most ``max_bytes``, in the order given.

    A tensor that fits into a bucket is never cut. Only one bucket is built at a time, so a consumer that sends each at
    once needs the memory of one. Raises ValueError if not even one element fits.
    """
    if max_bytes < 1:
        raise ValueError(f"a bucket needs at least one byte, not {max_bytes}")
    waiting: list[Piece] = []
    end = 0
    for name, tensor in parameters:
        for piece in _cut(name, tensor, max_bytes):
            extended = _aligned(end, piece.data.dtype) + piece.data.nbytes
            if waiting and extended > max_bytes:
                yield _fill(waiting)
                waiting, extended = [], piece.data.nbytes
            waiting.append(piece)
            end = extended
    if waiting:
        yield _fill(waiting)


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


def _cut(name: str, tensor: Tensor, max_bytes: int) -> Iterator[Piece]:
    flat, shape = tensor.detach().reshape(-1), tuple(tensor.shape)
    if flat.nbytes <= max_bytes:
        yield Piece(name, shape, 0, flat)
        return
    step = max_bytes // flat.itemsize
    if step == 0:
        raise ValueError(f"not one element of {name} ({flat.itemsize} bytes) fits into a bucket of {max_bytes} bytes")
    for start in range(0, flat.numel(), step):
        yield Piece(name, shape, start, flat[start : start + step])


def _fill(pieces: Sequence[Piece]) -> Bucket:
    dtypes = [piece.data.dtype for piece in pieces]
    offsets, total = _layout(dtypes, [piece.data.numel() for piece in pieces])
    data = torch.zeros(total, dtype=torch.uint8)  # the padding is part of the checksum
    for piece, at in zip(pieces, offsets):
        data[at : at + piece.data.nbytes].view(piece.data.dtype).copy_(piece.data)
    cut = not all(piece.whole for piece in pieces)
    info = UpdateInfo(
        names=[piece.name for piece in pieces],
        dtype_names=[str(dtype).removeprefix("torch.") for dtype in dtypes],
        shapes=[list(piece.shape) for piece in pieces],
        starts=[piece.start for piece in pieces] if cut else [],
        numels=[piece.data.numel() for piece in pieces] if cut else [],
        checksum=checksum(data),
    )
    return Bucket(data=data, info=info)


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
        at = _aligned(end, dtype)
        offsets.append(at)
        end = at + numel * dtype.itemsize
    return offsets, max(end, 1)


def _aligned(offset: int, dtype: torch.dtype) -> int:
    return -(-offset // dtype.itemsize) * dtype.itemsize


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"unknown dtype {name!r} in a manifest")
    return dtype
