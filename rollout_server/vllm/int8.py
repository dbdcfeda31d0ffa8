"""Linear layers in int8 for vLLM, which itself only quantises a mixture's experts to int8. Only vLLM imports this.

Weights have a scale for each output channel, as in the embedded engine, and activations one for each token. A rank with
a part of the input channels scales that part by itself.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization.online import base, fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt8DynamicTokenSym, kInt8StaticChannelSym
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from rl_async.torch_shared import quantize

# vLLM 0.30 renamed it.
OnlineLinearBase: Any = getattr(fp8, "OnlineLinearBase", None) or fp8._Fp8OnlineLinearBase


class CpuKernel:
    """Multiplies on a CPU. vLLM's own kernel keeps a packed copy that refers to scales that an update replaces."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights unchanged, since ``apply_weights`` reads them directly."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [..., columns] with the layer's weight. Returns [..., rows] of the same dtype."""
        numbers, scales = quantize(x.flatten(0, -2), torch.int8)
        product = torch._int_mm(numbers, layer.weight.t()) * scales * layer.weight_scale.t()
        if bias is not None:
            product = product + bias
        return product.to(x.dtype).unflatten(0, x.shape[:-1])


class Int8Linear(OnlineLinearBase):
    """A linear layer that vLLM loads in the model's dtype, and that is quantised afterwards and in every update."""

    activation_quant_key = kInt8DynamicTokenSym

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """Make the parameters to load, and choose the kernel."""
        super().create_weights(layer, *sizes, **attributes)
        if current_platform.is_cpu():
            self.kernel: Any = CpuKernel()
        else:
            self.kernel = init_int8_linear_kernel(
                is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="Int8Linear"
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the loaded weights by their numbers and scales, in the kernel's layout."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        numbers, scales = quantize(layer.weight, torch.int8)
        replace_parameter(layer, "weight", numbers)
        replace_parameter(layer, "weight_scale", scales)
        self.kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [..., columns] with the layer's weight. Returns [..., rows] of the same dtype."""
        return self.kernel.apply_weights(layer, x, bias)


def register() -> None:
    """Have vLLM use these layers if its flags say ``int8_per_channel_static``."""
    base._ONLINE_LINEAR_METHODS[kInt8StaticChannelSym] = Int8Linear
