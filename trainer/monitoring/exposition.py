"""What a trainer rank tells Prometheus: its step and phase, its device's memory, and the metrics of steps."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from prometheus_client.core import GaugeMetricFamily, Metric

from rl_async.process.http_server import by_label, gauge
from rl_async.process.run_files import PHASES, read_beats


class RankCollector:
    """Rank ``rank`` of the run in ``folder``. ``latest`` returns the newest value of each metric, none without any."""

    def __init__(self, folder: Path, rank: int, latest: Callable[[], Mapping[str, float]]) -> None:
        self._folder, self._rank, self._latest = folder, rank, latest

    def collect(self) -> Iterator[Metric]:
        """Yield them as they are now. The step and the phase are those of the rank's heartbeat."""
        for beat in read_beats(self._folder):
            if beat.rank == self._rank:
                yield gauge("rl_async_trainer_step", "Step that the rank works on, from 0.", beat.step)
                now = {phase: float(phase == beat.phase) for phase in PHASES}
                yield by_label("phase", "rl_async_trainer_phase", "1 for the phase that the rank is in.", now)
                yield gauge("rl_async_trainer_phase_seconds", "Time in that phase.", time.time() - beat.since)
        if torch.accelerator.is_available():
            in_tensors = torch.accelerator.memory_allocated()
            yield gauge("rl_async_trainer_device_bytes", "Device memory in tensors.", in_tensors)
        step = GaugeMetricFamily("rl_async_step", "Newest value of each metric of steps.", labels=["metric"])
        for name, value in self._latest().items():
            step.add_metric([name], float(value))
        yield step
