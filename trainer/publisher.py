"""From what each rank holds of the weights to engines that confirmed a version.

Rank 0 gathers; all ranks take part. How training and generation share devices is the phase's business
(``weight_sync.phases``).
"""

from typing import Protocol

import torch.distributed as dist

from rl_async.messages import Version
from rl_async.trainer.backend import Backend
from rl_async.weight_sync.gather import Gathering
from rl_async.weight_sync.phases import Phase


class Publisher(Protocol):
    """Gives weights to engines. All ranks call it alike."""

    def before_train(self) -> None:
        """Returns when this rank may use its device for training."""
        ...

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """Gather, send, wait until the engines confirm. Returns the sync's metrics."""
        ...


class EnginePublisher:
    """Publishes through a phase what the ranks hold, gathered in buckets on rank 0."""

    def __init__(self, phase: Phase, gathering: Gathering) -> None:
        self._phase, self._gathering = phase, gathering

    def before_train(self) -> None:
        self._phase.before_train()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        report = self._phase.after_train(version, self._gathering.buckets(backend.parts()))
        dist.barrier()
        return {
            "sync/without_engines_s": report.waiting_seconds,
            "sync/pause_s": report.pause_seconds,
            "sync/total_s": report.seconds,
            "sync/bytes": float(report.nbytes),
            "sync/engines": float(len(report.engines)),
            "sync/failures": float(len(report.failures)),
        }


class NoEngines:
    """For replays of recorded batches: nobody samples, so nobody needs weights."""

    def before_train(self) -> None:
        """Nothing shares this device."""

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        return {}
