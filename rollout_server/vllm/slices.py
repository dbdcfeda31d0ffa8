"""Weight updates inside a vLLM worker: finds the parts of each weight that it needs, and receives them. Only vLLM
imports this module.

vLLM adds ``WeightBoxes`` to its workers (``--worker-extension-cls``). It watches vLLM's own loader, which gets a tensor
without data and copies views of it into parameters. These views are the boxes that the worker needs, also with fused
layers, divided vocabularies and experts, and layers on another pipeline stage, so that no rule about a model or a
version of vLLM is needed here. ``WeightTransfer`` is our transport, which ``plugin.py`` registers.
"""

import hashlib
import logging
from collections.abc import Iterator
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
from rl_async.model_files import weights_name
from rl_async.rollout_server.vllm.adapters import publish
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo, of_worker
from rl_async.weight_sync.receiver import AdapterLoader, Assembler, WeightReceiver

Box = tuple[tuple[int, int], ...]
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

    No tensor with data is changed meanwhile.
    """

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
        """Return the part of the tensor that a view covers; None unless it is such a part."""
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
        self._receiver = WeightReceiver(Assembler(self._load), self.device, loader)
        self._loading = False

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
        """Have vLLM collect each layer's tensors in the checkpoint's layout and fuse them once all have arrived."""
        self._loading = True
        # Otherwise vLLM would count the tensors of an earlier update that failed half-way.
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, verify and load one bucket, described by an undecoded body."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive, verify and load one bucket."""
        self._receiver.update(of_worker(update_info, worker_number(self.parallel_config)))

    def finish_weight_update(self) -> None:
        """Load staged buckets, and complete the layers."""
        self._receiver.finish()
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

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        if not self._loading:
            self._begin_loading()
        # Copied, since a layer is fused when its last tensor has arrived, perhaps in another bucket.
        self.model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in tensors)
