"""The processes of rollout engines, by kind."""

import math
from collections.abc import Callable
from pathlib import Path

from rl_async.configs.derived.engines import engine_kinds
from rl_async.configs.engines import EngineKind
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.memory import ModelSize, engine_bytes
from rl_async.launcher.plan.spec import ProcessSpec, environment, module


def engine_spec(config: RunConfig, run_dir: Path, index: int, gpu: int | None, size: ModelSize | None) -> ProcessSpec:
    """Engine number ``index`` of a run, on one GPU or (None) on the CPU."""
    kind = engine_kinds(config)[index]
    name = f"engine-{index}"
    argv, env = COMMANDS[kind](config, run_dir, index, gpu)
    if gpu is not None:
        env = env | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return ProcessSpec(
        name=name,
        role="engine",
        argv=(*argv, "--port", f"{{{name}}}"),
        env=environment(config) | env,
        device="cpu" if gpu is None else f"cuda:{gpu}",
        max_restarts=config.launcher.max_restarts,
        memory_bytes=engine_bytes(config, size),
        engine_kind=kind,
    )


Command = tuple[tuple[str, ...], dict[str, str]]  # arguments but for the port, and variables


def _embedded(config: RunConfig, run_dir: Path, index: int, gpu: int | None) -> Command:
    flags = ("--run", str(run_dir), "--index", str(index), "--host", f"{{engine-{index}.host}}")
    return module("rollout_server", *flags), {}


def _vllm(config: RunConfig, run_dir: Path, index: int, gpu: int | None) -> Command:
    """vLLM's server in our shell (``rollout_server/vllm``), which adds what every vLLM of ours needs."""
    rollout = config.rollout
    flags = {
        "--model": config.model.path,
        "--host": f"{{engine-{index}.host}}",
        "--dtype": config.model.dtype,
        "--max-model-len": str(rollout.max_model_len),
        "--max-num-seqs": str(rollout.max_batch_size),
        "--seed": str(config.seed + 10_000 + index),  # else engines would all draw the same
    }
    argv = module("rollout_server.vllm", *(word for flag in flags.items() for word in flag))
    if gpu is not None and config.mode == "colocated":
        argv += ("--enable-sleep-mode",)
    env = {}
    if gpu is None:  # nobind: else every vLLM takes the same, nearly all, cores and ignores launcher.threads
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(rollout.cpu_cache_bytes / 2**30)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return (rollout.python or argv[0], *argv[1:], *rollout.engine_args), env


def _sglang(config: RunConfig, run_dir: Path, index: int, gpu: int | None) -> Command:
    """SGLang's server in our shell (``rollout_server/sglang``)."""
    rollout = config.rollout
    flags = {
        "--model-path": config.model.path,
        "--host": f"{{engine-{index}.host}}",
        "--dtype": config.model.dtype,
        "--context-length": str(rollout.max_model_len),
        "--max-running-requests": str(rollout.max_batch_size),
        "--random-seed": str(config.seed + 10_000 + index),  # else engines would all draw the same
    }
    argv = module("rollout_server.sglang", *(word for flag in flags.items() for word in flag))
    # The process group meets on this machine; the host name may resolve to an interface that is down or filtered.
    return (rollout.python or argv[0], *argv[1:], *rollout.engine_args), {"GLOO_SOCKET_IFNAME": "lo"}


COMMANDS: dict[EngineKind, Callable[[RunConfig, Path, int, int | None], Command]] = {
    "embedded": _embedded,
    "vllm": _vllm,
    "sglang": _sglang,
}
