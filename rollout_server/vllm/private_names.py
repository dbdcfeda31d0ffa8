"""The names inside vLLM that our code touches, which a new version may move: found before anything is patched.

The tables are the only list of them. ``register`` (``plugin.py``) refuses to start a vLLM that lacks one of
``TOUCHED``, so that an engine never trains with half of the patches; one that lacks names of a feature refuses that.
``tests/contracts/engines/test_vllm_versions.py`` looks each of them up in the sources of other versions, with the
parameters that we pass. Imports nothing of vLLM by itself.
"""

import inspect
import logging
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import TypeAlias

from rl_async.configs.engines import VLLM, in_range

log = logging.getLogger("rl_async.vllm")

_RELOAD = "vllm.model_executor.model_loader.reload"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_EXPERTS = "vllm.model_executor.layers.fused_moe"
# By module, each with the parameters that we pass or read by their names; ``|`` stands between alternatives.
Names: TypeAlias = Mapping[str, Mapping[str, tuple[str, ...]]]
TOUCHED: Names = {
    "vllm.distributed.weight_transfer.base": {
        "WeightTransferEngine.__init__": (),
        "WeightTransferEngine.start_weight_update": (),
        "WeightTransferEngine.finish_weight_update": (),
        "WeightTransferEngine.update_weights": ("update_info",),
        "WeightTransferEngine.receive_weights": ("update_info",),
        "WeightTransferEngine.init_transfer_engine": ("init_info",),
        "WeightTransferEngine.parse_init_info": ("init_dict",),
        "WeightTransferEngine.shutdown": (),
    },
    "vllm.distributed.weight_transfer.factory": {
        "WeightTransferEngineFactory._registry": (),
        "WeightTransferEngineFactory.register_engine": (),
    },
    _RELOAD: {"initialize_layerwise_reload": (), "finalize_layerwise_reload": ()},
    f"{_RELOAD}.layerwise": {"_get_original_loader": (), "_place_kernel_tensors": (), "get_layerwise_info": ()},
    f"{_RELOAD}.meta": {"restore_layer_on_meta": ()},
    f"{_RELOAD}.utils": {"get_layer_params_buffers": (), "get_layer_tensors": ()},
    "vllm.v1.engine.output_processor": {"RequestState._new_completion_output": ()},
    "vllm.v1.engine.core_client": {
        "AsyncMPClient._call_utility_async": ("method", "engine"),
        "DPLBAsyncMPClient.call_utility_async": (),
    },
    "vllm.v1.engine.core": {"EngineCore.preprocess_add_request": ("request",)},
    "vllm.v1.executor.multiproc_executor": {"MultiprocExecutor._init_executor": ()},
    "vllm.lora.lora_model": {"LoRAModel.__init__": ("lora_model_id", "rank", "loras")},
    "vllm.lora.lora_weights": {
        "LoRALayerWeights.__init__": ("module_name", "rank", "lora_alpha", "lora_a", "lora_b", "scaling")
    },
    "vllm.lora.model_manager": {
        "LoRAModelManager.remove_all_adapters": (),
        "LoRAModelManager._register_packed_modules": (),
    },
    "vllm.lora.utils": {"parse_fine_tuned_lora_name": ("name", "weights_mapper")},
    "vllm.lora.worker_manager": {"WorkerLoRAManager._load_adapter": ("lora_request",)},
    "vllm.multimodal.processing.processor": {
        "BaseMultiModalProcessor._apply_prompt_updates": (),
        "BaseMultiModalProcessor._find_mm_placeholders": (),
    },
    "vllm.renderers.base": {"BaseRenderer._process_tokens_async": ("prompt",)},
    "vllm.model_executor.kernels.linear": {
        "init_int8_linear_kernel": ("is_channelwise", "is_static_input_scheme", "input_symmetric", "module_name")
    },
    "vllm.model_executor.utils": {"replace_parameter": ("layer", "param_name")},
    f"{_QUANTIZATION}.online.base": {"_ONLINE_LINEAR_METHODS": ()},
    # The other name is that before 0.30.
    f"{_QUANTIZATION}.online.fp8": {"OnlineLinearBase|_Fp8OnlineLinearBase": ()},
    f"{_QUANTIZATION}.utils.quant_utils": {"kInt8DynamicTokenSym": (), "kInt8StaticChannelSym": ()},
}
# Further ones on a CPU.
TOUCHED_ON_CPU: Names = {
    "vllm.v1.sample.rejection_sampler": {
        "expand_batch_to_tokens": ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
    },
    "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": ("layer", "remove_weight")},
    "vllm.distributed.device_communicators.base_device_communicator": {
        "DeviceCommunicatorBase.all_gatherv": ("input_", "dim", "sizes"),
        "DeviceCommunicatorBase.reduce_scatterv": ("input_", "dim", "sizes"),
    },
    "vllm.distributed.device_communicators.cpu_communicator": {"CpuCommunicator": ()},
}
# vLLM's own versions of tokens, from 0.32 on; without them ``old_servers.py`` keeps them, by these.
TOKEN_VERSIONS: Names = {"vllm.v1.engine.output_processor": {"RequestState._weight_version_spans": ()}}
COUNTED_VERSIONS: Names = {
    "vllm.v1.engine.async_llm": {"AsyncLLM.wake_up": ("tags",)},
    "vllm.v1.engine.output_processor": {
        "OutputProcessor.process_outputs": ("engine_core_outputs", "engine_core_timestamp"),
    },
    "vllm.entrypoints.scale_out.token_in_token_out.serving": {
        "ServingTokens.serve_tokens_stream_generator": ("request", "result_generator"),
        # The later one takes the versions itself.
        "GenerateResponseStreamChoice|GenerateTokensStreamChoice": (),
    },
}
# The flag that opens the routes on token ids, in 0.30 to 0.32 and in 0.33; before, they are always open.
SCALE_OUT: tuple[Names, ...] = (
    {"vllm.entrypoints.launchers.cli_args": {"BaseFrontendArgs.enable_scale_out": ()}},
    {"vllm.entrypoints.common.cli_args": {"BaseFrontendArgs.enable_scale_out": ()}},
)
# Mixtures of experts on a CPU (from 0.28 on), and their division among ranks by ``--enable-expert-parallel`` (0.30).
EXPERTS_ON_CPU: Names = {
    f"{_EXPERTS}.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod._setup_kernel": ("layer", "w13", "w2")},
    f"{_EXPERTS}.experts.cpu_moe": {"CPUUnquantizedExperts.process_weights_after_loading": ("layer",)},
}
DIVIDED_EXPERTS_ON_CPU: Names = {
    f"{_EXPERTS}.experts.cpu_moe": {"CPUUnquantizedExperts.apply": ("topk_weights", "topk_ids", "expert_map")},
}

# The command that runs the workers of an engine's further nodes.
FURTHER_NODES: Names = {
    "vllm.entrypoints.cli.serve": {"ServeSubcommand.subparser_init": ("subparsers",), "ServeSubcommand.cmd": ("args",)},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": ()},
}


def require_all(version: str, *, cpu: bool) -> None:
    """Raise RuntimeError, naming them, if the installed vLLM lacks any name. Warns of an untested ``version``."""
    needed = {**TOUCHED, **(TOUCHED_ON_CPU if cpu else {})}
    if missing := lacking(needed):
        raise RuntimeError(
            f"vLLM {version} has no {', '.join(missing)}, which rl-async needs inside it; install vLLM {VLLM.versions}"
        )
    if not in_range(version, VLLM.versions):
        log.warning("vLLM %s has not been tried with rl-async, which is tested with %s", version, VLLM.versions)


def lacking(names: Names) -> list[str]:
    """Return which of these the installed vLLM lacks, or defines without one of the parameters."""
    return [
        f"{module}.{name}"
        for module, of_module in names.items()
        for name, parameters in of_module.items()
        if not any(_has(module, alternative, parameters) for alternative in name.split("|"))
    ]


def _has(module: str, name: str, parameters: tuple[str, ...]) -> bool:
    try:
        found = attrgetter(name)(import_module(module))
    except (ModuleNotFoundError, AttributeError):
        return False
    return not parameters or set(parameters) <= inspect.signature(found).parameters.keys()
