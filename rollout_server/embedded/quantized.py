"""Weights in 8 bits: the matrices of a model's decoder layers, quantised when it is loaded and in every update.

The quantisation is weight-only: activations and products have the model's dtype. Each output channel has a float32
scale: its largest weight over the largest number of the format. Routers, embeddings, norms and the last layer are not
quantised.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rl_async.torch_shared import DTYPES, quantize
from rl_async.weight_sync.buckets import Piece
from rl_async.weight_sync.experts import single
from rl_async.weight_sync.receiver import Assembler

# The suffix that turns a parameter's name into that of its scales.
SCALES = "_scales"


def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [N, columns] by a quantised matrix [rows, columns] with scales [rows, 1]. Returns [N, rows]."""
    # The conversion is exact, since even bfloat16 represents all numbers of the format.
    return (linear(x, weight.to(x.dtype)) * scales.mT).to(x.dtype)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantised weight."""

    weight: nn.Parameter
    weight_scales: Tensor

    def __init__(self, dense: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        _hold(self, dense, "weight", dtype)
        self.bias = dense.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [..., rows]."""
        out = product(x, self.weight, self.weight_scales)
        return out if self.bias is None else out + self.bias


class QuantizedExperts(nn.Module):
    """The experts of a layer as Transformers 5 stacks them, quantised."""

    gate_up_proj: nn.Parameter
    gate_up_proj_scales: Tensor
    down_proj: nn.Parameter
    down_proj_scales: Tensor

    def __init__(self, dense: Any, dtype: torch.dtype) -> None:
        super().__init__()
        _hold(self, dense, "gate_up_proj", dtype)
        _hold(self, dense, "down_proj", dtype)
        self.act_fn = dense.act_fn

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts ``chosen`` [N, k] of ``hidden`` [N, H], with ``weights`` [N, k]."""
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            row, rank = torch.where(chosen == expert)
            gate, up = product(hidden[row], self.gate_up_proj[expert], self.gate_up_proj_scales[expert]).chunk(2, -1)
            part = product(self.act_fn(gate) * up, self.down_proj[expert], self.down_proj_scales[expert])
            out.index_add_(0, row, (part * weights[row, rank, None]).to(out.dtype))
        return out


def _hold(module: nn.Module, dense: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Register the parameter ``name`` of ``dense`` in ``module``, quantised and with its scales."""
    numbers, scales = quantize(getattr(dense, name).detach(), dtype)
    module.register_parameter(name, nn.Parameter(numbers, requires_grad=False))
    module.register_buffer(name + SCALES, scales)


def quantize_layers(model: Any, quantization: str) -> None:
    """Quantise the matrices of a model's decoder layers in place. ``quantization`` is a key of DTYPES.

    Beside the model, this needs the memory of one quantised layer.
    """
    dtype = DTYPES[quantization]
    parents = (parent for layer in model.get_decoder().layers for parent in list(layer.modules()))
    for parent in parents:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, QuantizedLinear(child, dtype))
            elif isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
                setattr(parent, name, QuantizedExperts(child, dtype))


def named_scales(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales [rows, 1] of quantised weights, by the names of these weights in updates."""
    buffers = ((name.removesuffix(SCALES), scales) for name, scales in model.named_buffers() if name.endswith(SCALES))
    return single(buffers)


class Requantizer:
    """Quantises the weights of an update, each when its last piece has arrived, since a scale covers a whole row.

    It therefore holds one incomplete weight. ``name in requantizer`` says whether a weight is quantised.
    """

    def __init__(self, model: nn.Module) -> None:
        self._scales = dict(named_scales(model))
        self._complete: list[tuple[str, Tensor]] = []
        self._assemble = Assembler(self._complete.extend)

    def __contains__(self, name: str) -> bool:
        return name in self._scales

    def store(self, piece: Piece, weight: Tensor) -> None:
        """Add the next piece of ``weight``. Raises WeightSyncError for a piece out of order."""
        self._assemble([piece])
        while self._complete:
            name, tensor = self._complete.pop()
            numbers, scales = quantize(tensor.to(weight.device), weight.dtype)
            weight.copy_(numbers)
            self._scales[name].copy_(scales)
