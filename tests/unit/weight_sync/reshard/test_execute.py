"""One rank's side of a reshard; between processes it is tested in tests/contracts/weights/test_reshard.py."""

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.layout import Box, TensorSpec, fsdp2
from rl_async.weight_sync.reshard import SharedMemoryWire, plan, reshard

NAMED = {"t": TensorSpec((4, 2), "bfloat16")}
WHOLE: Box = ((0, 4), (0, 2))


def held(tensor: Tensor, box: Box = WHOLE) -> dict[tuple[str, Box], Tensor]:
    return {("t", box): tensor}


def test_what_a_rank_has_already_is_copied_and_converted() -> None:
    layout = fsdp2(NAMED, 1)
    source, target = torch.randn(4, 2), torch.zeros(4, 2, dtype=torch.bfloat16)
    done = reshard(plan(layout, layout, 64), 0, held(source), held(target), SharedMemoryWire(HashStore(), 0), 5)
    assert torch.equal(target, source.bfloat16())
    assert done == (0, 0, 16, 0)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ({}, held(torch.zeros(4, 2)), r"source of rank 0.* t\b"),
        (held(torch.zeros(4, 2)), held(torch.zeros(2, 4)), r"target of rank 0.*\(2, 4\)"),
        (held(torch.zeros(4, 2), ((0, 4), (0, 1))), held(torch.zeros(4, 2)), "source of rank 0"),
    ],
)
def test_a_holding_that_is_not_the_layouts_is_refused(
    source: dict[tuple[str, Box], Tensor], target: dict[tuple[str, Box], Tensor], message: str
) -> None:
    layout = fsdp2(NAMED, 1)
    with pytest.raises(WeightSyncError, match=message):
        reshard(plan(layout, layout, 64), 0, source, target, SharedMemoryWire(HashStore(), 0), 5)


def test_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    made = plan(fsdp2(NAMED, 1).placed([3]), fsdp2(NAMED, 1), 64)
    with pytest.raises(WeightSyncError, match="rank 0 lost rank 3"):
        reshard(made, 0, {}, held(torch.zeros(4, 2, dtype=torch.bfloat16)), SharedMemoryWire(HashStore(), 0), 0.2)
