"""vLLM plugin with our weight transport: ``register`` is an entry point of the group ``vllm.general_plugins``.

rl-async is installed beside vLLM (scripts/install_vllm_cpu), which calls ``register`` in each of its processes. Start
vLLM with ``--weight-transfer-config '{"backend": "rl_async"}'``, as ``__main__.py`` does.
"""

from typing import Any

from torch.nn.functional import linear

from rl_async.configs.engines.vllm import WEIGHT_TRANSFER


def register() -> None:
    """Register the transport with vLLM and apply our patches, once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if WEIGHT_TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER, "rl_async.rollout_server.vllm.transfer", "WeightTransfer"
        )
    _report_versions_in_every_part()
    if current_platform.is_cpu():
        _keep_weights_unpacked()


def _keep_weights_unpacked() -> None:
    """Stop vLLM from packing weight matrices on a CPU.

    vLLM would multiply with packed copies that no later weight update reaches: it would answer 200, count the version
    up, and sample with a mixture of old and new weights.
    """
    from vllm.model_executor.layers import utils

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def _report_versions_in_every_part() -> None:
    """Attach the weight versions of the tokens to every part of a stream.

    vLLM itself attaches them to the last part only; if that part were lost with the engine, the tokens before it would
    have no version and could not be trained on.
    """
    from vllm.v1.engine.output_processor import RequestState

    make = RequestState._new_completion_output

    def with_versions(state: Any, *arguments: Any, **named: Any) -> Any:
        output = make(state, *arguments, **named)
        output.weight_versions = state._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions
