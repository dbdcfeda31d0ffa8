"""What a rank measures of its memory, and says when it is more than planned."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_async.errors import OutOfMemory
from rl_async.process.run_files import DeviceBudget, Holder, Stage
from rl_async.trainer.monitoring import STAGES, DeviceMeter, HostMeter, MemoryWatch

MIB = 1 << 20


def budget(**limits: int) -> tuple[DeviceBudget, Holder]:
    stages: dict[Stage, dict[str, int]] = {
        stage: {"runtime": 1, "activations": limits.get(stage, 1 << 40)} for stage in STAGES
    }
    holder = Holder("trainer-0", "trainer", stages)  # type: ignore[arg-type]
    return DeviceBudget("cpu", None, None, (holder,)), holder


def fill(mib: int) -> None:
    np.ones(mib * MIB, dtype=np.uint8)


def test_a_peak_is_that_since_the_reset() -> None:
    meter = HostMeter()
    meter.reset()
    before = meter.peak()
    fill(300)
    assert meter.peak() - before > 250 * MIB
    meter.reset()
    assert abs(meter.peak() - before) < 50 * MIB


def test_a_peak_that_cannot_be_forgotten_is_no_error(tmp_path: Path) -> None:
    HostMeter(tmp_path / "hidden").reset()


def test_a_device_that_changes_hands_does_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 100 bytes: the trainer has 60 at most and goes, then an engine has 70."""
    own = most = others = 0
    for name, value in {
        "get_memory_info": lambda device: (100 - own - others, 100),
        "memory_reserved": lambda device: own,
        "max_memory_reserved": lambda device: most,
        "reset_peak_memory_stats": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    meter = DeviceMeter("cuda:0")
    own, most, others = 50, 50, 5
    meter.reset()
    most, others = 60, 10
    assert meter.peak() == 70, "both are there"
    own, others = 2, 70
    assert meter.peak() == 65


@pytest.mark.usefixtures("one_rank")
def test_each_stage_has_its_own_peak() -> None:
    watch = MemoryWatch("cpu", budget(train=7))
    watch.at("waiting for a batch")
    watch.at("training")
    fill(300)
    watch.at("publishing")
    watch.at("reporting")
    found = watch.metrics()
    assert found["memory/train_peak_bytes"] - found["memory/rollout_peak_bytes"] > 250 * MIB
    assert found["memory/train_peak_bytes"] - found["memory/gather_peak_bytes"] > 250 * MIB
    assert found["memory/train_budget_bytes"] == 8
    assert found["memory/host_peak_bytes"] >= found["memory/train_peak_bytes"]
    watch.at("waiting for a batch")
    assert watch.metrics()["memory/train_peak_bytes"] == 0, "of this step"


@pytest.mark.usefixtures("one_rank")
def test_without_a_budget_there_are_only_peaks() -> None:
    watch = MemoryWatch("cpu", None)
    watch.at("waiting for a batch")
    found = watch.metrics()
    assert found["memory/rollout_peak_bytes"] > MIB and not [name for name in found if name.endswith("budget_bytes")]


def test_more_than_planned_is_told_once_with_stage_and_key(caplog: pytest.LogCaptureFixture) -> None:
    watch = MemoryWatch("cpu", budget(train=MIB))
    with caplog.at_level(logging.WARNING, "rl_async.trainer"):
        for _ in range(2):
            watch.at("waiting for a batch")
            watch.at("training")
            watch.at("publishing")
    [warning] = caplog.messages
    assert "'train'" in warning and "trainer.max_tokens_per_microbatch" in warning


def test_a_failed_allocation_is_explained_and_nothing_else() -> None:
    watch = MemoryWatch("cpu", budget(train=MIB))
    watch.at("training")
    with pytest.raises(OutOfMemory, match=r"'train'.*trainer\.max_tokens_per_microbatch"), watch.explained():
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(OutOfMemory, match="No budget"), MemoryWatch("cpu", None).explained():
        np.empty(1 << 50, dtype=np.uint8)
    with pytest.raises(RuntimeError, match="shape"), watch.explained():
        torch.ones(2).view(3)
