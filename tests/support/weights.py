"""Make buckets and trainer ranks that send them, and apply in this process what an engine would receive."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.trainer.backend import Backend
from rl_async.weight_sync.buckets import HIGH, LOW, Bucket, add, allocate_buckets, dtype_name
from rl_async.weight_sync.layout import Layout, Shard, TensorSpec, fsdp2, slices, whole
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.receiver import Assembler, WeightReceiver
from rl_async.weight_sync.reshard import PointToPoint, ShardedWeights, plan, reshard
from rl_async.weight_sync.sender import Outlet, OutletServer, RankShards, RemoteOutlet
from rl_async.weight_sync.transports import SharedMemorySender


def make_buckets(parameters: Iterable[tuple[str, Tensor]], max_bytes: int) -> list[Bucket]:
    """Copy whole tensors, from any device, into buckets of at most ``max_bytes``."""
    tensors = dict(parameters)
    specs = {name: TensorSpec(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
    buckets = allocate_buckets(specs, max_bytes)
    for bucket in buckets:
        for name, box, place in bucket.boxes:
            place.copy_(tensors[name].detach()[slices(box, whole(tensors[name].shape))])
    return [bucket.seal() for bucket in buckets]


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


class Received:
    """An engine's weights by name, and the receiver that loads them."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.receiver = WeightReceiver(Assembler(self._load))
        self.receiver.init(InitInfo(backend="ipc"))

    def take(self, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        """One whole update. Raises what the receiver raises."""
        sender = SharedMemorySender()
        try:
            self.receiver.start()
            for bucket in buckets:
                self.receiver.update(sender.stage(bucket))
                sender.unstage()
            self.receiver.finish()
        finally:
            sender.close()
        return self.weights

    def _load(self, named: list[tuple[str, Tensor]]) -> None:
        self.weights.update((name, tensor.clone()) for name, tensor in named)


def adapters(
    weights: Iterable[tuple[str, Tensor]], layers: tuple[str, ...], seed: int, rank: int = 3
) -> dict[str, Tensor]:
    """Random A and B, as they travel, for the weights [out, in] of layers with these last names."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in layers:
            found[layer + LOW] = 0.3 * torch.randn(rank, weight.shape[1], generator=draw)
            found[layer + HIGH] = 0.3 * torch.randn(weight.shape[0], rank, generator=draw)
    return found


def merged(
    weights: Iterable[tuple[str, Tensor]], adapters: dict[str, Tensor], scale: float
) -> list[tuple[str, Tensor]]:
    """What the trainer would have sent instead of adapters."""
    return [
        (name, add(weight, adapters[layer + LOW], adapters[layer + HIGH], scale))
        if (layer := name.removesuffix(".weight")) + LOW in adapters
        else (name, weight)
        for name, weight in weights
    ]


# Whole weights of a backend on every rank, for tests that compare them.


BUCKET, DEADLINE_S = 1 << 20, 60.0


def whole_weights(backend: Backend) -> dict[str, Tensor]:
    """Copies, by name, in the type in which they travel. A collective."""
    layout, held = backend.sharded_weights()
    ranks = range(dist.get_world_size())
    everywhere = {
        name: tuple(Shard(rank, whole(spec.shape)) for rank in ranks) for name, spec in layout.tensors.items()
    }
    found = {
        (name, whole(spec.shape)): torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=backend.device)
        for name, spec in layout.tensors.items()
    }
    made = plan(layout, Layout(layout.tensors, everywhere), BUCKET)
    wire = PointToPoint(dist.HashStore(), device=backend.device)
    reshard(made, dist.get_rank(), held, found, wire, DEADLINE_S)
    return {name: tensor for (name, _), tensor in found.items()}
