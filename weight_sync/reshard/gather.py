"""Gathers the weights of all ranks into the buckets of one: a reshard into that rank's memory, of host or device.

Each rank sends once what it holds and the gathering rank does not, in the type in which weights are sent. No other rank
ever holds a whole tensor.
"""

from typing import NamedTuple

from rl_async.weight_sync.buckets.buckets import Bucket, allocate_buckets, divide
from rl_async.weight_sync.layout import Box, Layout, shards_of
from rl_async.weight_sync.reshard.execute import LocalShards, reshard
from rl_async.weight_sync.reshard.plan import ReshardPlan, plan
from rl_async.weight_sync.reshard.wire import Wire

GATHERER = 0  # the rank that talks to the engines


class ShardedWeights(NamedTuple):
    """This rank's shards of the weights, and the layout over all ranks, which is the same object every time."""

    layout: Layout
    held: LocalShards


class Gathering:
    """Gathers weights into buckets on ``device`` and keeps the plan while the layout stays the same. All ranks call it
    alike.
    """

    def __init__(self, wire: Wire, rank: int, bucket_bytes: int, timeout_s: float, device: str = "cpu") -> None:
        self._wire, self._rank, self._bucket_bytes, self._timeout_s = wire, rank, bucket_bytes, timeout_s
        self._device = device
        self._plan: ReshardPlan | None = None

    def buckets(self, weights: ShardedWeights) -> list[Bucket]:
        """Return all weights in buckets of at most ``bucket_bytes`` on the gathering rank, an empty list on others.

        Raises RanksLost if a rank is gone or does not take part within ``timeout_s``.
        """
        if self._plan is None or self._plan.source is not weights.layout:
            self._plan = plan(weights.layout, _target(weights.layout, self._bucket_bytes), self._bucket_bytes)
        mine = weights.layout.tensors if self._rank == GATHERER else {}
        empty = allocate_buckets(mine, self._bucket_bytes, self._device)
        places = {(name, box): place for bucket in empty for name, box, place in bucket.boxes}
        reshard(self._plan, self._rank, weights.held, places, self._wire, self._timeout_s)
        return [bucket.seal() for bucket in empty]


def _target(source: Layout, bucket_bytes: int) -> Layout:
    boxes: dict[str, list[Box]] = {name: [] for name in source.tensors}
    for bucket in divide(source.tensors, bucket_bytes):
        for part in bucket:
            boxes[part.name].append(part.box)
    return Layout(source.tensors, {name: shards_of((GATHERER, box) for box in found) for name, found in boxes.items()})
