"""Where a publication takes the weights from: gathered on rank 0, or sent by every rank from its own shards."""

from typing import Protocol

from rl_async.configs.schema.trainer import LoraConfig
from rl_async.messages import Version
from rl_async.trainer.backends.interface import Backend
from rl_async.weight_sync.buckets.adapters import as_adapters
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.fleet import Weights
from rl_async.weight_sync.ranks.outlet import Outlet
from rl_async.weight_sync.ranks.shipment import RankShards
from rl_async.weight_sync.reshard.gather import Gathering


class WeightSource(Protocol):
    """All ranks call it alike."""

    def __call__(self, version: Version, backend: Backend) -> Weights:
        """Return on rank 0 what the phase publishes, and something empty on others."""
        ...

    def keep(self, *, stays: bool) -> None:
        """Copy what still lies in the backend, whose memory is about to be given to the engines.

        ``stays``: the copy may wait on the device until it is sent.
        """
        ...


class GatheredWeights:
    """Whole tensors in buckets on rank 0: what deltas and adapters are made of, and what SGLang takes.

    With ``lora``: adapters and their base, which is gathered once and kept for engines that do not hold it.
    """

    def __init__(self, gathering: Gathering, lora: LoraConfig | None = None) -> None:
        self._gathering, self._lora = gathering, lora
        self._base: list[Bucket] | None = None

    def __call__(self, version: Version, backend: Backend) -> Weights:
        if self._lora is None:
            return self._gathering.buckets(backend.sharded_weights())
        if self._base is None:
            self._base = [bucket.offloaded() for bucket in self._gathering.buckets(backend.sharded_weights("base"))]
        return self._base + as_adapters(self._gathering.buckets(backend.sharded_weights("adapters")), self._lora.scale)

    def keep(self, *, stays: bool) -> None:
        """Do nothing: the buckets are copies."""


class ShardedByRank:
    """Every rank's shards, sent from where they are. Only rank 0 has ``shards``, which directs all ranks."""

    def __init__(self, outlet: Outlet, shards: RankShards | None) -> None:
        self._outlet, self._shards = outlet, shards

    def __call__(self, version: Version, backend: Backend) -> Weights:
        self._outlet.offer(backend.sharded_weights())
        return self._shards if self._shards is not None else ()

    def keep(self, *, stays: bool) -> None:
        """Copy this rank's shards."""
        self._outlet.keep(stays=stays)
