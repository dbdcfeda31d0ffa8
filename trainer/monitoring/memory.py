"""Measures a rank's memory by stage of a step, compares it with the run's budget, and explains its end for want of it.

On a GPU the device is measured, with what engines hold of it; on a CPU this process alone.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, get_args

import torch
import torch.distributed as dist

from rl_async.errors import OutOfMemory
from rl_async.process.run_files import DeviceBudget, Holder, Phase, Stage
from rl_async.torch_shared import is_out_of_memory

STAGES: tuple[Stage, ...] = get_args(Stage)
STAGE_OF: Mapping[Phase, Stage] = {
    "starting": "start",
    "waiting for a batch": "rollout",
    "training": "train",
    "meeting the ranks": "train",
    "publishing": "gather",
}
log = logging.getLogger("rl_async.trainer")


class Meter(Protocol):
    """Measures bytes."""

    def peak(self) -> int:
        """Return the peak since the last ``reset``, of what the budget is compared with."""
        ...

    def reset(self) -> None:
        """Forget what was before."""
        ...


class HostMeter:
    """Resident memory of this process, by Linux's ``/proc``."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def peak(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", (self._proc / "status").read_text())
        return int(found[1]) << 10 if found else 0

    def reset(self) -> None:
        with suppress(OSError):  # a container may hide it, or forbid it: then the peak is that since the start
            (self._proc / "clear_refs").write_text("5")


class DeviceMeter:
    """Memory of a device that is taken, by whichever process: this one's peak, and what others have when asked.

    If this one has given memory back since the reset, others may have taken it; then what they had at the reset counts.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._own_then = self._others_then = 0  # at the reset

    def peak(self) -> int:
        own, others = self._taken()
        given_back = own < self._own_then
        return torch.accelerator.max_memory_reserved(self._device) + (self._others_then if given_back else others)

    def reset(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._own_then, self._others_then = self._taken()

    def _taken(self) -> tuple[int, int]:
        """Return the bytes that this process and that all others have."""
        free, total = torch.accelerator.get_memory_info(self._device)
        own = torch.accelerator.memory_reserved(self._device)
        return own, total - free - own


class MemoryWatch:
    """Follows a rank through the stages of its steps.

    ``budget``: of its device and its own; None: none was planned.
    """

    def __init__(self, device: str, budget: tuple[DeviceBudget, Holder] | None) -> None:
        on_gpu = device != "cpu"
        self._host = HostMeter()
        self._device = device
        self._meter: Meter = DeviceMeter(device) if on_gpu else self._host
        self._budget, self._limits = budget, dict.fromkeys(STAGES, 0)
        if budget is not None:
            whose = budget[0] if on_gpu else budget[1]
            self._limits = {stage: whose.total(stage) for stage in STAGES}
        self.stage: Stage = "start"
        self._phase: Phase = "starting"
        self._peaks: dict[Stage, int] = {}
        self._host_peak = self._allocated_peak = 0
        self._warned: set[Stage] = set()

    def at(self, phase: Phase) -> None:
        """End the phase before this one, and count its peak for its stage."""
        self._read()
        self._phase, self.stage = phase, STAGE_OF.get(phase, self.stage)

    def metrics(self) -> dict[str, float]:
        """Return the peaks of the last step, of the rank that had most, with what was planned. A collective."""
        self._read()
        stages: tuple[Stage, ...] = ("rollout", "train", "gather")
        numbers = [self._host_peak, self._allocated_peak]
        numbers += [self._peaks.get(stage, 0) for stage in stages] + [self._limits[stage] for stage in stages]
        found = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        host, allocated, *rest = found.tolist()
        metrics = {"memory/host_peak_bytes": host}
        if self._device != "cpu":
            metrics["memory/device_peak_bytes"] = allocated
        for stage, peak, limit in zip(stages, rest[:3], rest[3:], strict=True):
            metrics[f"memory/{stage}_peak_bytes"] = peak
            if limit:
                metrics[f"memory/{stage}_budget_bytes"] = limit
        self._peaks, self._allocated_peak = {}, 0
        return metrics

    def _read(self) -> None:
        self._host_peak = max(self._host_peak, self._host.peak())
        peak = self._meter.peak()
        if self._device != "cpu":
            allocated = torch.accelerator.max_memory_allocated(self._device)
            self._allocated_peak = max(self._allocated_peak, allocated)
        self._meter.reset()
        if self._phase not in STAGE_OF:
            return
        self._peaks[self.stage] = max(self._peaks.get(self.stage, 0), peak)
        if self._budget is not None and peak > self._limits[self.stage] and self.stage not in self._warned:
            self._warned.add(self.stage)
            log.warning("memory: stage '%s' took %s. %s", self.stage, _gib(peak), self._planned())

    def _planned(self) -> str:
        """What was planned for this stage, and what to do if it does not suffice."""
        if self._budget is None:
            return "No budget was planned, since the size of model.path was unknown."
        device, mine = self._budget
        holders = device.holders if self._device != "cpu" else (mine,)
        needs = "; ".join(
            f"{holder.process} {_gib(holder.total(self.stage))}, {holder.remedy(self.stage)}" for holder in holders
        )
        return f"Planned was {_gib(self._limits[self.stage])} ({needs}). See docs/how-to/memory.md"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise OutOfMemory, with the stage and what was planned for it, where the block ends for want of memory."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            first = str(error).strip().partition("\n")[0]
            raise OutOfMemory(
                f"{self._device} is out of memory in stage '{self.stage}' of a step: {first}. {self._planned()}"
            ) from error


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
