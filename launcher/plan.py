"""What a run consists of: pure, so that ``--dry-run`` shows exactly what would be started.

The mode decides here, and nowhere else, which process uses which device and how weights travel.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl_async.configs.schema import RunConfig
from rl_async.configs.transport import Transport, resolve_transport
from rl_async.launcher.memory import (
    ModelSize,
    engine_bytes,
    queue_bytes,
    reward_model_bytes,
    trainer_bytes,
    worker_bytes,
)
from rl_async.launcher.ports import HOST, PortWish

Role = Literal["prepare", "queue", "engine", "reward-model", "worker", "trainer"]
REWARD_MODEL = "reward-model"
RENDEZVOUS = "rendezvous"  # the port where trainer ranks meet


@dataclass(frozen=True)
class ProcessSpec:
    """One process. ``{name}`` in ``argv`` and ``env`` stands for the port of that name."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    max_restarts: int = 0
    restart_argv: tuple[str, ...] = ()  # added when it is started again
    memory_bytes: int | None = None  # None: unknown

    def command(self, ports: Mapping[str, int], *, restarted: bool = False) -> list[str]:
        """The command line with ports filled in."""
        argv = self.argv + (self.restart_argv if restarted else ())
        return [fill(part, ports) for part in argv]

    def environment(self, ports: Mapping[str, int]) -> dict[str, str]:
        """``env`` with ports filled in."""
        return {key: fill(value, ports) for key, value in self.env.items()}


@dataclass(frozen=True)
class Plan:
    """Processes in the order of the data, and the ports they want."""

    mode: str
    transport: Transport
    prepare: ProcessSpec | None
    queue: ProcessSpec
    engines: tuple[ProcessSpec, ...]
    workers: tuple[ProcessSpec, ...]
    trainers: tuple[ProcessSpec, ...]
    ports: tuple[PortWish, ...]
    engine_kind: str
    start_timeout_s: float
    stop_timeout_s: float
    reward_model: ProcessSpec | None = None

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All processes that live as long as the run."""
        reward_model = () if self.reward_model is None else (self.reward_model,)
        return (self.queue, *self.engines, *reward_model, *self.workers, *self.trainers)


def fill(text: str, ports: Mapping[str, int]) -> str:
    """Put port numbers in place of ``{name}``."""
    for name, port in ports.items():
        text = text.replace(f"{{{name}}}", str(port))
    return text


def plan(
    config: RunConfig, run_dir: Path, *, size: ModelSize | None = None, gpus: int = 0, resume: bool = False
) -> Plan:
    """The processes of a run in ``run_dir`` on a machine with ``gpus`` GPUs."""
    devices = assign_devices(config, gpus)
    return Plan(
        mode=config.mode,
        transport=resolve_transport(config),
        prepare=_prepare(config, run_dir),
        queue=_queue(config, run_dir),
        engines=tuple(_engine(config, run_dir, i, devices, size) for i in range(config.rollout.engines)),
        workers=tuple(_worker(config, run_dir, i) for i in range(config.agent.workers)),
        trainers=tuple(_trainer(config, run_dir, i, devices, size, resume) for i in range(config.trainer.ranks)),
        ports=_ports(config),
        engine_kind=config.rollout.engine,
        start_timeout_s=config.rollout.start_timeout_s,
        stop_timeout_s=config.launcher.stop_timeout_s,
        reward_model=_reward_model(config, gpus) if serves_reward_model(config) else None,
    )


def serves_reward_model(config: RunConfig) -> bool:
    """Whether the run starts a reward model of its own: a scorer asks one, and no URL says where one is."""
    model = config.reward.model
    wanted = any(term.name == "reward_model" for term in config.reward.functions)
    return wanted and model is not None and not model.url


@dataclass(frozen=True)
class Devices:
    """GPU numbers by engine and by trainer rank; empty: CPU."""

    engines: tuple[int, ...] = ()
    trainers: tuple[int, ...] = ()


def assign_devices(config: RunConfig, gpus: int) -> Devices:
    """Colocated: engines and ranks both count from GPU 0. Disaggregated: engines come after the ranks.

    With fewer GPUs than processes, the numbers wrap around and processes share.
    """
    if config.model.device == "cpu" or gpus == 0:
        return Devices()
    ranks = config.trainer.ranks
    first_engine = 0 if config.mode == "colocated" else ranks
    return Devices(
        engines=tuple((first_engine + i) % gpus for i in range(config.rollout.engines)),
        trainers=tuple(i % gpus for i in range(ranks)),
    )


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"rl_async.{name}", *arguments)


def _env(config: RunConfig) -> dict[str, str]:
    """Thread pools of a size that leaves room for the other processes."""
    threads = str(config.launcher.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


def _prepare(config: RunConfig, run_dir: Path) -> ProcessSpec | None:
    if config.data.make is None and config.sft is None:
        return None
    argv = _module("launcher.prepare", "--config", str(run_dir / "config.yaml"))
    return ProcessSpec(name="prepare", role="prepare", argv=argv, env=_env(config))


def _queue(config: RunConfig, run_dir: Path) -> ProcessSpec:
    argv = _module("transfer_queue", "--run", str(run_dir), "--address", f"tcp://{HOST}:{{queue}}")
    return ProcessSpec(name="queue", role="queue", argv=argv, env=_env(config), memory_bytes=queue_bytes(config))


def _engine(config: RunConfig, run_dir: Path, index: int, devices: Devices, size: ModelSize | None) -> ProcessSpec:
    name = f"engine-{index}"
    gpu = devices.engines[index] if devices.engines else None
    env = _env(config) if gpu is None else _env(config) | {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return ProcessSpec(
        name=name,
        role="engine",
        argv=_module("rollout_server", "--run", str(run_dir), "--index", str(index), "--port", f"{{{name}}}"),
        env=env,
        device="cpu" if gpu is None else f"cuda:{gpu}",
        max_restarts=config.launcher.max_restarts,
        memory_bytes=engine_bytes(config, size),
    )


def _reward_model(config: RunConfig, gpus: int) -> ProcessSpec:
    """The reward model takes the GPU behind those of the others; with too few, it shares."""
    model = config.reward.model
    assert model is not None
    others = config.rollout.engines + (config.trainer.ranks if config.mode == "disaggregated" else 0)
    gpu = None if model.device == "cpu" or gpus == 0 else max(others, config.trainer.ranks) % gpus
    flags = {
        "--model": model.path,
        "--port": f"{{{REWARD_MODEL}}}",
        "--dtype": model.dtype,
        "--device": model.device,
        "--batch-size": str(model.batch_size),
        "--threads": str(config.launcher.threads),
    }
    return ProcessSpec(
        name=REWARD_MODEL,
        role="reward-model",
        argv=_module("reward_loop.server", *(word for flag in flags.items() for word in flag)),
        env=_env(config) if gpu is None else _env(config) | {"CUDA_VISIBLE_DEVICES": str(gpu)},
        device="cpu" if gpu is None else f"cuda:{gpu}",
        max_restarts=config.launcher.max_restarts,
        memory_bytes=reward_model_bytes(model),
    )


def _worker(config: RunConfig, run_dir: Path, index: int) -> ProcessSpec:
    argv = _module("agent_loop", "--run", str(run_dir), "--index", str(index), "--queue", f"tcp://{HOST}:{{queue}}")
    if serves_reward_model(config):
        argv += ("--reward-model", f"http://{HOST}:{{{REWARD_MODEL}}}")
    return ProcessSpec(
        name=f"worker-{index}",
        role="worker",
        argv=argv,
        env=_env(config),
        max_restarts=config.launcher.max_restarts,
        memory_bytes=worker_bytes(config),
    )


def _trainer(
    config: RunConfig, run_dir: Path, rank: int, devices: Devices, size: ModelSize | None, resume: bool
) -> ProcessSpec:
    env = _env(config) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(config.trainer.ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": f"{{{RENDEZVOUS}}}",
    }
    if devices.trainers:  # a rank picks its own among these
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in sorted(set(devices.trainers)))
    argv = _module("trainer", "--run", str(run_dir), "--queue", f"tcp://{HOST}:{{queue}}")
    return ProcessSpec(
        name=f"trainer-{rank}",
        role="trainer",
        argv=(*argv, "--resume") if resume else argv,
        env=env,
        device=f"cuda:{devices.trainers[rank]}" if devices.trainers else "cpu",
        max_restarts=config.launcher.max_restarts,
        restart_argv=() if resume else ("--resume",),
        memory_bytes=trainer_bytes(config, size),
    )


def _ports(config: RunConfig) -> tuple[PortWish, ...]:
    first = config.rollout.port
    engines = (
        PortWish(f"engine-{i}", first + i if first else 0, "rollout.port") for i in range(config.rollout.engines)
    )
    wishes = [PortWish("queue", config.queue.port, "queue.port"), *engines, PortWish(RENDEZVOUS)]
    if config.reward.model is not None and serves_reward_model(config):
        wishes.append(PortWish(REWARD_MODEL, config.reward.model.port, "reward.model.port"))
    return tuple(wishes)
