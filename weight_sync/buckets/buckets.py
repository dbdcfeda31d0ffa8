"""Packs named tensors into flat byte buffers of bounded size, and unpacks them.

A bucket concatenates the bytes of its pieces in order; each offset is rounded up to the piece's item size. A piece is
a whole parameter or, if that is larger than a bucket, a contiguous box of it: some rows, or a part of one row. Both
sides compute the offsets from the manifest alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.checksum import checksum, checksum_like
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
    """Elements ``start`` to ``start + data.numel()`` of the flattened parameter ``name``; ``data`` is [numel].

    With ``boxes``, ``data`` is these parts of the parameter, one flattened box after another; ``total`` elements of it
    travel, ``start`` of them before these.
    """

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    data: Tensor
    boxes: tuple[Box, ...] = ()
    of_boxes: int = 0  # with boxes: ``total``

    @property
    def total(self) -> int:
        """Number of elements of the parameter that travel."""
        return self.of_boxes if self.boxes else math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether the piece is the whole parameter as it lies in memory."""
        return not self.boxes and self.data.numel() == self.total

    def copy_into(self, parameter: Tensor) -> None:
        """Copy the elements into their places in the parameter, contiguous and of the whole shape."""
        if not self.boxes:
            parameter.view(-1)[self.start : self.start + self.data.numel()].copy_(self.data)
        at = 0
        for box in self.boxes:
            part = self.data[at : at + volume(box)].view(lengths(box))
            parameter[tuple(slice(*span) for span in box)].copy_(part)
            at += volume(box)


@dataclass(frozen=True)
class Bucket:
    """Bytes to send, uint8[nbytes] on any device, and the manifest of what they hold."""

    data: Tensor
    info: UpdateInfo
    home: torch.device | None = None  # where it was filled, if ``data`` has moved since

    @property
    def device(self) -> torch.device:
        """The device where the bucket was filled, and from which engines on this machine can take it."""
        return self.home or self.data.device

    def offloaded(self) -> "Bucket":
        """Return the bucket with its bytes on the host."""
        return replace(self, data=self.data.cpu(), home=self.device)

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


def allocate_buckets(
    specs: Mapping[str, TensorSpec], max_bytes: int, device: str | torch.device = "cpu"
) -> list[EmptyBucket]:
    """Allocate the buckets into which ``divide`` puts the tensors; the caller fills and seals them."""
    return [_allocate(pieces, torch.device(device)) for pieces in divide(specs, max_bytes)]


def pack(pieces: Sequence[Piece]) -> Bucket:
    """Copy pieces into a bucket on the device of the first (none: the host)."""
    device = pieces[0].data.device if pieces else torch.device("cpu")
    dtypes, numels = [piece.data.dtype for piece in pieces], [piece.data.numel() for piece in pieces]
    data, places = room(dtypes, numels, device)
    for piece, place in zip(pieces, places, strict=True):
        place.copy_(piece.data)
    return Bucket(data, msgspec.structs.replace(manifest(pieces), checksum=checksum(data)))


def room(dtypes: Sequence[torch.dtype], numels: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return an empty bucket, uint8[nbytes], and the places in it of pieces with so many elements, [numel] each."""
    # The padding is part of the checksum.
    data = torch.zeros(layout_of(dtypes, numels)[1], dtype=torch.uint8, device=device)
    return data, places_in(data, dtypes, numels)


def places_in(data: Tensor, dtypes: Sequence[torch.dtype], numels: Sequence[int]) -> list[Tensor]:
    """Return views of a bucket's pieces, [numel] each."""
    offsets, _ = layout_of(dtypes, numels)
    return [
        data[at : at + numel * dtype.itemsize].view(dtype)
        for at, numel, dtype in zip(offsets, numels, dtypes, strict=True)
    ]


def manifest(pieces: Sequence[Piece]) -> UpdateInfo:
    """Return the manifest, without a checksum, of a bucket that holds these pieces."""
    boxes = any(piece.boxes for piece in pieces)
    return UpdateInfo(
        names=[piece.name for piece in pieces],
        dtype_names=[dtype_name(piece.data.dtype) for piece in pieces],
        shapes=[list(piece.shape) for piece in pieces],
        starts=[piece.start for piece in pieces],
        numels=[piece.data.numel() for piece in pieces],
        boxes=[[list(box) for box in piece.boxes] for piece in pieces] if boxes else [],
        totals=[piece.total for piece in pieces] if boxes else [],
        checksum="",
    )


def unpack(data: Tensor, info: UpdateInfo) -> list[Piece]:
    """Return the pieces of a bucket as views of ``data``, uint8[nbytes].

    Raises WeightSyncError if the manifest is malformed or does not cover exactly these bytes.
    """
    dtypes, numels, starts = _manifest(info)
    offsets, total = layout_of(dtypes, numels)
    if data.numel() != total:
        raise WeightSyncError(f"the bucket has {data.numel()} bytes, but its manifest says {total}")
    boxes = [tuple(map(tuple, of_one)) for of_one in info.boxes] or [()] * len(offsets)
    return [
        Piece(name, tuple(shape), start, data[at : at + numel * dtype.itemsize].view(dtype), parts, total)
        for name, shape, start, dtype, numel, at, parts, total in zip(
            info.names, info.shapes, starts, dtypes, numels, offsets, boxes, info.totals or numels
        )
    ]


def manifest_bytes(info: UpdateInfo) -> int:
    """Return the size of the bucket that ``info`` describes. Raises WeightSyncError for a malformed manifest."""
    dtypes, numels, _ = _manifest(info)
    return layout_of(dtypes, numels)[1]


def wire_bytes(info: UpdateInfo) -> int:
    """Return the number of bytes sent for this bucket. Raises WeightSyncError for a malformed manifest."""
    return info.payload_bytes if info.kind == "delta" else manifest_bytes(info)


def item_size(info: UpdateInfo) -> int:
    """Return the bucket's smallest item size in bytes, which divides every offset and the size; 1 if it is empty."""
    dtypes, numels, _ = _manifest(info)
    return min((dtype.itemsize for dtype in dtypes), default=1) if any(numels) else 1


def verify(data: Tensor, info: UpdateInfo) -> None:
    """Raise WeightSyncError unless the bytes have the manifest's checksum."""
    found = checksum_like(info.checksum, data)
    if found != info.checksum:
        raise WeightSyncError(f"bucket from {info.names[:1]} on has checksum {found}, expected {info.checksum}")


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


def _allocate(pieces: Sequence[PlannedPiece], device: torch.device) -> EmptyBucket:
    numels = [volume(piece.box) for piece in pieces]
    data, places = room([dtype_of(piece.spec.dtype) for piece in pieces], numels, device)
    boxes = [(p.name, p.box, place.view(lengths(p.box))) for p, place in zip(pieces, places, strict=True)]
    cut = any(piece.box != whole(piece.spec.shape) for piece in pieces)
    info = UpdateInfo(
        names=[piece.name for piece in pieces],
        dtype_names=[piece.spec.dtype for piece in pieces],
        shapes=[list(piece.spec.shape) for piece in pieces],
        starts=[first_element(piece.spec.shape, piece.box) for piece in pieces] if cut else [],
        numels=numels if cut else [],
        checksum="",
    )
    return EmptyBucket(data, boxes, info)


def first_element(shape: Sequence[int], box: Box) -> int:
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
    if info.boxes:
        _check_boxes(info, numels)
        totals = [min(total, most) if boxes else most for boxes, total, most in zip(info.boxes, info.totals, totals)]
    for name, start, numel, total in zip(info.names, starts, numels, totals):
        if not 0 <= start <= start + numel <= total:
            raise WeightSyncError(f"elements {start} to {start + numel} of {name!r}, which has {total}")
    return [dtype_of(name) for name in info.dtype_names], numels, starts


def _check_boxes(info: UpdateInfo, numels: Sequence[int]) -> None:
    """Raise WeightSyncError unless every piece's boxes are within its parameter and have ``numels`` elements."""
    if {len(info.boxes), len(info.totals)} != {len(info.names)}:
        raise WeightSyncError(
            f"manifest with {len(info.names)} names, boxes of {len(info.boxes)} and totals of {len(info.totals)}"
        )
    for name, shape, boxes, numel in zip(info.names, info.shapes, info.boxes, numels):
        for box in boxes:
            if len(box) != len(shape) or any(not a < b <= size for (a, b), size in zip(box, shape)):
                raise WeightSyncError(f"{box} is no part of {name!r}, whose shape is {shape}")
        if boxes and sum(volume(tuple(box)) for box in boxes) != numel:
            raise WeightSyncError(f"{numel} elements of {name!r}, whose boxes are {boxes}")


def layout_of(dtypes: Sequence[torch.dtype], numels: Sequence[int]) -> tuple[list[int], int]:
    """Return each piece's offset in a bucket, and its size, at least one byte because transports refuse empty ones."""
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


def dtype_of(name: str) -> torch.dtype:
    """Return the type with this name. Raises WeightSyncError unless parameters can have it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name not in DTYPES:
        raise WeightSyncError(f"unknown dtype {name!r} in a manifest")
    return dtype
