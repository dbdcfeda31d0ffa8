"""Low-rank adapters (LoRA, arXiv:2106.09685) beside the weights of a model that the embedded engine serves.

A layer with an adapter computes W x + scale B A x as PEFT does in the trainer: in float32, with the sum in the type of
W x. The weights stay as they are.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from rl_async.errors import WeightSyncError
from rl_async.weight_sync.buckets import HIGH, LOW, Pairs


class Adapters:
    """The adapters of ``model``, none at first. Not thread-safe; they must not change during a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._pairs: Pairs = {}

    def load(self, pairs: Pairs, scale: float) -> None:
        """Copy these adapters, by their layers' names, in place of the earlier ones.

        Raises WeightSyncError, and keeps the earlier ones, if a layer is missing or of another shape.
        """
        layers = dict(self._model.named_modules())
        for name, (low, high) in pairs.items():
            weight = getattr(layers.get(name), "weight", None)
            if weight is None:
                raise WeightSyncError(f"the engine's model has no layer {name!r} for an adapter")
            if tuple(weight.shape) != (high.shape[0], low.shape[1]) or low.shape[0] != high.shape[1]:
                raise WeightSyncError(
                    f"{name} has shape {list(weight.shape)}, its adapter A {list(low.shape)} and B {list(high.shape)}"
                )
        for hook in self._hooks:
            hook.remove()
        device = next(self._model.parameters()).device
        self._pairs = {
            name: (low.to(device, copy=True), high.to(device, copy=True)) for name, (low, high) in pairs.items()
        }
        self._hooks = [
            layers[name].register_forward_hook(partial(_add, low=low, high=high, scale=scale))
            for name, (low, high) in self._pairs.items()
        ]

    def named(self) -> dict[str, Tensor]:
        """Return all A and B under the names by which they travel."""
        named: dict[str, Tensor] = {}
        for name, (low, high) in self._pairs.items():
            named |= {name + LOW: low, name + HIGH: high}
        return named


def _add(layer: nn.Module, inputs: tuple[Tensor], output: Tensor, *, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """Add scale B A x to a layer's output [..., out]; ``inputs`` holds x [..., in]."""
    return output.add(linear(linear(inputs[0].to(low.dtype), low), high), alpha=scale).to(output.dtype)
