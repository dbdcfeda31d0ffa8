"""Which process groups carry weights from device to device."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rl_async.accelerators import ACCELERATORS, Accelerator
from rl_async.errors import WeightSyncError
from rl_async.weight_sync.transports.process_groups import device_groups


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=[one.make for one in ACCELERATORS])
def test_groups_are_of_the_collectives_of_this_accelerator(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, name = type("Groups", (), {}), f"ProcessGroup{accelerator.collectives.upper()}"
    here = SimpleNamespace(type=accelerator.torch_device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: here)
    monkeypatch.setattr(dist, name, groups, raising=False)
    assert device_groups() is groups
    monkeypatch.delattr(dist, name)
    with pytest.raises(WeightSyncError, match=r"weight_sync\.transport=nccl"):
        device_groups()
