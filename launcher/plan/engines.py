"""The processes of rollout engines, as the traits of their kinds (``configs/engines``) describe them."""

from operator import attrgetter
from pathlib import Path

from rl_async.configs.derived.engines import engine_kinds
from rl_async.configs.engines import ENGINES
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.memory import ModelSize, engine_bytes
from rl_async.launcher.plan.spec import ProcessSpec, environment, http_environment, module


def engine_spec(config: RunConfig, run_dir: Path, index: int, gpu: int | None, size: ModelSize | None) -> ProcessSpec:
    """Return the process of engine number ``index`` of a run, on one GPU or (None) on the CPU."""
    kind = engine_kinds(config)[index]
    traits, name = ENGINES[kind], f"engine-{index}"
    env = dict(traits.variables)
    if gpu is None:
        env |= {key: value.format(rollout=config.rollout) for key, value in traits.cpu_variables.items()}
    else:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if traits.package:
        env |= http_environment(config, run_dir)
    return ProcessSpec(
        name=name,
        role="engine",
        argv=_argv(config, run_dir, index, gpu),
        env=environment(config, "engine") | env,
        device="cpu" if gpu is None else f"cuda:{gpu}",
        max_restarts=config.launcher.max_restarts,
        memory_bytes=engine_bytes(config, size),
        engine_kind=kind,
    )


def _argv(config: RunConfig, run_dir: Path, index: int, gpu: int | None) -> tuple[str, ...]:
    """Return the command line: an engine of rl-async reads the run's config, other software gets all of it as flags."""
    traits, name = ENGINES[engine_kinds(config)[index]], f"engine-{index}"
    host = ("--host", f"{{{name}.host}}")
    if not traits.package:
        return module(traits.module, "--run", str(run_dir), "--index", str(index), *host, "--port", f"{{{name}}}")
    argv = module(traits.module, *host)
    special = {
        "rollout.port": f"{{{name}}}",
        "seed": str(config.seed + 10_000 + index),  # else all engines would draw the same samples
    }
    for flag, key in traits.flags.items():
        argv += (flag, special[key] if key in special else str(attrgetter(key)(config)))
    if gpu is not None and config.mode == "colocated":
        argv += traits.sleep_flags
    return (config.rollout.python or argv[0], *argv[1:], *config.rollout.engine_args)
