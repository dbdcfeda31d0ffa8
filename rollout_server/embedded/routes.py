"""Records which experts a model's routers choose, token by token, so that the trainer can replay them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl_async.model_files import experts_of


class RouteRecorder:
    """Listens to the routers of a decoder's layers. ``shape`` is (layers, experts per token); a layer without experts
    has zeros."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.shape = config.num_hidden_layers, config.num_experts_per_tok
        self.dtype = torch.uint8 if experts_of(config) <= 256 else torch.int16
        self._chosen: dict[int, Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            if router := getattr(layer.mlp, "gate", None):
                router.register_forward_hook(partial(self._note, number))

    def _note(self, layer: int, _module: nn.Module, _arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Keep the experts [N, k] that a router chose: the last of what Transformers' routers return."""
        self._chosen[layer] = output[2]

    def take(self, rows: int, width: int) -> Tensor:
        """Return what was chosen in the last pass, over ``rows`` sequences of ``width`` tokens: [rows, width, layers,
        k]."""
        device = next(iter(self._chosen.values())).device
        chosen = torch.zeros((rows * width, *self.shape), dtype=self.dtype, device=device)
        for layer, experts in self._chosen.items():
            chosen[:, layer] = experts.to(self.dtype)
        self._chosen.clear()
        return chosen.unflatten(0, (rows, width))


def make_recorder(model: Any) -> RouteRecorder | None:
    """Return a recorder of the model's routers; None for a model without experts."""
    return RouteRecorder(model) if experts_of(model.config) else None
