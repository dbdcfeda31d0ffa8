"""Weight updates inside a vLLM worker; imported by vLLM only, when its first update is configured."""

from typing import Any

import msgspec
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl_async.weight_sync.buckets.assembly import Assembler
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo
from rl_async.weight_sync.receiver import WeightReceiver


class WeightTransfer(WeightTransferEngine):
    """Receives our buckets, whatever their transport, and hands their tensors to the model's own loader.

    Methods raise WeightSyncError, ValueError for a body that is not understood; vLLM answers 500 then, and the update
    has to be started again.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._receiver = WeightReceiver(Assembler(self._load), self.device)
        self._loading = False

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """As the base class, but strict about names and types."""
        return msgspec.convert(init_dict, InitInfo)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        """As the base class, but strict about names and types."""
        return msgspec.convert(update_dict, UpdateInfo)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a transfer, leaving any earlier one."""
        workers = self.parallel_config.world_size_across_dp
        if workers > 1:
            raise ValueError(f"weights are sent to one worker per engine, and this one has {workers}")
        self._receiver.init(init_info)

    def start_weight_update(self) -> None:
        """The layers are taken apart when the first bucket is loaded: until then vLLM goes on sampling with them."""
        self._receiver.start()
        self._loading = False

    def _begin_loading(self) -> None:
        """vLLM collects each layer's tensors in its checkpoint's layout and fuses them when the layer is complete."""
        self._loading = True
        for layer in self.model.modules():  # of an update that failed half-way vLLM would keep count
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, verify and load one bucket."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As ``update_weights``."""
        self._receiver.update(update_info)

    def finish_weight_update(self) -> None:
        """Load what was staged; all layers are complete then."""
        self._receiver.finish()
        if self._loading:
            self._loading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the transfer."""
        self._receiver.close()

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        if not self._loading:
            self._begin_loading()
        # Cloned, since a layer is put together only when its last tensor has come, perhaps with another bucket.
        self.model.load_weights((name, tensor.to(self.device, copy=True)) for name, tensor in tensors)
