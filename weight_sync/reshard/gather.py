"""Whole weights in the buckets of one rank, out of what all ranks hold: a reshard into that rank's host memory.

Each rank sends what it holds and the gatherer does not, once, in the type in which weights travel; no other rank ever
has a whole tensor.
"""

from typing import NamedTuple

from rl_async.weight_sync.buckets.buckets import Bucket, allocate_buckets, divide
from rl_async.weight_sync.layout import Box, Layout, shards_of
from rl_async.weight_sync.reshard.execute import LocalShards, reshard
from rl_async.weight_sync.reshard.plan import ReshardPlan, plan
from rl_async.weight_sync.reshard.wire import Wire

GATHERER = 0  # the rank that speaks to the engines


class ShardedWeights(NamedTuple):
    """What all ranks hold of the weights, and what this one does. The same ``layout`` object every time."""

    layout: Layout
    held: LocalShards


class Gathering:
    """Gathers parts of one layout after another; a plan is made once per layout. All ranks call it alike."""

    def __init__(self, wire: Wire, rank: int, bucket_bytes: int, timeout_s: float) -> None:
        self._wire, self._rank, self._bucket_bytes, self._timeout_s = wire, rank, bucket_bytes, timeout_s
        self._plan: ReshardPlan | None = None

    def buckets(self, parts: ShardedWeights) -> list[Bucket]:
        """All weights in buckets of at most ``bucket_bytes``, on the gatherer; nothing on other ranks.

        Raises RanksLost if a rank is gone or does not come within ``timeout_s``.
        """
        if self._plan is None or self._plan.source is not parts.layout:
            self._plan = plan(parts.layout, _target(parts.layout, self._bucket_bytes), self._bucket_bytes)
        rooms = allocate_buckets(parts.layout.tensors, self._bucket_bytes) if self._rank == GATHERER else []
        places = {(name, box): place for room in rooms for name, box, place in room.boxes}
        reshard(self._plan, self._rank, parts.held, places, self._wire, self._timeout_s)
        return [room.seal() for room in rooms]


def _target(source: Layout, bucket_bytes: int) -> Layout:
    boxes: dict[str, list[Box]] = {name: [] for name in source.tensors}
    for bucket in divide(source.tensors, bucket_bytes):
        for part in bucket:
            boxes[part.name].append(part.box)
    return Layout(source.tensors, {name: shards_of((GATHERER, box) for box in found) for name, found in boxes.items()})
