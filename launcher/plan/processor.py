"""Chooses all that depends on this machine's processor: how many threads each process computes with, and the type of
the weights (``model.dtype: auto``). The choice is told at the start of a run and kept in its folder.
"""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.configs.derived import engine_kinds, engine_traits, warm_start_of
from rl_async.configs.schema.data import ComputeType
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, UserError
from rl_async.files import DAMAGE, replace_file
from rl_async.launcher.plan.memory import ModelSize, model_size, read_shape, tiny_shape
from rl_async.launcher.plan.spec import THREADS
from rl_async.process.role import own_module

CGROUP = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
CPUINFO = Path("/proc/cpuinfo")
FILE = "machine.json"
PROBE_S = 120.0
# Parameters. The layers of a smaller model are neither worth dividing among threads nor faster in a smaller type.
SMALL = 10_000_000
# A layer's sizes where the model's own are unknown: those of a model of about 0.6 billion parameters.
USUAL = (1024, 3072)
TYPES: tuple[ComputeType, ...] = ("float32", "bfloat16")


class Measured(msgspec.Struct, frozen=True):
    """Describes what torch found here, as ``rl_async.trainer.compute_type`` prints it. ``rates``: GFLOP/s of each type
    on the CPU; ``accelerator``: its name, or empty on the CPU; ``has_bfloat16``: whether it has units for that type."""

    torch: str
    rates: dict[ComputeType, float] = {}
    accelerator: str = ""
    has_bfloat16: bool = False


# Asks torch about a device, "cpu" or "auto", with the hidden sizes of a layer and of its MLP, and a number of threads.
Measure = Callable[[str, tuple[int, int], int], Measured]


class Choice(msgspec.Struct, frozen=True):
    """The type of the weights that a run computes with, why, and what was measured for it."""

    dtype: ComputeType
    why: str
    by: Literal["machine", "config"] = "machine"
    measured: Measured | None = None
    # Of a run that is resumed, where ``why`` and ``measured`` are those of its first start.
    here: str = ""

    @property
    def line(self) -> str:
        """Tell the choice in one line, with the key that overrides it."""
        if self.here:
            return f"compute type: {self.dtype} (as at the run's first start; {self.here})"
        how = "" if self.by == "config" else "; model.dtype overrides it"
        return f"compute type: {self.dtype} ({self.why}{how})"


class MachineRecord(msgspec.Struct, frozen=True):
    """The machine that a run was started on, and what was chosen for it."""

    processor: str
    cores: float
    threads: int | None
    compute: Choice

    @property
    def lines(self) -> list[str]:
        """Tell the choices, with the keys that override them."""
        if self.threads is None:
            return [self.compute.line]
        cores = f"{self.cores:g} {'core' if self.cores == 1 else 'cores'}"
        return [self.compute.line, f"threads of each process that computes: {self.threads} ({cores}; launcher.threads)"]


def cores(root: Path = CGROUP, cpus: Path = CPUS, allowed: Sequence[int] | None = None) -> float:
    """Return the number of cores that this process may use at once.

    Hyper-threads of one core count once: they share its units for multiplication.
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
    """Name the core of a logical processor by all of its hyper-threads."""
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

    Processes that compute at the same time share the cores: ranks of engines and of the trainer, or when they take
    turns (colocated), whichever are more. A model of less than ``SMALL`` parameters gets one thread. Raises ConfigError
    for a value of OMP_NUM_THREADS that is not a number.
    """
    if config.launcher.threads is not None:
        return config
    ranks = config.trainer.ranks
    together = max(engine_ranks, ranks) if config.mode == "colocated" else engine_ranks + ranks
    small = size is not None and size.parameters < SMALL
    threads = threads_of_user(environment) or (1 if small else max(1, int(available) // together))
    return msgspec.structs.replace(config, launcher=msgspec.structs.replace(config.launcher, threads=threads))


def threads_of_user(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the threads of a process by the user's OMP_NUM_THREADS, if it is set. Raises ConfigError."""
    given = environment.get(THREADS, "").split(",")[0].strip()
    if not given:
        return None
    if not given.isdecimal() or int(given) == 0:
        raise ConfigError(f"{THREADS}={environment[THREADS]}: expected a number of threads; unset it, or correct it")
    return int(given)


def settle(
    config: RunConfig, gpus: int, threads: int, measure: Measure, before: Choice | None = None
) -> tuple[RunConfig, Choice]:
    """Return the config with a compute type in place of ``model.dtype: auto``, and the choice.

    ``threads`` are those of a trainer rank. ``measure`` is called only if the choice depends on it. ``before`` is the
    choice at the run's first start: if a machine made it, the run keeps it, and ``here`` says if this machine would
    choose another type. Raises UserError if torch cannot be asked about a new run.
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
    """Say whether this machine would choose the type that the run keeps, which does not depend on the answer."""
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
    """Choose a type for a model with layers of this shape, which is not small.

    An accelerator gets bfloat16 if it has units for it, and a CPU the type that it multiplies faster. A file of a GPU
    that torch cannot use counts as none.
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
    """Return the hidden size of the policy and that of its MLPs (of one expert), if its ``config.json`` names them."""
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
    """Run the measurement in a process of its own. Raises UserError if it fails."""
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
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Measured)


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
    """Keep the record in a run folder."""
    replace_file(folder / FILE, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
