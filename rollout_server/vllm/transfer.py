"""Weight updates inside a vLLM worker. Only vLLM imports this module, when its first update is configured."""

from typing import Any

import msgspec
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_async.weight_sync.protocol import InitInfo, UpdateInfo, of_worker
from rl_async.weight_sync.receiver import Assembler, WeightReceiver


class WeightTransfer(WeightTransferEngine):
    """Receives our buckets, whatever their transport, and passes their tensors to the model's own loader.

    Methods raise WeightSyncError, and ValueError for a malformed body; vLLM then answers 500, and the update has to be
    started again.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._receiver = WeightReceiver(Assembler(self._load), self.device)
        self._loading = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Convert the body, refusing unknown names and wrong types."""
        return msgspec.convert(init_dict, InitInfo)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """Convert the body as ``parse_init_info`` does."""
        return msgspec.convert(update_dict, UpdateInfo)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a weight-transfer group, leaving any earlier one, with a rank or a group of its own."""
        rank = self.parallel_config.rank
        if not init_info.workers:
            init_info = msgspec.structs.replace(init_info, rank_offset=init_info.rank_offset + rank)
        self._receiver.init(of_worker(init_info, rank))

    def start_weight_update(self) -> None:
        """Start an update. vLLM may keep sampling with the old weights until the first bucket is loaded."""
        self._receiver.start()
        self._loading = False

    def _begin_loading(self) -> None:
        """Have vLLM collect each layer's tensors in the checkpoint's layout and fuse them once it has them all."""
        self._loading = True
        for layer in self.model.modules():  # vLLM would count the tensors of an update that failed half-way
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, verify and load one bucket, described by an undecoded body."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive, verify and load one bucket."""
        self._receiver.update(of_worker(update_info, self.parallel_config.rank))

    def finish_weight_update(self) -> None:
        """Load the staged buckets, if any, and complete the layers."""
        self._receiver.finish()
        if self._loading:
            self._loading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the weight-transfer group."""
        self._receiver.close()

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        if not self._loading:
            self._begin_loading()
        # Copied: a layer is fused when its last tensor has arrived, perhaps in another bucket.
        self.model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in tensors)
