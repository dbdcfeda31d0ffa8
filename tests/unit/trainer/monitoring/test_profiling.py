"""Profiles of steps: those of the config and those that are asked for, and no others."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from rl_async.process.run_files import Phase
from rl_async.trainer import monitoring
from rl_async.trainer.monitoring import StepProfiler
from rl_async.trainer.profile_request import traces, write_request

PHASES: tuple[Phase, ...] = ("waiting for a batch", "training", "reporting")


def work(profiler: StepProfiler, step: int) -> None:
    for phase in PHASES:
        profiler.at(step, phase)
        if phase == "training":
            torch.ones(8, 8) @ torch.ones(8, 8)


def names(file: Path) -> set[str]:
    return {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


def steps(run: Path) -> list[str]:
    return sorted(file.name for file in traces(run))


def test_a_step_of_the_config_is_recorded_with_its_phases(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 1, [1, 3], "cpu")
    for step in range(4):
        work(profiler, step)
        assert len(traces(tmp_path)) == (step > 1), "it is there from the next step on"
    profiler.close()
    assert steps(tmp_path) == ["step-000001-rank1.json.gz", "step-000003-rank1.json.gz"]
    assert {*PHASES, "aten::mm"} <= names(min(traces(tmp_path)))


def test_without_steps_nothing_is_written(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 0, [], "cpu")
    work(profiler, 0)
    profiler.close()
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_answered_once_with_the_next_steps(tmp_path: Path) -> None:
    write_request(tmp_path, 1)  # of an earlier process
    profiler = StepProfiler(tmp_path, 0, [], "cpu")
    work(profiler, 4)
    assert steps(tmp_path) == []
    write_request(tmp_path, 2)
    for step in range(5, 9):
        work(profiler, step)
    assert steps(tmp_path) == ["step-000005-rank0.json.gz", "step-000006-rank0.json.gz"]
    write_request(tmp_path, 1)
    work(profiler, 9)
    profiler.close()
    assert steps(tmp_path)[2:] == ["step-000009-rank0.json.gz"]
    assert not [file for file in (tmp_path / "profiles").iterdir() if file.name.startswith(".")]


class FakeDevice:
    """What torch.cuda offers, noting the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory = self.nvtx = self

    def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
        self.calls.append(f"record {enabled}")

    def _dump_snapshot(self, file: str) -> None:
        self.calls.append("dump")
        Path(file).write_bytes(b"allocations")

    def range_push(self, name: str) -> None:
        self.calls.append(f"push {name}")

    def range_pop(self) -> None:
        self.calls.append("pop")


def test_on_a_device_allocations_are_written_and_phases_are_ranges_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"cuda": device}[name])
    monkeypatch.setattr(monitoring, "supported_activities", lambda: {ProfilerActivity.CPU})
    profiler = StepProfiler(tmp_path, 0, [1], "cuda")
    ranges = [call for phase in PHASES for call in (f"push {phase}", "pop")]
    for step in range(3):
        work(profiler, step)
    profiler.close()
    assert device.calls == [*ranges, "record all", *ranges, "dump", "record None", *ranges]
    assert steps(tmp_path) == ["step-000001-rank0.json.gz"]
    assert (tmp_path / "profiles" / "step-000001-rank0.memory.pickle").read_bytes() == b"allocations"
    assert set(PHASES) <= names(min(traces(tmp_path)))
