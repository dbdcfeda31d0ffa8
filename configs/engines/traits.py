"""EngineTraits: the ways in which kinds of rollout engines differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
