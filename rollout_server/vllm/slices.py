"""Finds out which parts of each weight a vLLM worker needs, by watching its own loader. Only vLLM imports this module.

vLLM adds ``WeightBoxes`` to its workers (``--worker-extension-cls``). A loader is given a tensor without data; what it
copies into parameters are views of that tensor, which tell the boxes: of fused layers, of divided vocabularies and
experts, and of layers that another pipeline stage has. So no rule about a model or a version of vLLM is needed here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

Box = tuple[tuple[int, int], ...]


class WeightBoxes:
    """Methods that vLLM's workers get in addition."""

    model_runner: Any  # of the worker

    def weight_boxes(self, tensors: str) -> list[list[Box]] | None:
        """Return the boxes that this worker needs of each tensor; ``tensors``: JSON with shapes by name.

        Returns None in the middle of an update, when loaders only collect what they get.
        """
        model = self.model_runner.get_model()
        if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
            return None
        shapes = msgspec.json.decode(tensors, type=dict[str, list[int]])
        with _as_loaders_find_it(model):
            return [needed(model, name, shape) for name, shape in shapes.items()]


@contextmanager
def _as_loaders_find_it(model: Any) -> Iterator[None]:
    """Give the layers parameters without data that are laid out as in checkpoints, as vLLM does before an update.

    Loaders cannot divide what kernels have made of their weights: packed matrices, or numbers in 8 bits and scales.
    """
    changed: list[Any] = []
    try:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            changed.append(layer)
            restore_layer_on_meta(layer, info)
            for tensor in get_layer_tensors(layer).values():
                tensor.weight_loader = _get_original_loader(tensor)  # a quantised layer's waits for the whole layer
        yield
    finally:
        for layer in changed:
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()


def needed(model: Any, name: str, shape: list[int]) -> list[Box]:
    """Return the boxes of one tensor that ``model.load_weights`` would copy, without duplicates."""
    tensor = torch.empty(shape, device="meta")
    with torch.no_grad(), _CopiesWatched(tensor) as watched:
        model.load_weights([(name, tensor)])
    whole = tuple((0, size) for size in shape)
    if None in watched.boxes or _overlap(watched.boxes):  # the loader computes something from the tensor
        return [whole]
    return [box for box in watched.boxes if box is not None]


class _CopiesWatched(TorchDispatchMode):
    """Records which boxes of ``tensor`` are copied; None stands for what is no view of it. Changes no other tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor, self._storage = tensor, tensor.untyped_storage()._cdata
        self.boxes: list[Box | None] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            box = self._box(args[1]) if args[1].is_meta else None
            if box not in self.boxes:
                self.boxes.append(box)
            return args[0]
        if function._schema.is_mutable and not args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))

    def _box(self, view: Tensor) -> Box | None:
        """Return the part of the tensor that a view with its strides covers."""
        if view.untyped_storage()._cdata != self._storage:
            return None
        left, box = int(view.storage_offset()), []
        lengths = dict(zip(view.stride(), view.shape, strict=True)) if view.dim() else {}
        for stride, size in zip(self._tensor.stride(), self._tensor.shape, strict=True):
            start, left = divmod(left, stride)
            box.append((start, start + (lengths.get(stride, 1) if size > 1 else 1)))
        covered = torch.Size(stop - start for start, stop in box).numel()
        inside = all(stop <= size for (_, stop), size in zip(box, self._tensor.shape, strict=True))
        return tuple(box) if covered == view.numel() and inside else None


def _overlap(boxes: list[Box | None]) -> bool:
    """Whether two boxes have an element in common."""
    known = [box for box in boxes if box is not None]
    return any(
        all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))
        for i, one in enumerate(known)
        for other in known[i + 1 :]
    )
