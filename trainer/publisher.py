"""From the backend's export to engines that confirmed a version, on every rank.

The export is a collective, so all ranks walk it; only rank 0 keeps what comes out. How training and generation share
devices is the phase's business (``weight_sync.phases``).
"""

from typing import Protocol

import torch.distributed as dist

from rl_async.messages import Version
from rl_async.trainer.backend import Backend
from rl_async.weight_sync.buckets import Bucket, make_buckets
from rl_async.weight_sync.phases import Phase


class Publisher(Protocol):
    """Gives weights to engines. All ranks call it alike."""

    def before_train(self) -> None:
        """Returns when this rank may use its device for training."""
        ...

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """Export, send, wait until the engines confirm. Returns the sync's metrics."""
        ...


class EnginePublisher:
    """Publishes through a phase, in buckets of at most ``bucket_bytes``."""

    def __init__(self, phase: Phase, bucket_bytes: int) -> None:
        self._phase, self._bucket_bytes = phase, bucket_bytes

    def before_train(self) -> None:
        self._phase.before_train()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        report = self._phase.after_train(version, self._export(backend))
        dist.barrier()
        return {
            "sync/without_engines_s": report.waiting_seconds,
            "sync/pause_s": report.pause_seconds,
            "sync/total_s": report.seconds,
            "sync/bytes": float(report.nbytes),
            "sync/engines": float(len(report.engines)),
            "sync/failures": float(len(report.failures)),
        }

    def _export(self, backend: Backend) -> list[Bucket]:
        if dist.get_rank() == 0:
            return list(make_buckets(backend.export(), self._bucket_bytes))
        for _ in backend.export():
            """Take part in gathering each tensor; rank 0 sends them."""
        return []


class NoEngines:
    """For replays of recorded batches: nobody samples, so nobody needs weights."""

    def before_train(self) -> None:
        """Nothing shares this device."""

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        return {}
