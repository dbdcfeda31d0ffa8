from pathlib import Path

import pytest
import torch

from rl_async.accelerators import (
    ACCELERATORS,
    Accelerator,
    accelerator_here,
    backends_of,
    collectives_of,
    count_gpus,
    select_devices,
)
from rl_async.errors import UserError
from rl_async.torch_shared import pick_device

NODES = {"NVIDIA": "nvidia{}", "AMD": "dri/renderD{}", "Ascend": "davinci{}"}


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=[one.make for one in ACCELERATORS])
def test_each_make_is_found_counted_and_selected(accelerator: object, tmp_path: Path) -> None:
    one = next(one for one in ACCELERATORS if one == accelerator)
    (tmp_path / "dri").mkdir()
    for index in range(3):
        (tmp_path / NODES[one.make].format(index)).touch()
    (tmp_path / one.driver).touch()
    assert accelerator_here(tmp_path) == one
    assert count_gpus({}, tmp_path) == 3
    assert count_gpus({one.visible: "0,2"}, tmp_path) == 2
    assert select_devices([0, 2], tmp_path) == {one.visible: "0,2"}


def test_a_display_is_no_accelerator(tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert count_gpus({}, tmp_path) == 0


def test_collectives_are_those_that_torch_uses_by_itself() -> None:
    assert collectives_of("cuda") == torch.distributed.Backend.default_device_backend_map["cuda"]
    with pytest.raises(UserError, match="tpu"):
        collectives_of("tpu")


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=[one.make for one in ACCELERATORS])
def test_groups_use_the_collectives_of_the_make_and_gloo_on_the_host(accelerator: Accelerator) -> None:
    assert backends_of("cpu") == "gloo"
    parts = dict(part.split(":") for part in backends_of(accelerator.torch_device).split(","))
    assert parts == {"cpu": "gloo", accelerator.torch_device: accelerator.collectives}
    assert (
        accelerator.interface == {"nccl": "NCCL_SOCKET_IFNAME", "hccl": "HCCL_SOCKET_IFNAME"}[accelerator.collectives]
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_here() -> None:
    assert pick_device("auto") == pick_device("cpu") == "cpu"
    with pytest.raises(UserError):
        pick_device("gpu")
