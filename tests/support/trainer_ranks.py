"""Trainer ranks that send weights to engines, each behind its own socket as in a run, but all in this process."""

from collections.abc import Mapping
from types import TracebackType

from torch import Tensor

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.weight_sync.buckets import dtype_name
from rl_async.weight_sync.layout import Layout, TensorSpec, fsdp2, slices, whole
from rl_async.weight_sync.reshard import ShardedWeights
from rl_async.weight_sync.sender import Outlet, OutletServer, RankShards, RemoteOutlet

TOKEN = "token"
HOST = "127.0.0.1"


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}


def shards_of(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> ShardedWeights:
    """What ``rank`` holds of whole tensors, as views."""
    held = {(name, box): tensors[name][slices(box, whole(tensors[name].shape))] for name, box in layout.held(rank)}
    return ShardedWeights(layout, held)


class TrainerRanks:
    """``count`` ranks with an outlet each; ``layout`` is who holds what (by default as FSDP2 shards)."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        count: int,
        sync: WeightSyncConfig,
        layout: Layout | None = None,
        device: str = "cpu",
    ) -> None:
        self.layout = layout or fsdp2(specs_of(tensors), count)
        self.outlets = [Outlet(rank, sync, HOST, sync.timeout_s, device) for rank in range(count)]
        self.servers = {rank: OutletServer(self.outlets[rank], HOST, TOKEN) for rank in range(1, count)}
        remote = {rank: RemoteOutlet(rank, server.address, TOKEN, 30, 30) for rank, server in self.servers.items()}
        self._shards = RankShards(self.outlets[0], remote)

    def weights(self, tensors: Mapping[str, Tensor]) -> RankShards:
        """What rank 0 publishes, once all ranks have offered their shards of these whole tensors."""
        for rank, outlet in enumerate(self.outlets):
            outlet.offer(shards_of(self.layout, rank, tensors))
        return self._shards

    def __enter__(self) -> "TrainerRanks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._shards.close()
        for server in self.servers.values():
            server.close()
