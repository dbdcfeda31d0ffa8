"""Buckets: flat byte buffers of bounded size that hold named tensors, with their checksums, and smaller forms of them.

A bucket concatenates the bytes of its pieces in order; each offset is rounded up to the piece's item size. A piece is
a whole parameter or, if that is larger than a bucket, a contiguous box of it: some rows, or a part of one row. Both
sides compute the offsets from the manifest alone.

A delta encodes the difference between two versions of a bucket. They are compared bitwise in units of the smallest item
size. The payload has the number of changed units in each block of 2^16 (uint32), then the position of each changed unit
in its block (uint16), then their new values. It is lossless, for NaNs and negative zeros too.

An adapter (LoRA, arXiv:2106.09685) of the layer ``L``, whose weight [out, in] is ``L.weight``, is ``L.lora_A.weight``
[rank, in] and ``L.lora_B.weight`` [out, rank], in float32 as they are trained; engines add it to a base that they hold.

There are two kinds of checksums, each the quickest where the bytes are, both computable anywhere: xxh3_128 on the host,
and on an accelerator two sums of integer products modulo 2^64, which every device computes to the same bits. They guard
against faults, not against forgery: any single changed word is found, and of other changes all but about one in 2^32.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.messages import Version
from rl_async.weight_sync.layout import Box, TensorSpec, lengths, volume, whole
from rl_async.weight_sync.protocol import Hold, UpdateInfo

# Those that parameters have and ``copy_`` converts; torch has others, of less than a byte for example.
DTYPES = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    }
)
# Manifests come over the network, so their tensors must not have more elements than this.
MOST_ELEMENTS = 1 << 48

DELTA_BLOCK = 1 << 16
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LOW, HIGH = ".lora_A.weight", ".lora_B.weight"
# Number of elements of a sum that fit in a processor's cache.
CACHED = 1 << 18

# Begins a checksum of the second kind.
SUMS = "sums:"
# Number of words of eight bytes that share a factor.
SUM_BLOCK = 1 << 15
# Number of blocks whose products exist at the same time, in 32 MiB.
AT_ONCE = 1 << 7


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``start + data.numel()`` of the flattened parameter ``name``; ``data`` is [numel].

    ``shape`` is that of the whole parameter. With ``boxes``, ``data`` holds these parts of it, one flattened box after
    another; ``of_boxes`` elements of the parameter travel in total, ``start`` of them before these.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    data: Tensor
    boxes: tuple[Box, ...] = ()
    of_boxes: int = 0

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
            return
        for box, part in self.parts():
            parameter[tuple(slice(*span) for span in box)].copy_(part)

    def parts(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes of the parameter that the piece holds, each with its elements in the box's shape.

        Without ``boxes`` the elements are one: whole rows, or a part of a row, of the last dimensions (``divide``).
        """
        at = 0
        for box in self.boxes or (box_from(self.shape, self.start, self.data.numel()),):
            yield box, self.data[at : at + volume(box)].view(lengths(box))
            at += volume(box)


@dataclass(frozen=True)
class Bucket:
    """Bytes to send, uint8[nbytes], and their manifest. ``home`` is the former device of bytes that have moved."""

    data: Tensor
    info: UpdateInfo
    home: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """The device where the bucket was filled. Engines on this machine can take it from there."""
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
    """A bucket to be filled: ``boxes`` are views of ``data``, each in its box's shape. ``info`` has no checksum yet."""

    data: Tensor
    boxes: list[tuple[str, Box, Tensor]]
    info: UpdateInfo

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
    buckets = []
    for pieces in divide(specs, max_bytes):
        numels = [volume(piece.box) for piece in pieces]
        data, places = room([dtype_of(piece.spec.dtype) for piece in pieces], numels, torch.device(device))
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
        buckets.append(EmptyBucket(data, boxes, info))
    return buckets


def pack(pieces: Sequence[Piece]) -> Bucket:
    """Copy pieces into a bucket on the device of the first one; an empty bucket is on the host."""
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


def box_from(shape: Sequence[int], start: int, numel: int) -> Box:
    """Return the box of elements ``start`` to ``start + numel`` of a flattened tensor.

    Raises WeightSyncError if they are no box, which pieces that ``divide`` makes are.
    """
    box: list[tuple[int, int]] = []
    inner, left = math.prod(shape), start
    for size in shape:
        inner //= size
        first, left = divmod(left, inner)
        box.append((first, first + max(1, min(size, numel // inner))))
    if volume(tuple(box)) != numel or any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
        raise WeightSyncError(f"elements {start} to {start + numel} of a tensor of shape {tuple(shape)} are no box")
    return tuple(box)


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


def numbered(buckets: Sequence[Bucket], version: Version, hold: Hold) -> Sequence[Bucket]:
    """Return ``buckets`` labelled for engines that keep them; the bytes are shared with the originals.

    Engines always keep adapters and a base that was sent for them, and load them once both are complete.
    """
    added = adapter_buckets(buckets)
    if added and added[0].info.base:
        return _labelled(added, str(version), "stage", base=added[0].info.base)
    if added:
        base = [bucket for bucket in buckets if bucket.info.kind != "adapter"]
        # A name for these weights alone, never that of a version.
        name = f"base-{xxhash.xxh3_128_hexdigest(msgspec.json.encode([bucket.info for bucket in base]))}"
        return [*_labelled(base, name, "stage"), *_labelled(added, str(version), "stage", base=name)]
    return buckets if hold == "no" else _labelled(buckets, str(version), hold)


def _labelled(buckets: Sequence[Bucket], version: str, hold: Hold, base: str = "") -> list[Bucket]:
    return [
        replace(
            bucket,
            info=msgspec.structs.replace(
                bucket.info, hold=hold, version=version, index=index, count=len(buckets), base=base
            ),
        )
        for index, bucket in enumerate(buckets)
    ]


# --- deltas


def deltas(buckets: Sequence[Bucket], base: Sequence[Bucket], base_version: str) -> Iterator[Bucket]:
    """Yield each bucket as a delta against the one at its position in ``base``, or whole if a delta is not smaller.

    The checksum remains that of the whole bucket, so the receiver verifies the decoded bytes, not the payload.
    """
    for index, bucket in enumerate(buckets):
        old = base[index] if index < len(base) else None
        payload = _encode(bucket, old) if old is not None and _contents(bucket) == _contents(old) else None
        if payload is None:
            yield bucket
            continue
        info = msgspec.structs.replace(bucket.info, kind="delta", base=base_version, payload_bytes=payload.numel())
        yield replace(bucket, data=payload, info=info)


def apply_delta(payload: Tensor, data: Tensor, info: UpdateInfo) -> None:
    """Turn ``data``, the base as uint8[nbytes], in place into the new bucket; ``payload`` is uint8[payload_bytes] on
    the same device.

    Raises WeightSyncError for a payload that does not fit the bucket. The caller verifies the result.
    """
    units = data.view(UNITS[item_size(info)])
    head = 4 * _blocks(units)
    counts = payload[:head].view(torch.int32).long() & 0xFFFFFFFF if payload.numel() >= head else payload.new_zeros(0)
    changed = int(counts.sum())
    split = head + 2 * changed
    if 4 * counts.numel() != head or payload.numel() != split + changed * units.itemsize:
        raise WeightSyncError(f"a delta of {payload.numel()} bytes does not fit the bucket from {info.names[0]!r} on")
    starts = torch.arange(len(counts), device=data.device) * DELTA_BLOCK
    places = payload[head:split].view(torch.int16).long() & 0xFFFF
    places += torch.repeat_interleave(starts, counts, output_size=changed)
    if changed and int(places.max()) >= len(units):
        raise WeightSyncError(f"a delta changes positions beyond the end of the bucket from {info.names[0]!r} on")
    # A view would have to be aligned, so the payload is copied.
    units[places] = payload[split:].clone().view(units.dtype)


def _encode(bucket: Bucket, base: Bucket) -> Tensor | None:
    """Return the payload, or None if it would be as large as the bucket."""
    unit = UNITS[item_size(bucket.info)]
    new, old = bucket.data.view(unit), base.data.to(bucket.data.device).view(unit)
    places = (new != old).nonzero().view(-1)
    head = 4 * _blocks(new)
    split = head + 2 * len(places)
    nbytes = split + len(places) * new.itemsize
    if nbytes >= bucket.nbytes:
        return None
    payload = bucket.data.new_empty(nbytes)
    counts = torch.bincount(places // DELTA_BLOCK, minlength=head // 4)
    payload[:head] = counts.to(torch.int32).view(torch.uint8)
    # The conversion keeps the lower 16 bits.
    payload[head:split] = places.to(torch.int16).view(torch.uint8)
    payload[split:] = new[places].view(torch.uint8)
    return payload


def _blocks(units: Tensor) -> int:
    return -(-len(units) // DELTA_BLOCK)


def _contents(bucket: Bucket) -> tuple[list[Any], ...]:
    """Return the part of a manifest that must agree for one bucket to be a delta of another."""
    info = bucket.info
    return info.names, info.dtype_names, info.shapes, info.starts, info.numels


# --- adapters


def add(weight: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A, [out, in] in W's dtype, from A [rank, in] and B [out, rank], both float32.

    The sum over the rank is computed in float32, in order, with each product and each sum rounded separately (IEEE
    754). An element therefore has the same bits on any device and in any selection of rows and columns, which a matrix
    product does not guarantee.
    """
    rows = max(1, CACHED // max(1, weight.shape[1]) if weight.device.type == "cpu" else weight.shape[0])
    result = torch.empty_like(weight)
    for at in range(0, weight.shape[0], rows):
        part = slice(at, at + rows)
        total = high[part, :1] * low[0]
        product = torch.empty_like(total)
        for k in range(1, len(low)):
            total += torch.mul(high[part, k : k + 1], low[k], out=product)
        result[part] = total.mul_(scale).add_(weight[part])
    return result


def as_adapters(buckets: Iterable[Bucket], scale: float, base: str = "") -> list[Bucket]:
    """Mark buckets as holding matrices A and B, whose product counts ``scale`` times.

    ``base`` names the weights that engines loaded by themselves; without it the base is sent along.
    """
    return [replace(b, info=msgspec.structs.replace(b.info, kind="adapter", scale=scale, base=base)) for b in buckets]


def adapter_buckets(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the buckets that hold adapters, in order."""
    return [bucket for bucket in buckets if bucket.info.kind == "adapter"]


# A [rank, in] and B [out, rank] by the name of their layer.
Pairs = Mapping[str, tuple[Tensor, Tensor]]


def paired(named: Mapping[str, Tensor]) -> Pairs:
    """Return the adapters by layer. Raises WeightSyncError for an A without its B, or a B alone."""
    layers = sorted({name.removesuffix(LOW).removesuffix(HIGH) for name in named})
    if unpaired := named.keys() ^ {layer + ending for layer in layers for ending in (LOW, HIGH)}:
        raise WeightSyncError(f"adapters must come in pairs of A and B; unpaired: {', '.join(sorted(unpaired)[:4])}")
    return {layer: (named[layer + LOW], named[layer + HIGH]) for layer in layers}


class AdapterSum:
    """Adds adapters to the pieces of a base, on ``device``."""

    def __init__(self, pairs: Pairs, scale: float, device: torch.device) -> None:
        self._scale, self._device = scale, device
        self._pairs = {f"{layer}.weight": (low.to(device), high.to(device)) for layer, (low, high) in pairs.items()}
        self._unused = set(self._pairs)

    def __call__(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with their adapters added. Raises WeightSyncError for shapes that do not fit."""
        return [self._sum(piece) if piece.name in self._pairs else piece for piece in pieces]

    def require_all_used(self) -> None:
        """Raise WeightSyncError if the base had no weight for one of the adapters."""
        if self._unused:
            raise WeightSyncError(f"the base has no weights for adapters of {', '.join(sorted(self._unused)[:3])}")

    def _sum(self, piece: Piece) -> Piece:
        """Add an adapter to a piece, which is either whole rows or a part of one row."""
        low, high = self._pairs[piece.name]
        if piece.shape != (high.shape[0], low.shape[1]) or high.shape[1] != low.shape[0]:
            raise WeightSyncError(
                f"{piece.name} has shape {list(piece.shape)}, its adapter A {list(low.shape)} and B {list(high.shape)}"
            )
        row, column = divmod(piece.start, piece.shape[1])
        columns = min(piece.data.numel(), piece.shape[1])
        weight = piece.data.view(-1, columns).to(self._device)
        low, high = low[:, column : column + columns], high[row : row + len(weight)]
        self._unused.discard(piece.name)
        return Piece(piece.name, piece.shape, piece.start, add(weight, low, high, self._scale).view(-1))


# --- checksums


def checksum(data: Tensor) -> str:
    """Return the checksum of a tensor's bytes, uint8[nbytes], of the kind that is quickest on its device."""
    return _xxh3(data) if data.device.type == "cpu" else _hex(sums(data))


def checksum_like(expected: str, data: Tensor) -> str:
    """Return the checksum of ``data``, uint8[nbytes], of the same kind as ``expected``."""
    return _hex(sums(data)) if expected.startswith(SUMS) else _xxh3(data.cpu())


def sums(data: Tensor) -> Tensor:
    """Return both sums over the bytes of ``data``, uint8[nbytes], as int64[2] on its device, without waiting for it.

    The bytes are words x of 64 bits, in the machine's order, the last one filled up with zeros. A word in block b at
    place i counts as f(i) g(b) x in the first sum and as f(i) g(b) (x >> 32) in the second, without which changes in
    the upper bits of several words could cancel out. f and g are odd. The number of bytes is added to both.
    """
    whole = data.numel() // (8 * SUM_BLOCK)
    end = 8 * SUM_BLOCK * whole
    if data.storage_offset() % 8:
        data = data.clone()
    factors = _factors(SUM_BLOCK, 0, data.device)
    parts = [_block_sums(some, factors) for some in data[:end].view(torch.int64).view(whole, SUM_BLOCK).split(AT_ONCE)]
    rest = data.new_zeros(-(-(data.numel() - end) // 8) * 8)
    rest[: data.numel() - end] = data[end:]
    parts.append(_block_sums(rest.view(torch.int64)[None], factors[: rest.numel() // 8]))
    of_blocks = torch.cat(parts, dim=1)
    return (of_blocks * _factors(whole + 1, SUM_BLOCK, data.device)).sum(1) + data.numel()


def _block_sums(words: Tensor, factors: Tensor) -> Tensor:
    """Return both sums of each block, int64[2, blocks], of its words int64[blocks, n] times int64[n]."""
    return torch.stack([(words * factors).sum(1), ((words >> 32) * factors).sum(1)])


def _factors(count: int, first: int, device: torch.device) -> Tensor:
    """Return odd numbers that look random, int64[count]: outputs of SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = torch.arange(first + 1, first + 1 + count, device=device) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return (state ^ _shifted(state, 31)) | 1


def _shifted(words: Tensor, by: int) -> Tensor:
    """Return the words shifted to the right by this many bits, filled up with zeros."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _hex(both: Tensor) -> str:
    return SUMS + "".join(f"{value % (1 << 64):016x}" for value in both.tolist())


def _xxh3(data: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
