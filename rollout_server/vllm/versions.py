"""The names inside vLLM that our code touches, which a new version may move: found before anything is patched.

The tables are the only list of them. ``register`` (``plugin.py``) refuses to start a vLLM that lacks one of
``TOUCHED``, so that an engine never trains with half of the patches; one that lacks names of a feature refuses that.
``tests/contracts/engines/test_vllm.py`` looks each of them up in the sources of other versions, with the
parameters that we pass. Imports nothing of vLLM by itself.

Below stand the parts of a server that vLLM has from 0.32 on, for older ones: above all the version behind each token.

Weights change only while an engine is paused, after its last step has ended, so a token's version is the one that was
held when its step ended. vLLM's engine core stamps the outputs of each step with the monotonic clock, which all
processes of a machine share; ``WeightVersions`` notes on the same clock when updates finished. Outputs that the server
reads late, behind an update, thus keep their version.

``__main__.py`` calls ``register`` where ``TOKEN_VERSIONS`` are missing.
"""

import inspect
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Mapping
from importlib import import_module
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from rl_async.configs.engines import VLLM, in_range
from rl_async.files import UNDECODABLE
from rl_async.process.http_auth import App, Receive, Scope, Send
from rl_async.weight_sync.protocol import FinishUpdateBody

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
# vLLM's own versions of tokens, from 0.32 on; without them ``WeightVersions`` keeps them, by these.
TOKEN_VERSIONS: Names = {"vllm.v1.engine.output_processor": {"RequestState._weight_version_spans": ()}}
COUNTED_VERSIONS: Names = {
    "vllm.v1.engine.async_llm": {"AsyncLLM.wake_up": ("tags",)},
    "vllm.v1.engine.output_processor": {
        "OutputProcessor.process_outputs": ("engine_core_outputs", "engine_core_timestamp")
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
    f"{_EXPERTS}.experts.cpu_moe": {"CPUUnquantizedExperts.apply": ("topk_weights", "topk_ids", "expert_map")}
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


# Times in seconds of the monotonic clock, ascending, and the version from then on; that of the model's folder as vLLM
# calls it.
HELD: list[tuple[float, str]] = [(0.0, "default")]


class WeightVersions:
    """An ASGI middleware that notes each finished update's version, and answers what such a vLLM cannot.

    These are ``/weight_info`` and ``/weight_checker``, as in vLLM 0.32.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass the request on. The update counts once vLLM has answered 200."""
        match (scope.get("method"), scope.get("path")):
            case ("GET", "/weight_info"):
                await JSONResponse({"weight_version": HELD[-1][1]})(scope, receive, send)
            case ("POST", "/weight_checker"):
                found = await scope["app"].state.engine_client.collective_rpc("weight_checksums")
                await JSONResponse({"checksums": {k: v for worker in found for k, v in worker.items()}})(
                    scope, receive, send
                )
            case ("POST", "/finish_weight_update"):
                await self._finish(scope, receive, send)
            case _:
                await self._app(scope, receive, send)

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        try:
            version = msgspec.json.decode(body, type=FinishUpdateBody).weight_version
        except UNDECODABLE as error:
            return await JSONResponse({"error": str(error)}, 400)(scope, receive, send)

        async def again() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                HELD.append((time.monotonic(), version))
            await send(message)

        await self._app(scope, again, note)


class Tokens(list[int]):
    """Sampled tokens of one part of an answer, and the versions of all tokens of the answer so far.

    vLLM appends the next part to one that waits to be sent. These vLLMs send nothing for a part without tokens, so the
    last one, whose finish reason has to be sent, is true.
    """

    def __init__(self, tokens: Iterable[int], versions: list[dict[str, Any]], *, last: bool) -> None:
        super().__init__(tokens)
        self.versions, self._last = versions, last

    def __bool__(self) -> bool:
        return self._last or len(self) > 0

    def extend(self, later: Iterable[int]) -> None:
        """Append the next part, whose versions are those of both."""
        super().extend(later)
        if isinstance(later, Tokens):
            self.versions, self._last = later.versions, later._last


class Samples(list[Any]):
    """The outputs of a part; their number is that of all samples of the request, as these vLLMs take it for."""

    def __init__(self, outputs: Iterable[Any], total: int) -> None:
        super().__init__(outputs)
        self._total = total

    def __len__(self) -> int:
        return self._total


def register() -> None:
    """Patch vLLM: streams name the versions of tokens in every part, and metrics tell an engine that is half awake."""
    from vllm.entrypoints.scale_out.token_in_token_out import serving
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    process, make = OutputProcessor.process_outputs, RequestState._new_completion_output
    stream, wake = serving.ServingTokens.serve_tokens_stream_generator, AsyncLLM.wake_up

    def noting(processor: Any, outputs: Any, timestamp: float, *arguments: Any, **named: Any) -> Any:
        version = HELD[bisect_right(HELD, timestamp, key=itemgetter(0)) - 1][1]
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            if state is not None and output.new_token_ids:
                starts = state.__dict__.setdefault("rl_async_starts", [])
                if not starts or starts[-1][0] != version:
                    starts.append((version, state.detokenizer.num_output_tokens()))
        return process(processor, outputs, timestamp, *arguments, **named)

    def with_versions(state: Any, *arguments: Any, **named: Any) -> Any:
        output = make(state, *arguments, **named)
        starts, sampled = getattr(state, "rl_async_starts", []), state.detokenizer.num_output_tokens()
        ends = [start for _, start in starts[1:]] + [sampled]
        spans = [{"version": v, "start": start, "end": end} for (v, start), end in zip(starts, ends, strict=False)]
        output.weight_versions = spans
        output.token_ids = Tokens(output.token_ids, spans, last=output.finish_reason is not None)
        return output

    def to_client(handler: Any, request: Any, results: Any, *arguments: Any) -> Any:
        return stream(handler, request, _counted(results, request.sampling_params.n), *arguments)

    async def wake_up(server: Any, tags: Any = None) -> Any:
        answer = await wake(server, tags)
        if server.logger_manager is not None and await server.engine_core.is_sleeping_async():
            server.logger_manager.record_sleep_state(1, 1)
        return answer

    OutputProcessor.process_outputs, RequestState._new_completion_output = noting, with_versions
    serving.ServingTokens.serve_tokens_stream_generator, AsyncLLM.wake_up = to_client, wake_up
    if hasattr(serving, "GenerateResponseStreamChoice"):
        _send_versions(serving)


def _send_versions(serving: Any) -> None:
    class Choice(serving.GenerateResponseStreamChoice):
        """A choice in a part of a stream."""

        weight_versions: list[dict[str, Any]] | None = None

        def __init__(self, **named: Any) -> None:
            super().__init__(**named | {"weight_versions": named["token_ids"].versions})

    class Part(serving.GenerateStreamResponse):
        """A part of a stream, which would otherwise be written without the fields of ``Choice``."""

        choices: list[Choice]

    serving.GenerateResponseStreamChoice, serving.GenerateStreamResponse = Choice, Part


async def _counted(results: AsyncIterator[Any], samples: int) -> AsyncIterator[Any]:
    async for result in results:
        result.outputs = Samples(result.outputs, samples)
        yield result
