"""Traits of SGLang: one or more workers per engine, on GPUs, with SGLang's own weight updates."""

from rl_async.configs.engines.traits import EngineTraits

SGLANG = EngineTraits(
    title="SGLang",
    module="rollout_server.sglang",
    package="sglang",
    versions="==0.5.23",
    install="install `rl-async[sglang]` into an environment; then set rollout.python=DIR/bin/python",
    needs_gpu=True,
    flags={
        "--model-path": "model.path",
        "--dtype": "model.dtype",
        "--context-length": "rollout.max_model_len",
        "--max-running-requests": "rollout.max_batch_size",
        "--tp-size": "rollout.tensor_parallel",
        "--ep-size": "rollout.expert_parallel",
        "--random-seed": "seed",
        "--port": "rollout.port",
    },
    fixed_flags={
        "--skip-tokenizer-init": "",  # requests are token ids; a tokenizer would add its own stop tokens
        "--skip-server-warmup": "",  # its requests to itself would lack the token
    },
    refused_flags=(
        *("--model", "--api-key", "--admin-api-key", "--config", "--grpc-mode", "--smg-grpc-mode", "--ssl-certfile"),
        *("--enable-http2", "--tokenizer-worker-num", "--preferred-sampling-params", "--weight-version"),
        *("--quantization", "--weight-cache-mode", "--enable-lora", "--lora-paths", "--speculative-algorithm"),
        *("--tensor-parallel-size", "--tp", "--expert-parallel-size", "--ep"),
        *("--pp-size", "--pipeline-parallel-size", "--pp"),
        *("--dp-size", "--data-parallel-size", "--dp", "--nnodes", "--disaggregation-mode", "--is-embedding"),
        *("--watermark-key", "--watermark-config", "--watermark-default-enabled", "--watermark-enforce-all"),
    ),
    memory_flags={"--mem-fraction-static": "static_share"},
    # The process group meets on this machine; the host name may resolve to an interface that is down or filtered.
    variables={"GLOO_SOCKET_IFNAME": "lo"},
    transports=("gloo", "nccl"),
    meets_in_files=False,
    holds_weights=False,
    takes_slices=False,
    reports_sleep=False,
    reports_pause=False,
    records_routes=False,  # it has a flag for it, which we have not tried
    json_schemas=False,  # it needs a tokenizer for them
)
