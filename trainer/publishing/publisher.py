"""Publishes the policy's weights to engines, which confirm the version.

All ranks take part. Where the weights are sent from is up to a ``WeightSource`` (``weights.py``), and how training and
generation share devices to the phase (``weight_sync.phases``).
"""

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from rl_async.messages import Version
from rl_async.trainer.backends.interface import Backend
from rl_async.trainer.publishing import spans
from rl_async.trainer.publishing.weights import WeightSource
from rl_async.weight_sync.phases import Phase


class Publisher(Protocol):
    """Publishes weights to engines. All ranks call it alike."""

    def before_train(self) -> None:
        """Return when this rank may use its device for training."""
        ...

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """Send the weights, and wait until the engines confirm. Returns the metrics ``sync/...``."""
        ...


class EnginePublisher:
    """Publishes the ranks' weights, as ``source`` has them, through a phase."""

    def __init__(self, phase: Phase, source: WeightSource) -> None:
        self._phase, self._source = phase, source

    def before_train(self) -> None:
        self._phase.before_train()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        with spans.of_publication(version, is_first_rank=dist.get_rank() == 0) as publication:
            report = self._phase.after_train(version, self._source(version, backend))
            publication.ended(report)
        return {
            "sync/without_engines_s": report.waiting_seconds,
            "sync/pause_s": report.pause_seconds,
            "sync/total_s": report.seconds,
            "sync/bytes": float(report.nbytes),
            "sync/engines": float(len(report.engines)),
            "sync/failures": float(len(report.failures)),
        }


class NoEngines:
    """The publisher of a replay, in which there are no engines: it only announces versions, to the queue if there is
    one."""

    def __init__(self, announce: Callable[[Version], object] = lambda version: None) -> None:
        self._announce = announce

    def before_train(self) -> None:
        """Do nothing: no engine shares this device."""

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        self._announce(version)
        return {}
