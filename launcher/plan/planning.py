"""The plan of a run: its processes, devices and ports. ``plan`` is pure, so that ``--dry-run`` shows exactly the
processes that would be started.

A ProcessSpec is one process: its command, its device, and how often it may be restarted. Configured ports are checked,
and free ones are chosen for the rest. Engines are started as the traits of their kinds (``configs/engines.py``)
describe. The mode determines which process uses which device. It also determines how weights travel, in
``configs/derived.py``, and when engines sleep, in ``weight_sync/coordinator.py``.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Literal

from rl_async import tracing
from rl_async.accelerators import select_devices
from rl_async.configs.checks import plays_itself
from rl_async.configs.derived import (
    Transport,
    adapter_way,
    engine_kinds,
    is_encrypted,
    lent_engines,
    resolve_transport,
    secret_variables,
    warm_start_of,
)
from rl_async.configs.engines import ENGINES
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.launcher.plan.memory import (
    EngineMemory,
    ModelSize,
    Place,
    engine_bytes,
    engine_memory,
    memory_budget,
    queue_bytes,
    reward_model_bytes,
    shard_bytes,
    trainer_bytes,
    worker_bytes,
)
from rl_async.messages import LENT
from rl_async.process.http_auth import HOSTS, TOKEN_FILE, token_file
from rl_async.process.private_folder import socket_file
from rl_async.process.role import own_module, wait_policy
from rl_async.process.run_files import Endpoints, MemoryBudget
from rl_async.reward_loop.model_client import api_key_variables
from rl_async.transfer_queue.auth import SCHEME

HOST = "127.0.0.1"


@dataclass(frozen=True)
class PortWish:
    """A port that a process needs; ``port`` 0 stands for any free one. ``key`` is the config key that sets it."""

    name: str
    port: int = 0
    key: str = ""


def assign_ports(wishes: Sequence[PortWish]) -> dict[str, int]:
    """Assign a port to every wish, by name.

    Raises ConfigError naming the key if a configured port is taken or configured twice. All sockets are held open
    until every port is known, so that no port is assigned twice.
    """
    ports: dict[str, int] = {}
    with ExitStack() as held:
        # Configured ports come first, so that no free port that is chosen takes one of them.
        for wish in sorted(wishes, key=lambda wish: wish.port == 0):
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # A server may listen on a port that is still in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, wish.port))
                listener.listen(1)
            except (OSError, OverflowError) as error:
                place = f"{wish.key}: " if wish.key else ""
                raise ConfigError(
                    f"{place}port {wish.port} for {wish.name} cannot be used ({error}); choose another one, or 0 for "
                    "a free one"
                ) from error
            ports[wish.name] = listener.getsockname()[1]
    return ports


def hold_ports(host: str, wishes: Sequence[PortWish]) -> list[socket.socket]:
    """Bind one socket per wish to its port of ``host``, without listening.

    While the socket is open, the kernel gives the port to no other process, but a server that sets SO_REUSEADDR, as all
    of ours do, may listen on it. Raises ConfigError naming the key if a configured port is taken.
    """
    held: list[socket.socket] = []
    for wish in wishes:
        held.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held[-1].bind((host, wish.port))
        except (OSError, OverflowError) as error:
            for other in held:
                other.close()
            place = f"{wish.key}: " if wish.key else ""
            raise ConfigError(f"{place}port {wish.port} for {wish.name} cannot be used on {host} ({error})") from error
    return held


HOST_OF = re.compile(r"\{([\w-]+)\.host\}")
# Processes without a host have the loopback address.
THIS_MACHINE: Mapping[str, str] = {}

Role = Literal["prepare", "queue", "shard", "engine", "reward-model", "worker", "trainer"]

SECRETS: Mapping[str, Role] = {
    "RL_ASYNC_REDIS_PASSWORD": "queue",
    "WANDB_API_KEY": "trainer",
    "SWANLAB_API_KEY": "trainer",
}
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start. In ``argv`` and ``env``, ``{name}`` is replaced by the port of that name, and ``{name.host}``
    by the address of its host. ``memory_bytes`` is None if unknown."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    # A process without GPUs computes on the CPU, if at all.
    gpus: tuple[int, ...] = ()
    # The processes of an engine that compute.
    ranks: int = 1
    max_restarts: int = 0
    # Appended to ``argv`` at the first start, and at every later one.
    first_argv: tuple[str, ...] = ()
    restart_argv: tuple[str, ...] = ()
    memory_bytes: int | None = None
    # The registry lists each engine with its kind.
    engine_kind: str = ""
    # The further processes of an engine of several nodes: they start, live and end with this one.
    followers: tuple["ProcessSpec", ...] = ()

    @property
    def device(self) -> str:
        """The device as ``cpu`` or ``gpu:0,1``."""
        return f"gpu:{','.join(map(str, self.gpus))}" if self.gpus else "cpu"

    def command(
        self, ports: Mapping[str, int], hosts: Mapping[str, str] = THIS_MACHINE, *, restarted: bool = False
    ) -> list[str]:
        """Return the command line with ports and hosts filled in."""
        argv = self.argv + (self.restart_argv if restarted else self.first_argv)
        return [fill(part, ports, hosts) for part in argv]

    def environment(self, ports: Mapping[str, int], hosts: Mapping[str, str] = THIS_MACHINE) -> dict[str, str]:
        return {key: fill(value, ports, hosts) for key, value in self.env.items()}

    def mentions(self, name: str) -> bool:
        """Whether ``argv`` or ``env`` contain the port or the host of ``name``."""
        return any(f"{{{name}}}" in text or f"{{{name}.host}}" in text for text in (*self.argv, *self.env.values()))


def fill(text: str, ports: Mapping[str, int], hosts: Mapping[str, str] = THIS_MACHINE) -> str:
    """Replace ``{name}`` by a port number and ``{name.host}`` by an address."""
    for name, port in ports.items():
        text = text.replace(f"{{{name}}}", str(port))
    return HOST_OF.sub(lambda match: hosts.get(match[1], HOST), text)


def http_environment(config: RunConfig, run_dir: Path) -> dict[str, str]:
    """Return variables that give an HTTP server without access to the run folder its token, its host names and the
    endpoint for its spans."""
    found = {TOKEN_FILE: str(token_file(run_dir, "engines")), HOSTS: ",".join(config.launcher.http_hosts)}
    endpoint = config.tracking.otlp_endpoint
    return found | ({tracing.VARIABLES[0]: endpoint} if endpoint else {})


def secrets(config: RunConfig) -> dict[str, set[Role]]:
    """Return the variables that hold secrets, each with the roles that use it."""
    readers: dict[str, set[Role]] = {name: {role} for name, role in SECRETS.items()}
    readers |= {name: {"worker"} for name in (*api_key_variables(config), *secret_variables(config.agent.mcp))}
    for endpoint in config.algorithm.teacher.endpoints.values() if config.algorithm.teacher else ():
        if endpoint.api_key_env:
            readers.setdefault(endpoint.api_key_env, set()).add("trainer")
    return readers


def environment(config: RunConfig, role: Role) -> dict[str, str]:
    """Return variables that hide other roles' secrets, limit thread pools, and keep idle threads from spinning."""
    threads = str(config.launcher.threads or 1)
    return {
        **{name: "" for name, users in secrets(config).items() if role not in users},
        THREADS: threads,
        "MKL_NUM_THREADS": threads,
        **wait_policy(),
        "TOKENIZERS_PARALLELISM": "false",
        # A bar would be the last line of a log.
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def engine_place(config: RunConfig, index: int, gpus: tuple[int, ...], trainers: tuple[int, ...]) -> Place:
    """Return where engine number ``index`` computes."""
    kind, opens = engine_kinds(config)[index], _opened(config, gpus, trainers)
    return Place(f"engine-{index}", gpus, config.mode == "colocated", kind, opens)


def lent_place(config: RunConfig, index: int, trainers: tuple[int, ...]) -> Place:
    """Return where the lent engine number ``index`` computes: on GPUs of the ``trainers``, or on the CPU."""
    each = config.rollout.ranks
    gpus = trainers[index * each : (index + 1) * each]
    return Place(f"{LENT}{index}", gpus, True, engine_kinds(config)[0], _opened(config, gpus, trainers))


def _opened(config: RunConfig, gpus: tuple[int, ...], trainers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the GPUs of trainer ranks from whose memory an engine on other ``gpus`` takes weights."""
    if not gpus or resolve_transport(config) != "ipc":
        return ()
    return tuple(sorted(set(trainers) - set(gpus)))


def engine_spec(
    config: RunConfig,
    run_dir: Path,
    index: int,
    place: Place,
    size: ModelSize | None,
    memory: EngineMemory,
    node: int = 0,
) -> ProcessSpec:
    """Return the process of a node of engine number ``index`` of a run; the first has the others as followers."""
    traits, nodes = ENGINES[place.kind], config.rollout.nodes
    whole = engine_bytes(config, size, on_gpu=bool(place.gpus))
    each = len(place.gpus) // nodes
    name, gpus = node_name(place.process, node), place.gpus[node * each : (node + 1) * each]
    env = {**traits.variables, **(select_devices((*gpus, *place.opens)) if gpus else traits.cpu_variables)}
    if traits.package:
        env |= http_environment(config, run_dir)
    if nodes > 1:
        env[traits.node_address] = f"{{{name}.host}}"
    others = range(1, 1 if node else nodes)
    return ProcessSpec(
        name=name,
        role="engine",
        argv=_argv(config, run_dir, index, node, place, memory, routes=size is not None and size.experts > 0),
        env=environment(config, "engine") | env,
        gpus=gpus,
        ranks=config.rollout.ranks // nodes,
        max_restarts=config.launcher.max_restarts,
        memory_bytes=None if whole is None else whole // nodes,
        engine_kind=place.kind,
        followers=tuple(engine_spec(config, run_dir, index, place, size, memory, other) for other in others),
    )


def node_name(engine: str, node: int) -> str:
    """Return the name of an engine's process on one of its nodes; the first has that of the engine."""
    return f"{engine}-node-{node}" if node else engine


def meeting_port(engine: str) -> str:
    """Return the name of the port where the nodes of an engine meet, on its first node."""
    return f"{engine}-nodes"


def _argv(
    config: RunConfig, run_dir: Path, index: int, node: int, place: Place, memory: EngineMemory, *, routes: bool
) -> tuple[str, ...]:
    """Return the command line of an engine: rl-async's own reads the run's config, other software gets flags.

    ``routes`` says whether the model has experts, whose choice the trainer may replay.
    """
    traits, name, on_gpu = ENGINES[place.kind], node_name(place.process, node), bool(place.gpus)
    host = ("--host", f"{{{name}.host}}")
    limits = {flag: getattr(memory, attribute) for flag, attribute in traits.memory_flags.items()}
    of_memory = [word for flag, value in limits.items() if value is not None for word in (flag, str(value))]
    if not traits.package:
        numbered = ("--index", str(index), *host, "--port", f"{{{name}}}")
        # Beside another kind of engine the arguments are that one's.
        words = [word for word in config.rollout.engine_args if word in traits.words]
        return own_module(traits.module, "--run", str(run_dir), *numbered, *of_memory, *words)
    argv = own_module(traits.module, *host)
    special = {
        "rollout.port": f"{{{name}}}",
        # With a common seed, all engines would draw the same samples.
        "seed": str(config.seed + 10_000 + index),
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
    if config.rollout.nodes > 1:
        meeting = {"rank": node, "host": f"{{{place.process}.host}}", "port": f"{{{meeting_port(place.process)}}}"}
        argv += tuple(word for flag, value in traits.node_flags.items() for word in (flag, value.format(**meeting)))
        argv += traits.follower_flags if node else ()
    if config.trainer.lora is not None and traits.adapter_flags and adapter_way(config) == "load":
        rank = config.trainer.lora.rank
        argv += (*traits.adapter_flags, str(min(size for size in traits.adapter_ranks if size >= rank)))
    if config.rollout.quantization != "none":
        argv += traits.quantization[config.rollout.quantization]
    given = config.rollout.engine_args
    # In float32 the logits are float32 anyway.
    if on_gpu and config.model.dtype != "float32":
        given = traits.with_float32_logits(given)
    return (config.rollout.python or argv[0], *argv[1:], *given)


REWARD_MODEL = "reward-model"
GATEWAY = "gateway"
# The port where trainer ranks meet.
RENDEZVOUS = "rendezvous"


@dataclass(frozen=True)
class Plan:
    """The processes of a run, ordered as data flows through them, and their ports."""

    mode: str
    transport: Transport
    prepare: ProcessSpec | None
    queue: ProcessSpec
    engines: tuple[ProcessSpec, ...]
    workers: tuple[ProcessSpec, ...]
    trainers: tuple[ProcessSpec, ...]
    ports: tuple[PortWish, ...]
    start_timeout_s: float
    stop_timeout_s: float
    reward_model: ProcessSpec | None = None
    shards: tuple[ProcessSpec, ...] = ()
    # The address for processes on this machine, with the port still to be filled in.
    queue_address: str = f"tcp://{HOST}:{{queue}}"
    # The hosts of local processes that do not listen on loopback.
    hosts: Mapping[str, str] = field(default_factory=dict)
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    # Whether the run folder lists the engines and the reward model for Prometheus.
    prometheus: bool = False

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All processes that live as long as the run."""
        reward_model = () if self.reward_model is None else (self.reward_model,)
        engines = (spec for engine in self.engines for spec in (engine, *engine.followers))
        return (self.queue, *self.shards, *engines, *reward_model, *self.workers, *self.trainers)


def plan(
    config: RunConfig,
    run_dir: Path,
    *,
    size: ModelSize | None = None,
    gpus: int = 0,
    capacity: int | None = None,
    resume: bool = False,
) -> Plan:
    """Plan a run in ``run_dir`` on ``gpus`` GPUs, of this machine or of a cluster.

    ``capacity`` is the memory of each GPU in bytes or, without GPUs, that of the machine, if it is known. Raises
    UserError if it does not suffice.
    """
    devices = assign_devices(config, gpus)
    places = [engine_place(config, i, devices.engine(i), devices.trainers) for i in range(engines(config))]
    places += [lent_place(config, index, devices.trainers) for index in range(lent_engines(config))]
    turns = config.mode == "colocated" or config.trainer.lend_devices
    ranks = [Place(f"trainer-{rank}", devices.trainers[rank : rank + 1], turns) for rank in range(config.trainer.ranks)]
    memory = MemoryBudget() if size is None else memory_budget(config, size, places, ranks, capacity)
    return Plan(
        mode=config.mode,
        transport=resolve_transport(config),
        prepare=_prepare(config, run_dir),
        queue=_queue(config, run_dir),
        engines=tuple(
            engine_spec(config, run_dir, index, place, size, engine_memory(memory, config, place))
            for index, place in enumerate(places)
        ),
        workers=_workers(config, run_dir),
        trainers=tuple(_trainer(config, run_dir, i, devices, size, resume) for i in range(config.trainer.ranks)),
        ports=_ports(config),
        start_timeout_s=config.rollout.start_timeout_s,
        stop_timeout_s=config.launcher.stop_timeout_s,
        reward_model=_reward_model(config, run_dir, devices) if serves_reward_model(config) else None,
        shards=tuple(_shard(config, run_dir, f"shard-{i}") for i in range(config.queue.shards)),
        queue_address=queue_address(config, run_dir),
        hosts={f"shard-{i}": config.queue.host for i in range(config.queue.shards)},
        memory=memory,
        prometheus=config.tracking.prometheus,
    )


def serves_reward_model(config: RunConfig) -> bool:
    """Whether the run starts a reward model: a scorer uses one, and reward.model.url is not set."""
    model = config.reward.model
    wanted = any(term.name == "reward_model" for term in config.reward.functions) and not config.rollout.replay
    return wanted and model is not None and not model.url


def engines(config: RunConfig) -> int:
    """Return how many engines the run starts; one that replays recorded samples starts none."""
    return 0 if config.rollout.replay else config.rollout.engines


def workers(config: RunConfig) -> int:
    """Return how many agent workers a run without a gateway starts; a replay only needs one."""
    return 1 if config.rollout.replay else config.agent.workers


def gateway_of(config: RunConfig) -> GatewayConfig | None:
    """Return the gateway that the run starts; None without one, and in a replay."""
    return None if config.rollout.replay else config.agent.gateway


@dataclass(frozen=True)
class Devices:
    """The GPU numbers of each engine, one for each of its ranks, and of each trainer rank.

    Processes without GPU numbers compute on the CPU. ``unused`` is the next GPU.
    """

    engines: tuple[tuple[int, ...], ...] = ()
    trainers: tuple[int, ...] = ()
    unused: int | None = None

    def engine(self, index: int) -> tuple[int, ...]:
        """Return the GPU numbers of an engine, none on the CPU."""
        return self.engines[index] if self.engines else ()


def assign_devices(config: RunConfig, gpus: int) -> Devices:
    """Assign GPUs: colocated, engines and trainer ranks both start at GPU 0; disaggregated, engines follow the ranks.

    With too few GPUs the numbers wrap around, and processes share GPUs, but never two ranks of one engine.
    """
    if gpus == 0:
        return Devices()
    ranks, each = config.trainer.ranks, config.rollout.ranks
    first = 0 if config.mode == "colocated" else ranks
    starts = [first + i * each for i in range(engines(config))]
    unused = max(first + len(starts) * each, ranks) % gpus
    if config.model.device == "cpu":
        return Devices(unused=unused)
    return Devices(
        engines=tuple(tuple((start + i) % gpus for i in range(each)) for start in starts),
        trainers=tuple(i % gpus for i in range(ranks)),
        unused=unused,
    )


def queue_address(config: RunConfig, run_dir: Path) -> str:
    """Return the queue's address for processes on this machine: TCP with ``{queue}`` for its port, or a socket file."""
    host = HOST if config.queue.host == "0.0.0.0" else config.queue.host
    return f"tcp://{host}:{{queue}}" if is_encrypted(config.queue) else _socket_file(run_dir, "queue")


def _socket_file(run_dir: Path, name: str) -> str:
    return f"{SCHEME}{socket_file(run_dir, name)}"


def _prepare(config: RunConfig, run_dir: Path) -> ProcessSpec | None:
    if config.data.make is None and warm_start_of(config) is None:
        return None
    argv = own_module("launcher.runs.prepare", "--config", str(run_dir / "config.yaml"))
    return ProcessSpec(name="prepare", role="prepare", argv=argv, env=environment(config, "prepare"))


def _queue(config: RunConfig, run_dir: Path) -> ProcessSpec:
    address = f"tcp://{config.queue.host}:{{queue}}"
    if not is_encrypted(config.queue):
        address = queue_address(config, run_dir)
    argv = own_module("transfer_queue", "--run", str(run_dir), "--address", address)
    return ProcessSpec(
        name="queue",
        role="queue",
        argv=argv,
        first_argv=("--relaunched",),
        env=environment(config, "queue"),
        max_restarts=0 if config.queue.journal == "memory" else config.launcher.max_restarts,
        memory_bytes=queue_bytes(config),
    )


def _shard(config: RunConfig, run_dir: Path, name: str) -> ProcessSpec:
    own = f"tcp://{{{name}.host}}:{{{name}}}" if is_encrypted(config.queue) else _socket_file(run_dir, name)
    flags = ("--run", str(run_dir), "--queue", queue_address(config, run_dir), "--address", own, "--name", name)
    return ProcessSpec(
        name=name,
        role="shard",
        argv=own_module("transfer_queue.shard", *flags),
        env=environment(config, "shard"),
        max_restarts=config.launcher.max_restarts,
        memory_bytes=shard_bytes(config),
    )


def _reward_model(config: RunConfig, run_dir: Path, devices: Devices) -> ProcessSpec:
    """Place the reward model on the GPU after those of engines and trainers, or share one if there are too few."""
    model = config.reward.model
    assert model is not None
    gpu = None if model.device == "cpu" else devices.unused
    env = environment(config, "reward-model") | http_environment(config, run_dir)
    flags = {
        "--model": model.path,
        "--host": f"{{{REWARD_MODEL}.host}}",
        "--port": f"{{{REWARD_MODEL}}}",
        "--dtype": model.dtype,
        "--device": model.device,
        "--batch-size": str(model.batch_size),
        "--threads": str(config.launcher.threads or 1),
    }
    return ProcessSpec(
        name=REWARD_MODEL,
        role="reward-model",
        argv=own_module("reward_loop.server", *(word for flag in flags.items() for word in flag)),
        env=env if gpu is None else env | select_devices([gpu]),
        gpus=() if gpu is None else (gpu,),
        max_restarts=config.launcher.max_restarts,
        memory_bytes=reward_model_bytes(model),
    )


def _workers(config: RunConfig, run_dir: Path) -> tuple[ProcessSpec, ...]:
    """Return the processes that play episodes: agent workers, or a gateway and environments that play through it."""
    if (gateway := gateway_of(config)) is not None:
        served = _worker(config, run_dir, GATEWAY, "agent_loop.gateway", "--port", f"{{{GATEWAY}}}")
        url = f"http://{HOST if gateway.host == '0.0.0.0' else gateway.host}:{{{GATEWAY}}}"
        hosts = config.agent.environment_hosts
        players = range(hosts.processes if hosts is not None and plays_itself(config) else 0)
        return (served, *(_player(config, run_dir, number, url) for number in players))
    numbers = range(workers(config))
    return tuple(_worker(config, run_dir, f"worker-{i}", "agent_loop", "--index", str(i)) for i in numbers)


def _worker(config: RunConfig, run_dir: Path, name: str, program: str, *flags: str) -> ProcessSpec:
    argv = own_module(program, "--run", str(run_dir), *flags, "--queue", queue_address(config, run_dir))
    if serves_reward_model(config):
        argv += ("--reward-model", f"http://{{{REWARD_MODEL}.host}}:{{{REWARD_MODEL}}}")
    return ProcessSpec(
        name=name,
        role="worker",
        argv=argv,
        env=environment(config, "worker"),
        max_restarts=config.launcher.max_restarts,
        memory_bytes=worker_bytes(config),
    )


def _player(config: RunConfig, run_dir: Path, number: int, gateway: str) -> ProcessSpec:
    """Return the process of an environment that plays through the gateway, without any of the run's secrets."""
    flags = ("--run", str(run_dir), "--gateway", gateway, "--index", str(number))
    return ProcessSpec(
        name=f"environment-{number}",
        role="worker",
        argv=own_module("agent_loop.environments.player", *flags),
        env=environment(config, "prepare"),
        max_restarts=config.launcher.max_restarts,
    )


def _trainer(
    config: RunConfig, run_dir: Path, rank: int, devices: Devices, size: ModelSize | None, resume: bool
) -> ProcessSpec:
    flags = ("--run", str(run_dir), "--queue", queue_address(config, run_dir))
    argv = own_module("trainer", *flags, "--host", f"{{trainer-{rank}.host}}")
    return ProcessSpec(
        name=f"trainer-{rank}",
        role="trainer",
        argv=(*argv, "--resume") if resume else argv,
        env=_rank_environment(config, rank, devices),
        gpus=devices.trainers[rank : rank + 1],
        max_restarts=config.launcher.max_restarts,
        restart_argv=() if resume else ("--resume",),
        memory_bytes=trainer_bytes(config, size),
    )


def finetune_ranks(config: RunConfig, run_dir: Path, gpus: int) -> tuple[ProcessSpec, ...]:
    """Return the processes of supervised fine-tuning: trainer ranks only."""
    devices = assign_devices(config, gpus)
    return tuple(
        ProcessSpec(
            name=f"trainer-{rank}",
            role="trainer",
            argv=own_module("trainer.finetune", "--run", str(run_dir)),
            env=_rank_environment(config, rank, devices),
            gpus=devices.trainers[rank : rank + 1],
            max_restarts=config.launcher.max_restarts,
        )
        for rank in range(config.trainer.ranks)
    )


def _rank_environment(config: RunConfig, rank: int, devices: Devices) -> dict[str, str]:
    """Return the rendezvous and the devices of all ranks; each rank picks its own device."""
    env = environment(config, "trainer") | {
        "RANK": str(rank),
        "WORLD_SIZE": str(config.trainer.ranks),
        "MASTER_ADDR": "{trainer-0.host}",
        "MASTER_PORT": f"{{{RENDEZVOUS}}}",
    }
    if devices.trainers:
        env |= select_devices(sorted(set(devices.trainers)))
    return env


def _ports(config: RunConfig) -> tuple[PortWish, ...]:
    first = config.rollout.port
    of_engines = (PortWish(f"engine-{i}", first + i if first else 0, "rollout.port") for i in range(engines(config)))
    on_lent = (PortWish(f"{LENT}{index}") for index in range(lent_engines(config)))
    nodes = range(1, config.rollout.nodes)
    of_nodes = (PortWish(node_name(f"engine-{i}", node)) for i in range(engines(config)) for node in nodes)
    meetings = (PortWish(meeting_port(f"engine-{i}")) for i in range(engines(config)) if nodes)
    wishes = [*of_engines, *on_lent, *of_nodes, *meetings, PortWish(RENDEZVOUS)]
    if is_encrypted(config.queue):
        shards = (PortWish(f"shard-{i}") for i in range(config.queue.shards))
        wishes = [PortWish("queue", config.queue.port, "queue.port"), *shards, *wishes]
    if config.reward.model is not None and serves_reward_model(config):
        wishes.append(PortWish(REWARD_MODEL, config.reward.model.port, "reward.model.port"))
    if (gateway := gateway_of(config)) is not None:
        wishes.append(PortWish(GATEWAY, gateway.port, "agent.gateway.port"))
    return tuple(wishes)


def endpoints(
    config: RunConfig, run_dir: Path, ports: Mapping[str, int], hosts: Mapping[str, str] = THIS_MACHINE
) -> Endpoints:
    """Return the addresses of the run's servers."""
    gateway = gateway_of(config)
    return Endpoints(
        queue=fill(queue_address(config, run_dir), ports),
        reward_model=f"http://{hosts.get(REWARD_MODEL, HOST)}:{ports[REWARD_MODEL]}" if REWARD_MODEL in ports else "",
        gateway="" if gateway is None else f"http://{gateway.host}:{ports[GATEWAY]}",
    )
