"""Checks that this machine has everything a run needs, chooses settings for its processor, and plans the run on it.

The number of threads and the type of the weights (``model.dtype: auto``) depend on the processor; the choice is printed
at the start of a run and recorded in its folder. The disk and the trackers that a run writes to are checked without a
network. Imports nothing heavy.
"""

import configparser
import netrc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

import rl_async
from rl_async.accelerators import accelerator_here, count_gpus
from rl_async.agent_loop.episode import needed_groups
from rl_async.configs.derived import (
    adapter_way,
    compute_type,
    engine_kinds,
    engine_traits,
    resolve_transport,
    warm_start_of,
)
from rl_async.configs.engines import ENGINES
from rl_async.configs.schema.data import ComputeType
from rl_async.configs.schema.run import RunConfig, TrackerName
from rl_async.configs.schema.trainer import SMALL_BUCKET, WayOption
from rl_async.errors import ConfigError, UserError
from rl_async.files import DAMAGE, UNDECODABLE, replace_file
from rl_async.installation import BESIDE_ENGINES, install_beside, version
from rl_async.launcher.plan.artifacts import check_data, checkpoints, needs_preparation
from rl_async.launcher.plan.memory import DTYPE_BYTES, ModelSize, gib, model_size, read_shape, tiny_shape
from rl_async.launcher.plan.planning import THREADS, Plan, assign_devices, engine_place, engines, plan
from rl_async.model_files import refuse_quantized
from rl_async.process.role import own_module
from rl_async.reward_loop.model_client import read_api_key
from rl_async.trainer.families import why_not_shared

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")
FILE = "machine.json"
PROBE_S = 120.0
# The layers of a model with fewer parameters are neither worth dividing among threads nor faster in a smaller type.
SMALL = 10_000_000
# The sizes of a layer if the model's own are unknown: those of a model of about 0.6 billion parameters.
USUAL = (1024, 3072)
TYPES: tuple[ComputeType, ...] = ("float32", "bfloat16")


class Measured(msgspec.Struct, frozen=True):
    """A measurement of ``rl_async.trainer.compute_type``: the GFLOP/s of each type on the CPU, or the name of an
    accelerator and whether it has units for bfloat16."""

    torch: str
    rates: dict[ComputeType, float] = {}
    accelerator: str = ""
    has_bfloat16: bool = False


# Asks torch about a device, "cpu" or "auto", with the hidden sizes of a layer and of its MLP, and a number of threads.
Measure = Callable[[str, tuple[int, int], int], Measured]


class Choice(msgspec.Struct, frozen=True):
    """The type of the weights that a run computes with, the reason, and the measurement behind it."""

    dtype: ComputeType
    why: str
    by: Literal["machine", "config"] = "machine"
    measured: Measured | None = None
    # In a resumed run, ``why`` and ``measured`` are those of its first start, and this compares the present machine.
    here: str = ""

    @property
    def line(self) -> str:
        """Describe the choice in one line, with the key that overrides it."""
        if self.here:
            return f"compute type: {self.dtype} (as at the run's first start; {self.here})"
        how = "" if self.by == "config" else "; model.dtype overrides it"
        return f"compute type: {self.dtype} ({self.why}{how})"


class MachineRecord(msgspec.Struct, frozen=True):
    """The machine that a run was started on, and the settings chosen for it."""

    processor: str
    cores: float
    threads: int | None
    compute: Choice
    # Of rl-async, as at the last start; empty if it is unknown.
    commit: str = ""
    # How weights travel, unless the user decided it.
    weights: str = ""

    @property
    def lines(self) -> list[str]:
        """Describe the choices, with the keys that override them."""
        told = [self.compute.line, *([self.weights] if self.weights else [])]
        if self.threads is None:
            return told
        cores = f"{self.cores:g} {'core' if self.cores == 1 else 'cores'}"
        return [*told, f"threads of each process that computes: {self.threads} ({cores}; launcher.threads)"]


def cores(root: Path = CGROUP, cpus: Path = CPUS, allowed: Sequence[int] | None = None) -> float:
    """Return the number of cores that this process may use at once.

    The hyper-threads of a core count once, since they share its multipliers.
    """
    numbers = sorted(os.sched_getaffinity(0)) if allowed is None else allowed
    found = float(len({_siblings(cpus, number) for number in numbers}))
    version_2 = root / "cpu.max"
    version_1 = root / "cpu" / "cpu.cfs_quota_us", root / "cpu" / "cpu.cfs_period_us"
    if version_2.is_file() and (words := version_2.read_text().split())[0] != "max":
        return min(found, int(words[0]) / int(words[1]))
    if version_1[0].is_file() and (quota := int(version_1[0].read_text())) > 0:
        return min(found, quota / int(version_1[1].read_text()))
    return found


def _siblings(cpus: Path, number: int) -> str:
    """Identify the core of a logical processor by the list of its hyper-threads."""
    file = cpus / f"cpu{number}" / "topology" / "thread_siblings_list"
    return file.read_text().strip() if file.is_file() else str(number)


def with_threads(
    config: RunConfig,
    size: ModelSize | None,
    available: float,
    *,
    engine_ranks: int,
    environment: Mapping[str, str] = os.environ,
) -> RunConfig:
    """Fill in ``launcher.threads`` for ``available`` cores, unless it or OMP_NUM_THREADS is set.

    Processes that compute at the same time share the cores: the ranks of engines and trainer together or, when they
    take turns (colocated), the larger of the two. A model with fewer than ``SMALL`` parameters gets one thread. Raises
    ConfigError for a value of OMP_NUM_THREADS that is not a number.
    """
    if config.launcher.threads is not None:
        return config
    ranks = config.trainer.ranks
    together = max(engine_ranks, ranks) if config.mode == "colocated" else engine_ranks + ranks
    small = size is not None and size.parameters < SMALL
    threads = threads_of_user(environment) or (1 if small else max(1, int(available) // together))
    return msgspec.structs.replace(config, launcher=msgspec.structs.replace(config.launcher, threads=threads))


def threads_of_user(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the value of OMP_NUM_THREADS, or None if it is not set. Raises ConfigError."""
    given = environment.get(THREADS, "").split(",")[0].strip()
    if not given:
        return None
    if not given.isdecimal() or int(given) == 0:
        raise ConfigError(f"{THREADS}={environment[THREADS]}: expected a number of threads; unset it, or correct it")
    return int(given)


def settle(
    config: RunConfig, gpus: int, threads: int, measure: Measure, before: Choice | None = None
) -> tuple[RunConfig, Choice]:
    """Return the config with ``model.dtype: auto`` replaced by a compute type, and the choice.

    ``threads`` are those of a trainer rank. ``measure`` is called only if the choice depends on it. ``before`` is the
    choice at the run's first start: if a machine made it, the run keeps it, and ``here`` says whether this machine
    would choose another type. Raises UserError if the measurement for a new run fails.
    """
    given = config.model.dtype
    if before is not None and before.by == "machine" and given in ("auto", before.dtype):
        choice = msgspec.structs.replace(before, here=_compare(config, gpus, threads, measure, before.dtype))
    elif given == "auto":
        choice = _choose(config, gpus, threads, measure)
    else:
        choice = Choice(given, "model.dtype", by="config")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=choice.dtype)), choice


def _compare(config: RunConfig, gpus: int, threads: int, measure: Measure, kept: ComputeType) -> str:
    """Say whether this machine would choose the same type; the run keeps its own in any case."""
    try:
        now = _choose(config, gpus, threads, measure)
    except UserError as error:
        return f"this machine could not be compared: {error}"
    return f"this machine would choose {f'{now.dtype}: {now.why}' if now.dtype != kept else 'the same'}"


def _choose(config: RunConfig, gpus: int, threads: int, measure: Measure) -> Choice:
    if len(able := types_of_engines(config)) == 1:
        kinds = ",".join(sorted(set(engine_kinds(config))))
        return Choice(able[0], f"for rollout.quantization={config.rollout.quantization} with rollout.engine={kinds}")
    size = model_size(config)
    if size is not None and size.parameters < SMALL:
        return Choice("float32", f"the model has fewer than {SMALL // 10**6} million parameters")
    return choose(gpus if config.model.device != "cpu" else 0, layer_shape(config) or USUAL, threads, measure)


def choose(gpus: int, shape: tuple[int, int], threads: int, measure: Measure) -> Choice:
    """Choose a type for a model that is not small and has layers of this shape.

    An accelerator gets bfloat16 if it has units for it, and a CPU the type that it multiplies faster. GPUs in /dev that
    torch cannot use do not count.
    """
    if gpus and (found := measure("auto", shape, threads)).accelerator:
        if found.has_bfloat16:
            return Choice("bfloat16", f"{found.accelerator} has units for it", measured=found)
        return Choice("float32", f"{found.accelerator} has no units for bfloat16", measured=found)
    found = measure("cpu", shape, threads)
    best, other = sorted(TYPES, key=lambda kind: -found.rates[kind])
    rates = f"{found.rates[best]:.3g} GFLOP/s here, {found.rates[other]:.3g} in {other}"
    return Choice(best, f"{rates}, with {threads} {'thread' if threads == 1 else 'threads'}", measured=found)


def types_of_engines(config: RunConfig) -> tuple[ComputeType, ...]:
    """Return the types that every engine of the run takes weights in."""
    if config.rollout.quantization == "none" or config.rollout.replay:
        return TYPES
    return tuple(
        kind for kind in TYPES if all(kind in them.quantized_dtypes for them in engine_traits(config).values())
    )


def layer_shape(config: RunConfig) -> tuple[int, int] | None:
    """Return the hidden sizes of the policy and of its MLPs or experts; None if ``config.json`` lacks them."""
    makes = warm_start_of(config)
    shape = read_shape("model.path", Path(config.model.path))
    if shape is None and makes is not None:
        started = makes.pretrained
        shape = tiny_shape(makes) if started is None else read_shape("warm_start.pretrained.path", Path(started.path))
    shape = shape or {}
    shape = shape | (shape.get("text_config") or {})
    inner = shape.get("moe_intermediate_size") or shape.get("intermediate_size")
    return (int(shape["hidden_size"]), int(inner)) if shape.get("hidden_size") and inner else None


def ask_torch(device: str, shape: tuple[int, int], threads: int) -> Measured:
    """Run the measurement in a separate process. Raises UserError if it fails."""
    hidden, inner = shape
    flags = ("--device", device, "--hidden", str(hidden), "--inner", str(inner), "--threads", str(threads))
    command = own_module("trainer.compute_type", *flags)
    environment = {**os.environ, THREADS: str(threads)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_S, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise UserError(f"model.dtype=auto: torch could not be asked ({last}); set float32 or bfloat16") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"model.dtype=auto: torch could not be asked ({error}); set float32 or bfloat16") from error
    try:
        return msgspec.json.decode(done.stdout.rstrip().rpartition("\n")[2], type=Measured)
    except UNDECODABLE as error:
        raise UserError(f"model.dtype=auto: torch answered {done.stdout[-80:]!r}; set float32 or bfloat16") from error


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name as the kernel reports it, or an empty string if it reports none."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def read_machine(folder: Path) -> MachineRecord | None:
    """Return the record in a run folder, or None before the first start. Raises UserError if it is damaged."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=MachineRecord)
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        raise UserError(f"{folder / FILE} is damaged ({error}); delete it") from error


def write_machine(folder: Path, record: MachineRecord) -> None:
    replace_file(folder / FILE, msgspec.json.format(msgspec.json.encode(record)) + b"\n")


# Takes the modules to look for, the engine's first, and the group=value of an entry point, which may be empty.
PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
names, plugin = sys.argv[1].split(","), sys.argv[2].partition("=")
ours = u.find_spec("rl_async")
try: version = m.version("rl-async")
except m.PackageNotFoundError: version = ""
beside = plugin[2] in {p.value for p in m.entry_points(group=plugin[0])} if plugin[0] else bool(ours)
found = [name for name in names if u.find_spec(name)]
print(json.dumps({"modules": found, "beside": beside, "version": version, "code": ours and ours.origin}))
"""


class Probed(msgspec.Struct, frozen=True):
    """The answer of PROBE: installed modules, whether rl-async's plug-in is there, and rl-async's version and file."""

    modules: list[str]
    beside: bool
    version: str
    code: str | None


class EngineMissing(UserError):
    """The Python of an engine lacks the engine's package; the message says how to install it."""


def plan_here(config: RunConfig, folder: Path, *, resume: bool = False, gpus: int | None = None) -> Plan:
    """Plan for this machine, or for a cluster with ``gpus`` GPUs, whose nodes check their engines later.

    Raises UserError if this machine lacks a file, a package, a required GPU or a judge's key, if the first rows of the
    data are not tasks, if a tracker is not installed or has no credentials, if the model cannot be divided, quantised
    or replayed as configured, if an engine cannot reach the GPUs that it takes weights from, or if a device or the disk
    has too little room.
    """
    elsewhere = gpus is not None
    gpus = count_gpus() if gpus is None else gpus
    if config.model.device == "gpu" and gpus == 0:
        raise UserError("model.device=gpu, but no GPU is visible; use auto or cpu")
    if config.eval.endpoint is not None:
        raise UserError("eval.endpoint: a run evaluates its own policy; `rl-async eval` evaluates an endpoint")
    check_inputs(config)
    check_trainer(config, gpus)
    if not elsewhere:
        check_logins(config)
    if not elsewhere and not config.rollout.replay:
        check_engines(config, on_gpus=False)
    size = model_size(config)
    check_disk(config, folder, size)
    if size is not None:
        if size.experts:
            check_experts(config, gpus)
        check_router_replay(config, size.experts, gpus)
    check_engine_ranks(config, gpus)
    if elsewhere:
        check_opened(config, gpus)
    if not elsewhere and (gpus == 0 or config.model.device == "cpu"):
        config = with_threads(config, size, cores(), engine_ranks=engines(config) * config.rollout.ranks)
    capacity = None
    if not elsewhere:
        capacity = gpu_bytes() if gpus and config.model.device != "cpu" else machine_bytes()
    return plan(config, folder, size=size, gpus=gpus, capacity=capacity, resume=resume)


def check_inputs(config: RunConfig) -> None:
    """Raise UserError for a model, a recording or first rows that the run could not use, or a judge without its key."""
    needs_preparation(config)
    if config.rollout.replay:
        needed_groups(config)
    else:
        check_data(config)
        check_api_keys(config)


def settle_here(
    config: RunConfig, folder: Path | None, gpus: int | None = None, measure: Measure | None = None
) -> tuple[RunConfig, MachineRecord]:
    """Return the config with ``auto`` replaced by a compute type, and the record of this machine for the run's folder.

    A run that has such a record in ``folder`` keeps its type. ``gpus`` is the number of GPUs of a cluster, on which
    ``measure`` runs. Raises UserError if the measurement fails.
    """
    available = cores()
    if gpus is None:
        gpus, ranks = count_gpus(), 0 if config.finetune is not None else engines(config) * config.rollout.ranks
        threads = with_threads(config, model_size(config), available, engine_ranks=ranks).launcher.threads or 1
    else:
        threads = config.launcher.threads or 1
    before = None if folder is None else read_machine(folder)
    config = with_adapter_way(config, model_size(config))
    config, choice = settle(config, gpus, threads, measure or ask_torch, None if before is None else before.compute)
    on_cpu = gpus == 0 or config.model.device == "cpu"
    return config, MachineRecord(processor_name(), available, threads if on_cpu else None, choice)


def with_adapter_way(config: RunConfig, size: ModelSize | None) -> RunConfig:
    """Return the config with ``weight_sync.adapters=auto`` replaced by merge if engines load none beside experts.

    Raises ConfigError if the config asks them to.
    """
    sync = config.weight_sync
    kinds = [kind for kind, traits in engine_traits(config).items() if not traits.adapters_with_experts]
    if size is None or size.experts == 0 or not kinds or adapter_way(config) != "load":
        return config
    if sync.adapters == "load":
        raise ConfigError(
            f"weight_sync.adapters=load: rollout.engine={kinds[0]} loads no adapters beside the experts of "
            f"model.path={config.model.path}; use add or merge"
        )
    return msgspec.structs.replace(config, weight_sync=msgspec.structs.replace(sync, adapters="merge"))


# A round costs about 35 ms whatever it carries (docs/explanation/weights.md), so buckets between GPUs are large.
LARGE_BUCKET = 1 << 30


def device_bucket(nbytes: int) -> int:
    """Return the bytes of a bucket with which ``nbytes`` of weights travel between GPUs."""
    return max(SMALL_BUCKET, min(LARGE_BUCKET, nbytes // 8))


# Bytes of a node's memory for one byte that the options of a way may add there: staged and delta are not worth a risk.
SPARE_MEMORY = 8
# The largest learning rate at which deltas of bfloat16 were measured: 0.084 of the bytes.
DELTA_RATE = 1e-6


def way_options(config: RunConfig, size: ModelSize | None, host_bytes: int) -> tuple[WayOption, ...]:
    """Return the options with which weights travel between machines by TCP, where an engine may pause for seconds.

    ``staged`` shortens the pause of engines that have requests meanwhile, and ``delta`` the transfer. Both need host
    copies: of every engine, and for deltas two of the trainer, all within an eighth of ``host_bytes``, the memory of
    the smallest machine, which is unknown if it is 0. Deltas are gathered on one rank and go to each worker whole, so
    they are chosen where neither costs anything; adapters are small already. ``waves`` is never chosen: every engine
    would pause as long, and the publication takes twice.
    """
    rollout, trainer = config.rollout, config.trainer
    if size is None or not all(traits.holds_weights for traits in engine_traits(config).values()):
        return ()
    weights = size.parameters * DTYPE_BYTES[compute_type(config.model)]
    if adapter_way(config) != "merge" or (rollout.engines * rollout.ranks + 2) * weights * SPARE_MEMORY > host_bytes:
        return ()
    changes_little = compute_type(config.model) == "bfloat16" and trainer.learning_rate <= DELTA_RATE
    wanted: dict[WayOption, bool] = {
        "staged": config.queue.max_staleness > 0,
        "delta": changes_little and trainer.lora is None and trainer.ranks == rollout.ranks == 1,
    }
    return tuple(option for option, chosen in wanted.items() if chosen)


def with_weight_way(
    config: RunConfig,
    machine: MachineRecord,
    size: ModelSize | None,
    gpus: int,
    *,
    one_host: bool,
    host_bytes: int = 0,
) -> tuple[RunConfig, MachineRecord]:
    """Return the config with the way and the buckets of a run on ``gpus`` GPUs, and the record that tells them.

    Keys that the user has set stay. On GPUs only engines that run our receiver are meant: it opens a trainer's memory,
    and compares versions of NCCL. Ranks that lend their devices keep the host's way, since what they publish must not
    stay on a device. NCCL refuses two ranks on one GPU. ``way_options`` explains ``host_bytes``.
    """
    sync, devices = config.weight_sync, assign_devices(config, gpus)
    own = all({"ipc", "nccl"} <= {*traits.transports} for traits in engine_traits(config).values())
    # The nodes of an engine may be other machines.
    one_host = one_host and config.rollout.nodes == 1
    on_gpus = own and bool(devices.trainers) and all(devices.engines) and not config.trainer.lend_devices
    transport, options = resolve_transport(config), sync.options
    if on_gpus and sync.transport == "auto" and config.mode != "colocated":
        used = [*devices.trainers, *(gpu for of_engine in devices.engines for gpu in of_engine)]
        if one_host and accelerator_here().handles:
            transport = "ipc"
        elif not one_host and len(used) == len(set(used)):
            transport = "nccl"
    by_tcp = not one_host and transport in ("nearest", "gloo")
    if sync.way == "auto" and by_tcp and config.mode != "colocated" and not config.trainer.lend_devices:
        options = way_options(config, size, host_bytes)
    bucket = sync.bucket_bytes
    if on_gpus and bucket is None and size is not None and transport in ("ipc", "nccl"):
        bucket = device_bucket(size.parameters * DTYPE_BYTES[compute_type(config.model)])
    chosen = transport != resolve_transport(config) or options != sync.options
    settled = msgspec.structs.replace(sync, bucket_bytes=bucket)
    if chosen or (sync.way == "auto" and bucket != sync.bucket_bytes):
        settled = msgspec.structs.replace(settled, way=(transport, *options) if options else transport)
    if sync.way != "auto" and settled == sync:
        return config, machine
    if transport == "nccl":
        where = "from GPU to GPU, between machines"
    elif on_gpus and transport == "ipc":
        where = "from memory of the trainer's GPUs"
    else:
        where = "by TCP, between machines" if by_tcp else "by TCP" if transport == "gloo" else "by shared memory"
    added = "".join(f", {option}" for option in options)
    key = "weight_sync.bucket_bytes" if settled.way == sync.way != "auto" else "weight_sync.way"
    line = f"weights: {transport}{added}, {where}, {settled.bucket >> 20} MiB at a time; {key} overrides it"
    return msgspec.structs.replace(config, weight_sync=settled), msgspec.structs.replace(machine, weights=line)


def machine_bytes() -> int:
    """Return the memory, in bytes, of this machine or, if it is less, the limit of this cgroup (v2)."""
    total = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]) << 10
    limit = CGROUP / "memory.max"
    given = limit.read_text().strip() if limit.is_file() else "max"
    return total if given == "max" else min(total, int(given))


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU here, in bytes, as torch finds it; None if torch finds none."""
    devices = "(torch.accelerator.get_memory_info(i)[1] for i in range(torch.accelerator.device_count()))"
    said = _ask("", sys.executable, f"import torch\nprint(min({devices}, default=0))")
    if not said.isdigit():
        raise UserError(f"{sys.executable} was asked for the memory of its GPUs, and printed {said[-80:]!r}")
    return int(said) or None


def check_api_keys(config: RunConfig) -> None:
    """Raise ConfigError if the environment lacks the API key of a judge, reward model, opponent or simulated user."""
    reward, user = config.reward, config.agent.user
    if user is not None and config.agent.environment == "simulated_user":
        read_api_key(user.api_key_env, "agent.user.api_key_env")
    for role, opponent in config.agent.opponents.items():
        read_api_key(opponent.api_key_env, f"agent.opponents.{role}.api_key_env")
    names = {term.name for term in reward.functions}
    if reward.judge is not None and "judge" in names:
        read_api_key(reward.judge.api_key_env, "reward.judge.api_key_env")
    if reward.model is not None and "reward_model" in names:
        read_api_key(reward.model.api_key_env, "reward.model.api_key_env")


def check_opened(config: RunConfig, gpus: int) -> None:
    """Raise UserError for engines under Ray that would take weights from GPUs that Ray hides from them."""
    devices = assign_devices(config, gpus)
    if any(engine_place(config, i, devices.engine(i), devices.trainers).opens for i in range(engines(config))):
        raise UserError(
            "weight_sync.way=ipc takes weights from the memory of all trainer ranks' GPUs, and Ray shows engines "
            "only their own; set weight_sync.way=disk, or start without Ray"
        )


def check_engine_ranks(config: RunConfig, gpus: int) -> None:
    """Raise UserError if the model cannot be divided among an engine's ranks, or if there is not a GPU for each."""
    rollout, shape = config.rollout, policy_shape(config)
    if 0 < gpus < rollout.ranks and config.model.device != "cpu":
        raise UserError(
            f"rollout.tensor_parallel={rollout.tensor_parallel} times rollout.pipeline_parallel="
            f"{rollout.pipeline_parallel} makes engines of {rollout.ranks} GPUs, and only {gpus} are visible"
        )
    heads, layers = shape.get("num_attention_heads", 0), shape.get("num_hidden_layers", rollout.pipeline_parallel)
    if heads % rollout.tensor_parallel:
        raise UserError(
            f"rollout.tensor_parallel={rollout.tensor_parallel} does not divide the {heads} attention heads of "
            f"model.path={config.model.path}"
        )
    if layers < rollout.pipeline_parallel:
        raise UserError(
            f"rollout.pipeline_parallel={rollout.pipeline_parallel}: model.path={config.model.path} has only {layers} "
            "layers"
        )


def policy_shape(config: RunConfig) -> dict[str, Any]:
    """Return ``config.json`` of the policy, or the sizes that its warm start will give it; empty if unknown."""
    folder, makes = Path(config.model.path), warm_start_of(config)
    if (folder / "config.json").is_file():
        return read_shape("model.path", folder) or {}
    if makes is None or makes.pretrained is not None:
        return {}
    kind = {"model_type": "qwen2_5_vl", "vision_config": {}} if makes.vision else {"model_type": "qwen3"}
    return tiny_shape(makes) | kind


def has_megatron() -> bool:
    """Whether Megatron-Core is installed here, found without importing it."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def check_trainer(config: RunConfig, gpus: int) -> None:
    """Raise UserError if ``config.trainer`` or a tracker needs a package or a device that is missing here."""
    if config.trainer.backend == "megatron":
        check_megatron()
    if config.trainer.lora is not None and find_spec("peft") is None:
        raise UserError(f"trainer.lora: {sys.executable} has no PEFT; install it with `pip install 'rl-async[lora]'`")
    refuse_quantized(policy_shape(config).get("quantization_config"), "model.path", Path(config.model.path))
    check_trackers(config)
    check_kernels(config, gpus)
    check_sharing(config)


def check_megatron() -> None:
    """Raise UserError unless Megatron-Core is installed for the trainer."""
    if not has_megatron():
        raise UserError(
            f"trainer.backend=megatron: {sys.executable} has no Megatron-Core; install it with "
            "`python -m pip install 'rl-async[megatron]'`"
        )


def check_kernels(config: RunConfig, gpus: int) -> None:
    """Raise UserError unless the configured kernels are installed and there is a GPU for them."""
    if config.trainer.kernels != "liger":
        return
    if gpus == 0:
        raise UserError("trainer.kernels=liger needs a GPU, and none is visible; leave it out")
    if find_spec("liger_kernel") is None:
        raise UserError(
            f"trainer.kernels=liger: {sys.executable} has no Liger; install it with `pip install 'rl-async[liger]'`"
        )


def check_sharing(config: RunConfig) -> None:
    """Raise UserError if ``config.json`` of the policy shows that trainer ranks cannot share its rows."""
    trainer, path = config.trainer, config.model.path
    if trainer.sequence_parallel == 1:
        return
    # The heads are divided among ranks of both kinds.
    ranks = trainer.sequence_parallel * trainer.tensor_parallel
    shape = policy_shape(config)
    known = {"model_type", "num_attention_heads"} <= shape.keys() or "vision_config" in shape
    if known and (reason := why_not_shared(SimpleNamespace(**shape), ranks)):
        raise UserError(
            f"trainer.sequence_parallel={trainer.sequence_parallel} does not go with model.path={path}: {reason}"
        )


def check_engines(config: RunConfig, *, on_gpus: bool) -> None:
    """Raise UserError unless this machine can start those of the run's engines that need a GPU, or the other ones.

    The plan only checks the others, so that a run on GPUs can be planned on any machine.
    """
    for kind, traits in engine_traits(config).items():
        if traits.needs_gpu != on_gpus:
            continue
        if on_gpus and (config.model.device == "cpu" or count_gpus() == 0):
            others = " or ".join(other for other, them in ENGINES.items() if not them.needs_gpu)
            raise UserError(
                f"rollout.engine={kind}: {traits.title} needs a GPU, and none is visible or model.device=cpu; use "
                f"rollout.engine={others}, or a machine with a GPU"
            )
        check_engine_python(kind, config.rollout.python or sys.executable)


def check_experts(config: RunConfig, gpus: int) -> None:
    """Raise UserError if an engine would have to quantise experts on a CPU."""
    quantized = config.rollout.quantization
    if gpus > 0 and config.model.device != "cpu":
        return
    if quantized == "none":
        return
    for traits in engine_traits(config).values():
        if not traits.cpu_quantized_experts:
            raise UserError(
                f"rollout.quantization={quantized}: model.path={config.model.path} has experts, which {traits.title} "
                "does not quantise on a CPU; use rollout.engine=embedded, or a GPU"
            )


def check_router_replay(config: RunConfig, experts: int, gpus: int) -> None:
    """Raise ConfigError for trainer.router_replay=always if the model has no ``experts``, an engine cannot record their
    choice, or trainer ranks cannot replay it."""
    if config.trainer.router_replay != "always":
        return
    key = "trainer.router_replay=always"
    if not experts:
        raise ConfigError(f"{key}: model.path={config.model.path} has no experts to replay; leave it out")
    if config.trainer.tensor_parallel > 1:
        raise ConfigError(
            f"{key}: ranks of trainer.tensor_parallel={config.trainer.tensor_parallel} see a part of the tokens each; "
            "use auto, or trainer.expert_parallel alone"
        )
    for kind, traits in engine_traits(config).items():
        if not traits.records_routes:
            raise ConfigError(f"{key}: rollout.engine={kind} records no experts; use another engine")
        if traits.route_flags and (gpus == 0 or config.model.device == "cpu"):
            raise ConfigError(f"{key}: rollout.engine={kind} records experts on GPUs only; use auto")
        if traits.route_flags and config.rollout.pipeline_parallel > 1:
            raise ConfigError(f"{key}: rollout.engine={kind} with rollout.pipeline_parallel records none; use auto")


def check_engine_python(kind: str, python: str) -> None:
    """Raise EngineMissing if this Python lacks the package of an engine, and UserError if it lacks this rl-async.

    Imports neither.
    """
    traits = ENGINES[kind]
    if not traits.package:
        return
    modules = ",".join((traits.package, *BESIDE_ENGINES))
    said = _ask("rollout.python: ", python, PROBE, modules, "=".join(traits.plugin or ()))
    try:
        found = msgspec.json.decode(said, type=Probed)
    except UNDECODABLE as error:
        raise UserError(f"rollout.python: {python} answered {said[-80:]!r}: {error}") from error
    if traits.package not in found.modules:
        raise EngineMissing(f"rollout.engine={kind}: {python} has no {traits.title}; {traits.install}")
    problem = ""
    if not found.beside:
        problem = "not rl-async"
    elif missing := [name for name in BESIDE_ENGINES if name not in found.modules]:
        problem = f"not {', '.join(missing)}"
    elif found.code != rl_async.__file__ and found.version and found.version != version():
        # Trainer and engine exchange weights in formats that change between versions.
        problem = f"rl-async {found.version} instead of {version() or 'the one that runs here'}"
    if problem:
        raise UserError(
            f"rollout.python: {python} has {traits.title} but {problem} beside it; run "
            f"`{install_beside(python, *BESIDE_ENGINES)}`"
        )


def _ask(key: str, python: str, code: str, *arguments: str) -> str:
    """Return the last line that ``code`` prints in that Python.

    Raises UserError if it cannot be run. Its message begins with ``key``, which is empty for the Python that runs this.
    """
    # With -P, a folder named vllm in the working directory is not taken for vLLM.
    command = [python, "-P", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{key}{python} cannot be run: {error}") from error
    return done.stdout.rstrip().rpartition("\n")[2]


# A float32 weight and AdamW's two moments of it, in bytes. Checkpoints may hold the weights twice.
SAVED_BYTES = 12


def check_trackers(config: RunConfig) -> None:
    """Raise UserError unless the packages of the configured trackers are installed."""
    for name in config.tracking.backends:
        if name in ("jsonl", "console"):
            continue
        found = find_spec(name)
        # A folder of this name in the working directory, such as wandb makes, is found as a package without a file.
        if found is None or found.origin is None:
            raise UserError(
                f"tracking.backends: {sys.executable} has no {name}; install it with `pip install 'rl-async[{name}]'`"
            )


def check_logins(config: RunConfig) -> None:
    """Raise ConfigError for a tracker that is to be online and has no credentials here. Reaches no network."""
    for name in config.tracking.backends:
        if name in _LOGINS and not config.tracking.offline and not _LOGINS[name]():
            raise ConfigError(
                f"tracking.offline=false: {name} has no credentials here; run `{name} login`, or set "
                f"{name.upper()}_API_KEY"
            )


def check_disk(config: RunConfig, folder: Path, size: ModelSize | None) -> None:
    """Raise UserError if the disk of the run's folder has too little room for the checkpoints that are kept at once."""
    needed = checkpoint_bytes(config, folder, size)
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"launcher.run_dir: {place.absolute()} has {gib(free)} free, and the checkpoints that trainer."
            f"keep_checkpoints={config.trainer.keep_checkpoints} keeps need at least {gib(needed)}; free some of the "
            "disk, name a folder on another, or keep fewer"
        )


def checkpoint_bytes(config: RunConfig, folder: Path, size: ModelSize | None) -> int:
    """Return what the checkpoints that are not yet in ``folder`` take at least, in bytes; 0 if it is unknown.

    An older checkpoint is deleted after a newer one is complete. With LoRA only the small adapters are saved.
    """
    trainer = config.trainer
    if size is None or trainer.lora is not None:
        return 0
    scheduled = -(-trainer.steps // trainer.checkpoint_every) if trainer.checkpoint_every else 1
    at_once = min(trainer.keep_checkpoints + 1, scheduled)
    return max(1, at_once - len(checkpoints(folder))) * (size.parameters + size.critic) * SAVED_BYTES


def _wandb_has_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(_wandb_address()).hostname
    named = os.environ.get("NETRC")
    files = [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(_names(file, host) for file in files if file.is_file())


def _wandb_address() -> str:
    """Return the address of the W&B server: the environment's, that of the settings, or the public one."""
    if given := os.environ.get("WANDB_BASE_URL"):
        return given
    settings = configparser.ConfigParser()
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    settings.read([Path(folder) / "settings", Path("wandb") / "settings"], encoding="utf-8")
    return settings.get("default", "base_url", fallback="https://api.wandb.ai")


def _names(file: Path, host: str | None) -> bool:
    """Whether a netrc file has a login for the host. A file that cannot be read is left to the tracker to report."""
    try:
        return host is None or netrc.netrc(str(file)).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return True


def _swanlab_has_login() -> bool:
    root = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR")
    folders = [Path(".swanlab"), Path(root) if root else Path.home() / ".swanlab"]
    return bool(os.environ.get("SWANLAB_API_KEY")) or any((folder / ".netrc").is_file() for folder in folders)


_LOGINS: dict[TrackerName, Callable[[], bool]] = {"wandb": _wandb_has_login, "swanlab": _swanlab_has_login}
