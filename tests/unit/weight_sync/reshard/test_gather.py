"""Gathering on one rank; tests/contracts/backends/test_backend.py has several, over gloo."""

import pytest
import torch
from torch.distributed import HashStore

from rl_async.errors import RanksLost
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.layout import Layout, TensorSpec, fsdp2
from rl_async.weight_sync.reshard import Gathering, ShardedWeights, SharedMemoryWire, one_box_each
from tests.support.buckets import make_buckets

SPECS = {"a": TensorSpec((5, 3)), "b": TensorSpec((4,)), "c": TensorSpec((7, 2, 3))}


def same(some: list[Bucket], others: list[Bucket]) -> bool:
    return [bucket.info for bucket in some] == [bucket.info for bucket in others]


def gathering(rank: int = 0) -> Gathering:
    return Gathering(SharedMemoryWire(HashStore(), rank), rank, 64, 0.2)


def parts(layout: Layout, scale: float) -> ShardedWeights:
    tensors = {
        name: torch.arange(torch.Size(spec.shape).numel()).view(spec.shape) * scale for name, spec in SPECS.items()
    }
    return ShardedWeights(layout, one_box_each(layout, 0, tensors))


def test_one_rank_fills_its_buckets_with_what_it_holds_now() -> None:
    layout, gather = fsdp2(SPECS, 1), gathering()
    for scale in (1.0, 2.0):  # checksums tell the two apart; the plan is the same
        held = parts(layout, scale)
        whole = [(name, held.held[name, box].bfloat16()) for name, box in layout.held(0)]
        assert same(gather.buckets(held), make_buckets(whole, 64))


def test_another_layout_gets_another_plan() -> None:
    gather, other = gathering(), fsdp2({"a": TensorSpec((2, 3))}, 1)
    gather.buckets(parts(fsdp2(SPECS, 1), 1.0))
    ((key, tensor),) = held = [(("a", box), torch.randn(2, 3)) for _, box in other.held(0)]
    assert same(gather.buckets(ShardedWeights(other, dict(held))), make_buckets([(key[0], tensor.bfloat16())], 64))


def test_a_rank_that_never_comes_is_named() -> None:
    layout = fsdp2({"a": TensorSpec((2, 8))}, 2)
    held = ShardedWeights(layout, {("a", box): torch.zeros(1, 8) for _, box in layout.held(0)})
    with pytest.raises(RanksLost, match="rank 0 lost rank 1"):
        gathering().buckets(held)
