"""What an engine's receiver makes of buckets, in this process, and what it should make of adapters."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rl_async.weight_sync.buckets import HIGH, LOW, Bucket, add
from rl_async.weight_sync.protocol import InitInfo
from rl_async.weight_sync.receiver import Assembler, WeightReceiver
from rl_async.weight_sync.transports.ipc import SharedMemorySender


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
