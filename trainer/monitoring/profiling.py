"""Profiles steps of a rank with torch.profiler: those of the config, and those that ``rl-async profile`` asks for.

RUN/profiles/step-000010-rank0.json.gz        what ran when, for https://ui.perfetto.dev
RUN/profiles/step-000010-rank0.memory.pickle  every allocation on a CUDA device, for https://pytorch.org/memory_viz
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from rl_async.trainer.monitoring.profile_request import read_request, trace_file

ALLOCATIONS = 1 << 20  # kept of a step

log = logging.getLogger("rl_async.trainer")


class StepProfiler:
    """Records the wanted steps of one rank, with the phases of a step as ranges, which nsys shows too (NVTX).

    A request that was there before this process is not its own.
    """

    def __init__(self, run: Path, rank: int, steps: Collection[int], device: str) -> None:
        self._run, self._rank, self._steps = run, rank, frozenset(steps)
        self._device: Any = None if device == "cpu" else torch.get_device_module(device)
        self._nvtx = getattr(self._device, "nvtx", None)
        request = read_request(run)
        self._answered = request.id if request else ""
        self._requested = 0  # steps that are still to be profiled
        self._step = -1
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._in_phase = False

    def at(self, step: int, phase: str) -> None:
        """Begin a phase. With the first of a step, write the profile of the last one, and begin one if it is wanted."""
        self._leave_phase()
        if step != self._step:
            self._finish()
            self._step = step
            if self._wanted():
                self._begin()
        self._enter_phase(phase)

    def close(self) -> None:
        """Write the profile of the last step."""
        self._leave_phase()
        self._finish()

    def _wanted(self) -> bool:
        request = read_request(self._run)
        if request is not None and request.id != self._answered:
            self._answered, self._requested = request.id, request.steps
        if self._requested:
            self._requested -= 1
            return True
        return self._step in self._steps

    def _begin(self) -> None:
        trace_file(self._run, self._step, self._rank).parent.mkdir(exist_ok=True)
        if self._device is not None:
            self._device.memory._record_memory_history(max_entries=ALLOCATIONS)
        self._profile = profile(activities=supported_activities() if self._device else [ProfilerActivity.CPU])
        self._profile.start()

    def _finish(self) -> None:
        if self._profile is None:
            return
        done, self._profile = self._profile, None
        done.stop()
        file = trace_file(self._run, self._step, self._rank)
        if self._device is not None:
            self._device.memory._dump_snapshot(str(file).removesuffix(".json.gz") + ".memory.pickle")
            self._device.memory._record_memory_history(enabled=None)
        unfinished = file.with_name(f".{file.name}")  # PyTorch compresses by the end of the name
        done.export_chrome_trace(str(unfinished))
        unfinished.replace(file)
        log.info("profile of step %d: %s", self._step, file)

    def _enter_phase(self, phase: str) -> None:
        if self._nvtx is not None:
            self._nvtx.range_push(phase)
        if self._profile is not None:
            self._range = record_function(phase)
            self._range.__enter__()
        self._in_phase = True

    def _leave_phase(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._nvtx is not None and self._in_phase:
            self._nvtx.range_pop()
        self._in_phase = False
