"""Weight updates inside a vLLM worker: finds the parts of each weight that it needs, and receives them. Only vLLM
imports this module.

vLLM adds ``WeightBoxes`` to its workers (``--worker-extension-cls``). It watches vLLM's own loader, which gets a tensor
without data and copies views of it into parameters. These views are the boxes that the worker needs, also with fused
layers, divided vocabularies and experts, and layers on another pipeline stage, so that no rule about a model or a
version of vLLM is needed here. ``WeightTransfer`` is our transport, which ``plugin.py`` registers.

An update goes straight into vLLM's parameters where vLLM does nothing to a layer's weights once they are loaded: its
loader gets a tensor without data there, too, and what it would copy comes from the bucket. Layers that are quantised
or packed, experts among them, are loaded as vLLM reloads them, which copies each tensor three times.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from rl_async.concurrency import in_daemon_thread
from rl_async.errors import WeightSyncError
from rl_async.model_files import weights_name
from rl_async.rollout_server.vllm.adapters import publish
from rl_async.weight_sync.buckets import Piece
from rl_async.weight_sync.layout import Box, common, slices, volume
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo, of_worker
from rl_async.weight_sync.receiver import AdapterLoader, Assembler, WeightReceiver

# What vLLM's quant_method does to weights once they are loaded is nothing in these classes, on a CPU because
# ``plugin`` keeps it from packing them; a layer may have none.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
# The tensors of single experts are many, and their layers are never plain.
OF_EXPERTS = re.compile(r"\.experts\.\d+\.")
# Methods of speculation without weights of their own.
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
log = logging.getLogger("rl_async.vllm")


def worker_number(parallel: Any) -> int:
    """Return a worker's place among all of the engine: those of the first data-parallel copy, then the second's."""
    number: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
    return number


class WeightBoxes:
    """Gives vLLM's workers a method that tells the slices of weights that they need."""

    # An attribute of the worker.
    model_runner: Any

    def weight_boxes(self, tensors: str) -> list[list[Box]] | None:
        """Return the boxes of each tensor that this worker needs, given the shapes by name as JSON.

        Returns None in the middle of an update, when loaders only collect tensors.
        """
        model = self.model_runner.get_model()
        if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
            return None
        shapes = msgspec.json.decode(tensors, type=dict[str, list[int]])
        with _as_loaders_find_it(model):
            return [needed(model, name, shape) for name, shape in shapes.items()]

    def weight_checksums(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter's bytes, by its name behind the worker's place, as vLLM 0.32 does."""
        parallel = self.model_runner.vllm_config.parallel_config
        return {
            f"worker{worker_number(parallel)}:{name}": hashlib.sha256(
                parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            ).hexdigest()
            for name, parameter in self.model_runner.get_model().named_parameters()
        }


@contextmanager
def _as_loaders_find_it(model: Any) -> Iterator[None]:
    """Give the layers parameters without data in the layout of checkpoints, as vLLM does before an update.

    Loaders cannot divide weights that kernels have packed, or quantised to 8 bits with scales.
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
                # The present loader of a quantised layer would wait for the whole layer.
                tensor.weight_loader = _get_original_loader(tensor)
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
    # The loader may also compute something from the tensor.
    if None in watched.boxes or _overlap(watched.boxes):
        return [whole]
    return [box for box in watched.boxes if box is not None]


class _CopiesWatched(TorchDispatchMode):
    """Records the boxes of ``tensor`` that are copied, and None for a tensor that is not a view of it.

    ``copies`` has each box with the view that it is copied to, and ``exact`` says whether every box lies in its place
    as in the tensor, and nothing else happens there. No tensor with data is changed meanwhile.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.boxes: list[Box | None] = []
        self.copies: list[tuple[Box, Tensor]] = []
        self.exact = True
        self._filled: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            box = box_of(args[1], self._tensor) if args[1].is_meta else None
            if box not in self.boxes:
                self.boxes.append(box)
            if box is None or args[1].stride() != self._tensor.stride() or args[0].shape != args[1].shape:
                self.exact = False
            else:
                self.copies.append((box, args[0]))
            self.exact &= not any(_may_overlap(args[0], filled) for filled in self._filled)
            return args[0]
        if function._schema.is_mutable:
            if function in FILLS:
                self._filled.append(args[0])
                self.exact &= not any(_may_overlap(args[0], copied) for _, copied in self.copies)
            else:
                self.exact = False
            if not args[0].is_meta:
                return args[0]
        return function(*args, **(kwargs or {}))


# Embeddings fill the rows behind their vocabulary.
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def _may_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views may have memory in common; they have not if they lie apart in it."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not one.numel() or not other.numel():
        return False
    ends = [
        view.storage_offset() + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        for view in (one, other)
    ]
    return one.storage_offset() <= ends[1] and other.storage_offset() <= ends[0]


def box_of(view: Tensor, tensor: Tensor) -> Box | None:
    """Return the part of a contiguous tensor that a view covers; None unless it is such a part."""
    if view.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        return None
    left, box = int(view.storage_offset()), []
    sizes = dict(zip(view.stride(), view.shape, strict=True)) if view.dim() else {}
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        start, left = divmod(left, stride)
        box.append((start, start + (sizes.get(stride, 1) if size > 1 else 1)))
    inside = all(stop <= size for (_, stop), size in zip(box, tensor.shape, strict=True))
    return tuple(box) if volume(tuple(box)) == view.numel() and inside else None


def is_plain(layer: Any) -> bool:
    """Whether vLLM does nothing to a layer's weights once they are loaded, and holds them as checkpoints do.

    The layer has its parameters of checkpoints, as in ``_as_loaders_find_it``.
    """
    method = type(getattr(layer, "quant_method", None)).__name__
    if method not in PLAIN_METHODS or hasattr(layer, "process_weights_after_loading"):
        return False
    kernels, (found, _) = get_layerwise_info(layer).kernel_tensors[0], get_layer_params_buffers(layer)
    return kernels.keys() == found.keys() and all(
        (kernel.shape, kernel.stride(), kernel.dtype) == (found[name].shape, found[name].stride(), found[name].dtype)
        for name, kernel in kernels.items()
    )


def direct(model: Any, tensors: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, int]]:
    """Return the plain layers, and the number of elements copied from each tensor that only plain layers use.

    ``tensors`` have no data. Those from which a loader computes something are left out.
    """
    copied: dict[str, int] = {}
    with _as_loaders_find_it(model):
        plain = [layer for layer in model.modules() if layer._parameters and is_plain(layer)]
        homes = {p.untyped_storage()._cdata for layer in plain for p in layer._parameters.values() if p is not None}
        for name, tensor in tensors.items():
            # Loaders read the value of a one-element tensor.
            if OF_EXPERTS.search(name) or tensor.numel() == 1:
                continue
            with torch.no_grad(), _CopiesWatched(tensor) as watched:
                model.load_weights([(name, tensor)])
            if watched.exact and all(view.untyped_storage()._cdata in homes for _, view in watched.copies):
                copied[name] = sum(volume(box) for box, _ in watched.copies)
    return plain, copied


class _Filling(TorchDispatchMode):
    """Redirects a loader's copies to ``pieces``, which are views of buckets.

    ``tensors`` has the names with tensors without data, for the loaders. ``copied`` counts elements by name.
    """

    def __init__(self, pieces: Sequence[Piece], copied: Counter[str]) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self._copied, self._parts = copied, dict[int, tuple[str, list[tuple[Box, Tensor]]]]()
        for piece in pieces:
            if piece.name not in self.tensors:
                whole = torch.empty(piece.shape, dtype=piece.data.dtype, device="meta")
                self.tensors[piece.name] = whole
                self._parts[whole.untyped_storage()._cdata] = (piece.name, [])
            self._parts[self.tensors[piece.name].untyped_storage()._cdata][1].extend(piece.parts())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.copy_.default or not args[1].is_meta:
            return function(*args, **(kwargs or {}))
        if (found := self._parts.get(args[1].untyped_storage()._cdata)) is None:
            raise WeightSyncError(f"vLLM's loader computes something from one of {', '.join(self.tensors)}")
        name, parts = found
        box = box_of(args[1], self.tensors[name])
        assert box is not None, "direct() has seen that it is one"
        for at, part in parts:
            if (both := common(box, at)) is not None:
                args[0][slices(both, box)].copy_(part[slices(both, at)])
                self._copied[name] += volume(both)
        return args[0]


def _overlap(boxes: list[Box | None]) -> bool:
    """Whether two boxes have an element in common."""
    known = [box for box in boxes if box is not None]
    return any(
        all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))
        for i, one in enumerate(known)
        for other in known[i + 1 :]
    )


class WeightTransfer(WeightTransferEngine):
    """Receives buckets over any of our transports, and passes their tensors to the model's own loader.

    Methods raise WeightSyncError, and ValueError for a malformed body; vLLM then answers 500, and the update has to be
    started again.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        guesses = self.vllm_config.speculative_config
        if guesses is not None and guesses.method not in WITHOUT_WEIGHTS:
            log.warning(
                "updates do not reach the weights that guess tokens (%s): they fit less and less", guesses.method
            )
        loader = None
        if self.vllm_config.lora_config is not None:
            # Every worker reads the files once, before the first update asks for the name.
            base = in_daemon_thread(lambda: weights_name(Path(self.model_config.model)), "weights-name")
            loader = AdapterLoader(base.result, lambda pairs, scale: publish(self.model.lora_manager, pairs, scale))
        self._receiver = WeightReceiver(self._load, self.device, loader)
        self._assembler = Assembler(self._load_whole)
        self._loading = False
        # Tensors that have come, without data, how many ``direct`` has seen, and what it found when an update began.
        self._known: dict[str, Tensor] = {}
        self._seen = 0
        self._plain: list[Any] = []
        self._direct: dict[str, int] = {}
        # Elements that this update has copied straight into parameters, by tensor.
        self._copied: Counter[str] = Counter()

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Convert the body, refusing unknown names and wrong types."""
        return msgspec.convert(init_dict, InitInfo)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Convert the body as ``parse_init_info`` does."""
        return msgspec.convert(update_dict, UpdateInfo)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a weight-transfer group, in place of any earlier one, with the worker's own rank or group."""
        rank = worker_number(self.parallel_config)
        if not init_info.workers:
            init_info = msgspec.structs.replace(init_info, rank_offset=init_info.rank_offset + rank)
        self._receiver.init(of_worker(init_info, rank))

    def start_weight_update(self) -> None:
        """Start an update. vLLM may keep sampling with the old weights until the first bucket is loaded."""
        self._receiver.start()
        self._loading = False

    def _begin_loading(self) -> None:
        """Have vLLM collect each layer's tensors in the checkpoint's layout and fuse them once all have arrived.

        Plain layers keep the parameters that they compute with, which loaders fill at once.
        """
        self._loading = True
        self._copied.clear()
        # Otherwise vLLM would count the tensors of an earlier update that failed half-way.
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        unfinished = any(get_layerwise_info(layer).can_load() for layer in self.model.modules())
        if len(self._known) > self._seen and not unfinished:
            self._plain, self._direct = direct(self.model, self._known)
            self._seen = len(self._known)
        initialize_layerwise_reload(self.model)
        for layer in self._plain:
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()
            # From 0.29 on vLLM leaves biases where they are, with a loader that now ignores what comes.
            for tensor in get_layer_tensors(layer).values():
                tensor.weight_loader = _get_original_loader(tensor)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, verify and load one bucket, described by an undecoded body."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive, verify and load one bucket."""
        self._receiver.update(of_worker(update_info, worker_number(self.parallel_config)))

    def finish_weight_update(self) -> None:
        """Load staged buckets, and complete the layers. Raises WeightSyncError if parts of a tensor did not come."""
        self._receiver.finish()
        for name, count in self._copied.items():
            if count != self._direct[name]:
                raise WeightSyncError(f"{count} elements of {name} came, and this worker needs {self._direct[name]}")
        if self._loading:
            self._loading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the weight-transfer group."""
        self._receiver.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse to be a trainer. Before 0.28 vLLM makes no transport without this method, which it never calls."""
        raise NotImplementedError("rl-async's trainer sends the weights (rl_async.weight_sync.sender)")

    def _load(self, pieces: list[Piece]) -> None:
        if not self._loading:
            self._begin_loading()
        straight = [piece for piece in pieces if piece.name in self._direct]
        if straight:
            # A tensor that came and is not copied counts 0.
            self._copied.update(dict.fromkeys((piece.name for piece in straight), 0))
            with torch.no_grad(), _Filling(straight, self._copied) as filling:
                self.model.load_weights(filling.tensors.items())
        for piece in pieces:
            if piece.name not in self._known:
                self._known[piece.name] = torch.empty(piece.shape, dtype=piece.data.dtype, device="meta")
        self._assembler([piece for piece in pieces if piece.name not in self._direct])

    def _load_whole(self, tensors: list[tuple[str, Tensor]]) -> None:
        # Copied, since a layer is fused when its last tensor has arrived, perhaps in another bucket.
        self.model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in tensors)
