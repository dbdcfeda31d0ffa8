"""Named tensors as flat byte buffers of bounded size, and back.

A bucket concatenates the bytes of its tensors in order; each offset is rounded up to the tensor's item size. Both
sides compute the offsets from the manifest's dtypes and shapes alone. A tensor larger than the bound gets a bucket of
its own.
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

    Only one bucket is built at a time, so a consumer that sends each at once needs the memory of one.
    """
    if max_bytes < 1:
        raise ValueError(f"a bucket needs at least one byte, not {max_bytes}")
    waiting: list[tuple[str, Tensor]] = []
    end = 0
    for name, tensor in parameters:
        extended = _aligned(end, tensor.dtype) + tensor.nbytes
        if waiting and extended > max_bytes:
            yield _fill(waiting)
            waiting, extended = [], tensor.nbytes
        waiting.append((name, tensor))
        end = extended
    if waiting:
        yield _fill(waiting)


def unpack(data: Tensor, info: UpdateInfo) -> list[tuple[str, Tensor]]:
    """Views of ``data`` (uint8[nbytes]) by name.

    Raises WeightSyncError if the manifest is malformed or does not cover exactly these bytes.
    """
    if not len(info.names) == len(info.dtype_names) == len(info.shapes):
        raise WeightSyncError(
            f"manifest with {len(info.names)} names, {len(info.dtype_names)} dtypes and {len(info.shapes)} shapes"
        )
    dtypes = [_dtype(name) for name in info.dtype_names]
    offsets, total = _layout(dtypes, info.shapes)
    if data.numel() != total:
        raise WeightSyncError(f"the bucket has {data.numel()} bytes, its manifest {total}")
    return [
        (name, data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        for name, dtype, shape, start in zip(info.names, dtypes, info.shapes, offsets)
    ]


def manifest_bytes(info: UpdateInfo) -> int:
    """Size of the bucket that ``info`` describes. Raises WeightSyncError for an unknown dtype."""
    return _layout([_dtype(name) for name in info.dtype_names], info.shapes)[1]


def checksum(data: Tensor) -> str:
    """xxh3_128 of a host tensor's bytes (uint8[nbytes], contiguous), in hex."""
    return xxhash.xxh3_128_hexdigest(data.numpy().data)


def verify(data: Tensor, info: UpdateInfo) -> None:
    """Raise WeightSyncError unless the bytes are those that were packed."""
    found = checksum(data)
    if found != info.checksum:
        raise WeightSyncError(f"checksum of the bucket from {info.names[0]!r} on is {found}, expected {info.checksum}")


def _fill(parameters: Sequence[tuple[str, Tensor]]) -> Bucket:
    dtypes = [tensor.dtype for _, tensor in parameters]
    shapes = [list(tensor.shape) for _, tensor in parameters]
    offsets, total = _layout(dtypes, shapes)
    data = torch.zeros(total, dtype=torch.uint8)  # the padding is part of the checksum
    for (_, tensor), start in zip(parameters, offsets):
        data[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    info = UpdateInfo(
        names=[name for name, _ in parameters],
        dtype_names=[str(dtype).removeprefix("torch.") for dtype in dtypes],
        shapes=shapes,
        checksum=checksum(data),
    )
    return Bucket(data=data, info=info)


def _layout(dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Offset of each tensor, and the size of the bucket: at least one byte, since transports refuse none."""
    offsets, end = [], 0
    for dtype, shape in zip(dtypes, shapes):
        start = _aligned(end, dtype)
        offsets.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    return offsets, max(end, 1)


def _aligned(offset: int, dtype: torch.dtype) -> int:
    return -(-offset // dtype.itemsize) * dtype.itemsize


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"unknown dtype {name!r} in a manifest")
    return dtype
