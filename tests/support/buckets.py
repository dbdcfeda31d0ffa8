"""Buckets made of whole tensors, as a trainer on one rank would send them."""

from collections.abc import Iterable

from torch import Tensor

from rl_async.weight_sync.buckets import Bucket, allocate_buckets, dtype_name
from rl_async.weight_sync.layout import TensorSpec, slices, whole


def make_buckets(parameters: Iterable[tuple[str, Tensor]], max_bytes: int) -> list[Bucket]:
    """Copy whole tensors, from any device, into buckets of at most ``max_bytes``."""
    tensors = dict(parameters)
    specs = {name: TensorSpec(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
    buckets = allocate_buckets(specs, max_bytes)
    for bucket in buckets:
        for name, box, place in bucket.boxes:
            place.copy_(tensors[name].detach()[slices(box, whole(tensors[name].shape))])
    return [bucket.seal() for bucket in buckets]
