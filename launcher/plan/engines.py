"""The processes of rollout engines, as the traits of their kinds (``configs/engines``) describe them."""

from operator import attrgetter
from pathlib import Path

from rl_async.accelerators import select_devices
from rl_async.configs.derived import engine_kinds, resolve_transport
from rl_async.configs.engines import ENGINES
from rl_async.configs.schema.run import RunConfig
from rl_async.launcher.plan.budget import EngineMemory, Place
from rl_async.launcher.plan.memory import ModelSize, engine_bytes
from rl_async.launcher.plan.spec import ProcessSpec, environment, http_environment
from rl_async.messages import LENT
from rl_async.process.role import own_module


def engine_place(config: RunConfig, index: int, gpus: tuple[int, ...], trainers: tuple[int, ...]) -> Place:
    """Return where engine number ``index`` computes: a GPU for each of its ranks, or (empty) the CPU."""
    kind, opens = engine_kinds(config)[index], _opened(config, gpus, trainers)
    return Place(f"engine-{index}", gpus, config.mode == "colocated", kind, opens)


def lent_place(config: RunConfig, index: int, trainers: tuple[int, ...]) -> Place:
    """Return where the engine number ``index`` on devices of the ``trainers`` computes (empty: the CPU)."""
    each = config.rollout.ranks
    gpus = trainers[index * each : (index + 1) * each]
    return Place(f"{LENT}{index}", gpus, True, engine_kinds(config)[0], _opened(config, gpus, trainers))


def _opened(config: RunConfig, gpus: tuple[int, ...], trainers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the GPUs of trainer ranks that an engine on ``gpus`` takes weights from, and does not compute on."""
    if not gpus or resolve_transport(config) != "ipc":
        return ()
    return tuple(sorted(set(trainers) - set(gpus)))


def engine_spec(
    config: RunConfig, run_dir: Path, index: int, place: Place, size: ModelSize | None, memory: EngineMemory
) -> ProcessSpec:
    """Return the process of engine number ``index`` of a run."""
    traits, name, gpus = ENGINES[place.kind], place.process, place.gpus
    env = {**traits.variables, **(select_devices((*gpus, *place.opens)) if gpus else traits.cpu_variables)}
    if traits.package:
        env |= http_environment(config, run_dir)
    return ProcessSpec(
        name=name,
        role="engine",
        argv=_argv(config, run_dir, index, place, memory, routes=size is not None and size.experts > 0),
        env=environment(config, "engine") | env,
        gpus=gpus,
        ranks=config.rollout.ranks,
        max_restarts=config.launcher.max_restarts,
        memory_bytes=engine_bytes(config, size, on_gpu=bool(gpus)),
        engine_kind=place.kind,
    )


def _argv(
    config: RunConfig, run_dir: Path, index: int, place: Place, memory: EngineMemory, *, routes: bool
) -> tuple[str, ...]:
    """Return the command line: an engine of rl-async reads the run's config, other software gets all of it as flags.

    ``routes``: the model has experts, whose choice the trainer may replay.
    """
    traits, name, on_gpu = ENGINES[place.kind], place.process, bool(place.gpus)
    host = ("--host", f"{{{name}.host}}")
    limits = {flag: getattr(memory, attribute) for flag, attribute in traits.memory_flags.items()}
    of_memory = [word for flag, value in limits.items() if value is not None for word in (flag, str(value))]
    if not traits.package:
        numbered = ("--index", str(index), *host, "--port", f"{{{name}}}")
        return own_module(traits.module, "--run", str(run_dir), *numbered, *of_memory)
    argv = own_module(traits.module, *host)
    special = {
        "rollout.port": f"{{{name}}}",
        "seed": str(config.seed + 10_000 + index),  # else all engines would draw the same samples
    }
    for flag, key in traits.flags.items():
        argv += (flag, special[key] if key in special else str(attrgetter(key)(config)))
    argv += tuple(of_memory)
    if on_gpu and place.turns:
        argv += traits.sleep_flags
    if on_gpu and routes and config.trainer.router_replay != "never" and config.rollout.pipeline_parallel == 1:
        argv += traits.route_flags
    if config.rollout.expert_parallel > 1:
        argv += traits.expert_flags
    if config.rollout.quantization != "none":
        argv += traits.quantization[config.rollout.quantization]
    return (config.rollout.python or argv[0], *argv[1:], *config.rollout.engine_args)
