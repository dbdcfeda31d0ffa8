"""Encodes the difference between two versions of a bucket in fewer bytes than the bucket has.

The two are compared bitwise in units of the bucket's smallest item size. The payload has the number of changed units in
each block of 2^16 (uint32), then the position of each changed unit in its block (uint16), then their new values: two
bytes and one item per changed element. The encoding is lossless, for NaNs and negative zeros too.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Bucket, item_size
from rl_async.weight_sync.protocol import UpdateInfo

BLOCK = 1 << 16
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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
        yield Bucket(data=payload, info=info)


def apply_delta(payload: Tensor, data: Tensor, info: UpdateInfo) -> None:
    """Turn ``data``, the base as uint8[nbytes], in place into the new bucket; ``payload`` is uint8[payload_bytes].

    Raises WeightSyncError for a payload that does not fit the bucket. The caller verifies the result.
    """
    unit = UNITS[item_size(info)]
    units = data.numpy().view(unit)
    raw = payload.numpy()
    head = 4 * math.ceil(len(units) / BLOCK)
    counts = raw[:head].view(np.uint32) if len(raw) >= head else np.zeros(0, np.uint32)
    changed = int(counts.sum())
    if len(counts) * 4 != head or len(raw) != head + changed * (2 + units.itemsize):
        raise WeightSyncError(f"a delta of {len(raw)} bytes does not fit the bucket from {info.names[0]!r} on")
    places = raw[head : head + 2 * changed].view(np.uint16).astype(np.int64)
    places += np.repeat(np.arange(len(counts), dtype=np.int64) * BLOCK, counts)
    if changed and places.max() >= len(units):
        raise WeightSyncError(f"a delta changes positions beyond the end of the bucket from {info.names[0]!r} on")
    units[places] = raw[head + 2 * changed :].view(unit)


def _encode(bucket: Bucket, base: Bucket) -> Tensor | None:
    """Return the payload, or None if it would be as large as the bucket."""
    unit = UNITS[item_size(bucket.info)]
    new, old = bucket.data.numpy().view(unit), base.data.numpy().view(unit)
    places = np.flatnonzero(new != old)
    head = 4 * math.ceil(len(new) / BLOCK)
    split = head + 2 * len(places)
    payload = np.empty(split + len(places) * new.itemsize, np.uint8)
    if len(payload) >= bucket.nbytes:
        return None
    payload[:head].view(np.uint32)[:] = np.bincount(places // BLOCK, minlength=head // 4)
    payload[head:split].view(np.uint16)[:] = places % BLOCK
    payload[split:].view(unit)[:] = new[places]
    return torch.from_numpy(payload)


def _alike(one: UpdateInfo, other: UpdateInfo) -> bool:
    return (one.names, one.dtype_names, one.shapes, one.starts, one.numels) == (
        other.names,
        other.dtype_names,
        other.shapes,
        other.starts,
        other.numels,
    )
