"""Publishes adapters alone (LoRA, arXiv:2106.09685): A and B are sent, and engines add them to a base they hold.

An adapter of the layer ``L``, whose weight [out, in] is ``L.weight``, is ``L.lora_A.weight`` [rank, in] and
``L.lora_B.weight`` [out, rank], in float32 as they are trained; rounded, their product would differ from what the
trainer merges.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
import xxhash
from torch import Tensor

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets.buckets import Bucket, Piece

LOW, HIGH = ".lora_A.weight", ".lora_B.weight"
CACHED = 1 << 18  # elements of a sum that fit in a processor's cache


def add(weight: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A, [out, in] in W's dtype, from A [rank, in] and B [out, rank], both float32.

    The sum over the rank is computed in float32, in order, with each product and each sum rounded separately (IEEE
    754). An element therefore has the same bits on any device and in any selection of rows and columns, which a matrix
    product does not guarantee.
    """
    rows = max(1, CACHED // max(1, weight.shape[1]) if weight.device.type == "cpu" else weight.shape[0])
    result = torch.empty_like(weight)
    for at in range(0, weight.shape[0], rows):
        part = slice(at, at + rows)
        total = high[part, :1] * low[0]
        product = torch.empty_like(total)
        for k in range(1, len(low)):
            total += torch.mul(high[part, k : k + 1], low[k], out=product)
        result[part] = total.mul_(scale).add_(weight[part])
    return result


def as_adapters(buckets: Iterable[Bucket], scale: float) -> list[Bucket]:
    """Mark buckets as holding matrices A and B, scaled by ``scale`` (alpha / rank)."""
    return [replace(b, info=msgspec.structs.replace(b.info, kind="adapter", scale=scale)) for b in buckets]


def adapter_buckets(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return the buckets that hold adapters, in order."""
    return [bucket for bucket in buckets if bucket.info.kind == "adapter"]


def base_name(base: Iterable[Bucket]) -> str:
    """Return a name for these weights alone, never that of a version: a hash of their manifests and checksums."""
    manifests = msgspec.json.encode([bucket.info for bucket in base])
    return f"base-{xxhash.xxh3_128_hexdigest(manifests)}"


class AdapterSum:
    """Adds adapters to the pieces of a base, on ``device``. Raises WeightSyncError for an A without its B, or a B
    alone.
    """

    def __init__(self, named: Mapping[str, Tensor], scale: float, device: torch.device) -> None:
        self._scale, self._device = scale, device
        here = {name: tensor.to(device) for name, tensor in named.items()}
        layers = {name.removesuffix(LOW).removesuffix(HIGH) for name in here}
        if unpaired := here.keys() ^ {layer + ending for layer in layers for ending in (LOW, HIGH)}:
            raise WeightSyncError(
                f"adapters must come in pairs of A and B; unpaired: {', '.join(sorted(unpaired)[:4])}"
            )
        self._pairs = {f"{layer}.weight": (here[layer + LOW], here[layer + HIGH]) for layer in layers}
        self._unused = set(self._pairs)

    def __call__(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces, with adapters added where there are any. Raises WeightSyncError for shapes that do not
        fit.
        """
        return [self._sum(piece) if piece.name in self._pairs else piece for piece in pieces]

    def require_all_used(self) -> None:
        """Raise WeightSyncError if the base had no weight for one of the adapters."""
        if self._unused:
            raise WeightSyncError(f"the base has no weights for adapters of {', '.join(sorted(self._unused)[:3])}")

    def _sum(self, piece: Piece) -> Piece:
        """Add an adapter to a piece, which is either whole rows or a part of one row."""
        low, high = self._pairs[piece.name]
        if piece.shape != (high.shape[0], low.shape[1]) or high.shape[1] != low.shape[0]:
            raise WeightSyncError(
                f"{piece.name} has shape {list(piece.shape)}, its adapter A {list(low.shape)} and B {list(high.shape)}"
            )
        row, column = divmod(piece.start, piece.shape[1])
        columns = min(piece.data.numel(), piece.shape[1])
        weight = piece.data.view(-1, columns).to(self._device)
        low, high = low[:, column : column + columns], high[row : row + len(weight)]
        self._unused.discard(piece.name)
        return Piece(piece.name, piece.shape, piece.start, add(weight, low, high, self._scale).view(-1))
