"""Publishes the policy's weights to engines, which confirm the version.

All ranks take part and rank 0 gathers. How training and generation share devices is up to the phase
(``weight_sync.phases``).
"""

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from rl_async.configs.schema.trainer import LoraConfig
from rl_async.messages import Version
from rl_async.trainer.backends.interface import Backend
from rl_async.weight_sync.buckets.adapters import as_adapters
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.phases import Phase
from rl_async.weight_sync.reshard.gather import Gathering


class Publisher(Protocol):
    """Publishes weights to engines. All ranks call it alike."""

    def before_train(self) -> None:
        """Return when this rank may use its device for training."""
        ...

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        """Gather and send the weights, and wait until the engines confirm. Returns the metrics ``sync/...``."""
        ...


class EnginePublisher:
    """Publishes the ranks' weights through a phase, gathered into buckets on rank 0.

    With ``lora`` it sends adapters and their base, which is gathered once and kept for engines that do not hold it.
    """

    def __init__(self, phase: Phase, gathering: Gathering, lora: LoraConfig | None = None) -> None:
        self._phase, self._gathering, self._lora = phase, gathering, lora
        self._base: list[Bucket] | None = None

    def before_train(self) -> None:
        self._phase.before_train()

    def publish(self, version: Version, backend: Backend) -> dict[str, float]:
        report = self._phase.after_train(version, self._gathered(backend))
        dist.barrier()
        return {
            "sync/without_engines_s": report.waiting_seconds,
            "sync/pause_s": report.pause_seconds,
            "sync/total_s": report.seconds,
            "sync/bytes": float(report.nbytes),
            "sync/engines": float(len(report.engines)),
            "sync/failures": float(len(report.failures)),
        }

    def _gathered(self, backend: Backend) -> list[Bucket]:
        if self._lora is None:
            return self._gathering.buckets(backend.sharded_weights())
        if self._base is None:
            self._base = self._gathering.buckets(backend.sharded_weights("base"))
        return self._base + as_adapters(self._gathering.buckets(backend.sharded_weights("adapters")), self._lora.scale)


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
