"""Which flags of an engine ``rollout.engine_args`` may not name, by kind: those that we set, and those with which an
engine would no longer be one worker whose weights change while it listens on loopback."""

from rl_async.configs.derived.engines import engine_kinds
from rl_async.configs.schema.rollout import EngineKind
from rl_async.configs.schema.run import RunConfig

BREAKS = "it would break training"

VLLM_FLAGS = {
    "--model": "use model.path",
    "--dtype": "use model.dtype",
    "--port": "use rollout.port",
    "--max-model-len": "use rollout.max_model_len",
    "--max-num-seqs": "use rollout.max_batch_size",
    "--seed": "use seed",
} | dict.fromkeys(
    (
        *("--host", "--api-key"),
        *("--enable-scale-out", "--logprobs-mode", "--generation-config", "--weight-transfer-config"),
        *("--quantization", "-q", "--enable-lora"),
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
    ),
    BREAKS,
)

SGLANG_FLAGS = {
    "--model-path": "use model.path",
    "--model": "use model.path",
    "--dtype": "use model.dtype",
    "--port": "use rollout.port",
    "--context-length": "use rollout.max_model_len",
    "--max-running-requests": "use rollout.max_batch_size",
    "--random-seed": "use seed",
} | dict.fromkeys(
    (
        *("--host", "--api-key", "--admin-api-key", "--config", "--grpc-mode", "--smg-grpc-mode", "--ssl-certfile"),
        *("--skip-tokenizer-init", "--tokenizer-worker-num", "--preferred-sampling-params", "--weight-version"),
        *("--quantization", "--weight-cache-mode", "--enable-lora", "--lora-paths", "--speculative-algorithm"),
        *("--tp-size", "--tensor-parallel-size", "--tp", "--pp-size", "--pipeline-parallel-size", "--pp"),
        *("--dp-size", "--data-parallel-size", "--dp", "--nnodes", "--disaggregation-mode", "--is-embedding"),
        *("--watermark-key", "--watermark-config", "--watermark-default-enabled", "--watermark-enforce-all"),
    ),
    BREAKS,
)

REFUSED: dict[EngineKind, dict[str, str]] = {"vllm": VLLM_FLAGS, "sglang": SGLANG_FLAGS}


def engine_args(c: RunConfig) -> str | None:
    """The rule for ``rollout.engine_args``."""
    if not c.rollout.engine_args:
        return None
    kinds = [kind for kind in REFUSED if kind in engine_kinds(c)]
    if not kinds:
        return "rollout.engine_args are flags for vLLM or SGLang, and rollout.engine starts none; leave them out"
    if len(kinds) > 1:
        return "rollout.engine_args would go to vLLM and to SGLang, which have different flags; leave them out"
    for word in c.rollout.engine_args:
        why = REFUSED[kinds[0]].get(word.partition("=")[0].replace("_", "-"))
        if why:
            return f"rollout.engine_args: {word} cannot be given; {why}"
    return None
