"""From the backend's export to engines that confirmed a version, on every rank.

The export is a collective, so all ranks walk it; only rank 0 has engines to send to. How training and generation share
devices is the phase's business (``weight_sync.phases``).
"""

from typing import Protocol

import torch.distributed as dist

from rl_async.messages import Version
from rl_async.trainer.backend import Backend
from rl_async.weight_sync.buckets import make_buckets
from rl_async.weight_sync.phases import Phase


class Publisher(Protocol):
    """Gives weights to engines. All ranks call it alike."""

    def before_train(self, backend: Backend) -> None: ...
    def publish(self, version: Version, backend: Backend) -> dict[str, float]: ...


class EnginePublisher:
    """Publishes through a phase on rank 0; the other ranks take part in the export and wait."""

    def __init__(self, phase: Phase | None, bucket_bytes: int) -> None:
        self._phase, self._bucket_bytes = phase, bucket_bytes

    def before_train(self, backend: Backend) -> None:
        if self._phase is not None:
            self._phase.before_train()
        dist.barrier()
        backend.wake()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """Export, send, wait until the engines confirm. Returns the sync's metrics (rank 0)."""
        buckets = list(make_buckets(backend.export(), self._bucket_bytes))
        backend.sleep()
        metrics: dict[str, float] = {}
        if self._phase is not None:
            result = self._phase.after_train(version, buckets)
            metrics = {
                "sync/pause_s": result.pause_seconds,
                "sync/total_s": result.seconds,
                "sync/bytes": float(result.nbytes),
                "sync/engines": float(len(result.engines)),
                "sync/failures": float(len(result.failures)),
            }
        dist.barrier()
        return metrics


class NoEngines:
    """For replays of recorded batches: nobody samples, so nobody needs weights."""

    def before_train(self, backend: Backend) -> None:
        """Nothing shares this device."""

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        return {}
