"""Encodes the difference between two versions of a bucket in fewer bytes than the bucket has.

The two are compared bitwise in units of the bucket's smallest item size. The payload has the number of changed units in
each block of 2^16 (uint32), then the position of each changed unit in its block (uint16), then their new values: two
bytes and one item per changed element. The encoding is lossless, for NaNs and negative zeros too, and is done on the
device where the buckets are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Bucket, item_size
from rl_async.weight_sync.protocol import UpdateInfo

BLOCK = 1 << 16
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def deltas(buckets: Sequence[Bucket], base: Sequence[Bucket], base_version: str) -> Iterator[Bucket]:
    """Yield each bucket as a delta against the one at its position in ``base``, or whole if a delta is not smaller.

    The checksum remains that of the whole bucket, so the receiver verifies the decoded bytes, not the payload.
    """
    for index, bucket in enumerate(buckets):
        old = base[index] if index < len(base) else None
        payload = _encode(bucket, old) if old is not None and _alike(bucket.info, old.info) else None
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
    starts = torch.arange(len(counts), device=data.device) * BLOCK
    places = payload[head:split].view(torch.int16).long() & 0xFFFF
    places += torch.repeat_interleave(starts, counts, output_size=changed)
    if changed and int(places.max()) >= len(units):
        raise WeightSyncError(f"a delta changes positions beyond the end of the bucket from {info.names[0]!r} on")
    units[places] = payload[split:].clone().view(units.dtype)  # a copy, since a view would have to be aligned


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
    counts = torch.bincount(places // BLOCK, minlength=head // 4)
    payload[:head] = counts.to(torch.int32).view(torch.uint8)
    payload[head:split] = places.to(torch.int16).view(torch.uint8)  # keeps the lower 16 bits
    payload[split:] = new[places].view(torch.uint8)
    return payload


def _blocks(units: Tensor) -> int:
    return -(-len(units) // BLOCK)


def _alike(one: UpdateInfo, other: UpdateInfo) -> bool:
    return (one.names, one.dtype_names, one.shapes, one.starts, one.numels) == (
        other.names,
        other.dtype_names,
        other.shapes,
        other.starts,
        other.numels,
    )
