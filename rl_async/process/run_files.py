"""Files in a run's folder that tell its processes, and commands, the addresses and the state of processes.

    RUN/endpoints.json             addresses, for programs that join the run
    RUN/processes.json             the newest process of each name and its state; the timeline keeps the earlier ones
    RUN/prometheus/NAME.json       addresses for Prometheus, in the format of ``file_sd_configs``
    RUN/memory.json                how much of a device's memory each process may have, by phase of a step
    RUN/ranks/RANK.json            the newest heartbeat of each trainer rank
    RUN/progress/NAME.json         how far a process has come with a long piece of work
    RUN/timeline/WRITER.jsonl      which stage each lane entered and when; a stage lasts until the lane's next line
    RUN/profiles/request.json      what ``rl-async profile`` asks of the trainer ranks, which write traces beside it

The launcher writes the processes (``launcher/supervisor.py``), plans the memory (``launcher/plan/memory.py``) and
sets it on the engines; trainer ranks compare their use with it. Each timeline file has one writing process, and at most
two times MOST_BYTES are kept of it.

States of processes are read from Linux's ``/proc``, also of those whose keeper was killed before it ended them.
On other systems every process looks gone. psutil is not used: it has no caught signals and no wait channel, and its
start times change with the wall clock, while the ticks since the boot that ``processes.json`` holds identify a process
exactly. Strays are found by a variable in their environment.
"""

import logging
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec

from rl_async.errors import EXIT_SIGNAL, EXIT_STOPPED, UserError
from rl_async.files import DAMAGE, UNDECODABLE, replace_file, undamaged

log = logging.getLogger("rl_async.process")

GONE = "gone"
REMOTE = "remote"
MEANING = {
    "R": "is running",
    "S": "sleeps",
    "D": "waits for a disk or a device",
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "I": "is idle",
    GONE: "is gone",
    REMOTE: "is on another machine",
}
HALTED = ("T", "t")
ENDED = ("Z", "X", GONE)


class ProcStat(msgspec.Struct, frozen=True):
    """Fields of ``/proc/PID/stat``: the state's letter, and in clock ticks CPU time and start since the boot."""

    state: str = GONE
    cpu_ticks: int = 0
    started: int = 0


def read_stat(pid: int) -> ProcStat:
    """Read the current state of a process; GONE if it does not exist."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # The name is in brackets and may contain anything; fields are counted after the last bracket (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ProcStat(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))
    return ProcStat()


def state_of(pid: int) -> str:
    """Return the state as one letter, as in ``ps``, or GONE."""
    return read_stat(pid).state


def age_s(stat: ProcStat) -> float:
    """Return the seconds since the process was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / os.sysconf("SC_CLK_TCK")


def describe(state: str) -> str:
    """Render a state as a verb phrase."""
    return MEANING.get(state, f"is in state {state}")


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process handles the signal; without a handler the signal may kill it."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def waits_in(pid: int) -> str:
    """Return the kernel function that the main thread sleeps in; empty if it runs or is hidden."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""


GONE_S = 10.0


def kill_marked(variable: str, value: str, within_s: float = GONE_S) -> None:
    """Kill all processes that were started with this variable, until there are none; log those that do not end in time.

    One that waits for a disk or a device ends when that answers. One that was started without what it should inherit
    escapes.
    """
    marked = f"{variable}={value}".encode()
    deadline = time.monotonic() + within_s
    while pids := [pid for pid in _others() if marked in _environment(pid)]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.warning("processes did not end within %g s of being killed: %s", within_s, ", ".join(map(str, pids)))
            return
        time.sleep(0.01)


def _others() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    """Return a process's variables as it was started with them; none for one that has ended or is another user's."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    return []


ROSTER_FILE = "processes.json"
# ``rl_async.process.role`` sets the format of log lines, the last alternative.
_ERROR = re.compile(r"error: |Fatal Python error|\S+ \S+ (ERROR|CRITICAL) ")

ENDPOINTS_FILE = "endpoints.json"


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of a run; those that it does not have are empty."""

    queue: str
    reward_model: str = ""
    gateway: str = ""


def write_endpoints(run: Path, endpoints: Endpoints) -> None:
    """Write the addresses, in place of those of an earlier start."""
    replace_file(run / ENDPOINTS_FILE, msgspec.json.encode(endpoints) + b"\n")


def gateway_url(run: Path) -> str:
    """Return the URL of the run's own gateway. Raises UserError if it has none."""
    url = read_endpoints(run).gateway
    if not url:
        raise UserError(f"{run} has no gateway of its own (agent.gateway); name the one that you added with --url")
    return url


def read_endpoints(run: Path) -> Endpoints:
    """Read the addresses of the last start. Raises UserError if the run was never started."""
    try:
        return msgspec.json.decode((run / ENDPOINTS_FILE).read_bytes(), type=Endpoints)
    except (OSError, *UNDECODABLE) as error:
        raise UserError(f"{run} is not the folder of a running run: {error}") from error


TARGETS_FOLDER = "prometheus"


class Target(msgspec.Struct, frozen=True):
    """One process: ``name`` and ``role`` become labels of everything that it reports."""

    # HOST:PORT.
    address: str
    role: str
    name: str

    @classmethod
    def at(cls, url: str, role: str, name: str) -> "Target":
        """Return the target of a process that serves HTTP at ``url``."""
        return cls(urlsplit(url).netloc, role, name)


def write_targets(run: Path, file: str, targets: Iterable[Target]) -> None:
    """Replace the targets of ``file``; without any the file is removed."""
    found = [
        {"targets": [target.address], "labels": {"run": run.resolve().name, "role": target.role, "name": target.name}}
        for target in targets
    ]
    path = run / TARGETS_FOLDER / f"{file}.json"
    if not found:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")


@contextmanager
def listed(wanted: bool, run: Path, target: Target) -> Iterator[None]:
    """Let Prometheus find a process while the block runs, if that is ``wanted``."""
    if not wanted:
        yield
        return
    write_targets(run, target.name, [target])
    try:
        yield
    finally:
        write_targets(run, target.name, [])


BUDGET_FILE = "memory.json"

Stage = Literal["start", "rollout", "train", "gather", "load"]
Part = Literal[
    "runtime",
    "weights",
    "reference",
    "teacher",
    "optimizer",
    "gradients",
    "activations",
    "batch",
    "KV cache",
    "bucket",
    "published",
]
# In bytes.
Parts = Mapping[Part, int]

TRAINER_REMEDY: Mapping[Part, str] = {
    "runtime": "use fewer trainer.ranks on this device",
    "weights": "raise trainer.ranks, over which they are sharded, or set trainer.cpu_offload",
    "reference": "raise trainer.ranks, over which it is sharded, or set algorithm.kl.coef=0",
    "teacher": "raise trainer.ranks, over which it is sharded, or use algorithm.teacher.endpoint",
    "optimizer": "raise trainer.ranks, over which it is sharded, or set trainer.cpu_offload",
    "gradients": "raise trainer.ranks, or train fewer weights with trainer.lora",
    "activations": "lower trainer.max_tokens_per_microbatch, or set trainer.activation_checkpointing",
    "batch": "lower data.train_batch_groups or rollout.max_model_len",
    "bucket": "lower weight_sync.bucket_bytes",
    "published": "set model.dtype=bfloat16; on a GPU also set weight_sync.way=disk, which has it on the host, "
    "or raise trainer.ranks, over which it is divided without delta, weight_sync.adapters=add and SGLang",
}
ENGINE_REMEDY: Mapping[Part, str] = {
    "runtime": "use fewer rollout.engines on this device",
    "weights": "raise rollout.tensor_parallel, over which they are divided, or set model.dtype=bfloat16",
    "activations": "lower rollout.max_batch_size",
    "KV cache": "lower rollout.cache_bytes, rollout.max_batch_size or rollout.max_model_len",
    "bucket": "lower weight_sync.bucket_bytes",
    "published": "leave out weight_sync.adapters=add, and delta and staged of weight_sync.way",
}


class Holder(msgspec.Struct, frozen=True):
    """What one process, or one rank of an engine, may have on a device in each stage."""

    process: str
    role: Literal["trainer", "engine"]
    stages: dict[Stage, dict[Part, int]]

    def total(self, stage: Stage) -> int:
        """Return the bytes of all its parts."""
        return sum(self.stages[stage].values())

    def remedy(self, stage: Stage) -> str:
        """Return what to do if it needs less in this stage: by its largest part that is not the runtime's."""
        parts = self.stages[stage]
        part = max(parts, key=lambda part: (part != "runtime") * parts[part])
        remedies = TRAINER_REMEDY if self.role == "trainer" else ENGINE_REMEDY
        return f"most of it is for {part}: {remedies[part]}"


class DeviceBudget(msgspec.Struct, frozen=True):
    """The holders of one device's memory.

    ``capacity`` is its size in bytes, if it is known, and ``limit`` the part that the run plans with.
    """

    device: str
    capacity: int | None
    limit: int | None
    holders: tuple[Holder, ...]

    def total(self, stage: Stage) -> int:
        """Return the bytes that all holders may have together."""
        return sum(holder.total(stage) for holder in self.holders)


class MemoryBudget(msgspec.Struct, frozen=True):
    """The budgets of all devices of a run; none if the model's size is unknown."""

    devices: tuple[DeviceBudget, ...] = ()

    def of(self, process: str) -> tuple[DeviceBudget, Holder] | None:
        """Return the budget of a process, and its device's, if it has one."""
        found = ((device, holder) for device in self.devices for holder in device.holders)
        return next(((device, holder) for device, holder in found if holder.process == process), None)


def write_budget(run: Path, budget: MemoryBudget) -> None:
    """Write the budget, in place of that of an earlier start."""
    replace_file(run / BUDGET_FILE, msgspec.json.encode(budget) + b"\n")


def read_budget(run: Path) -> MemoryBudget:
    """Read the budget of the last start; one without devices if the run was started by hand.

    Raises UserError, naming the file, if it is damaged.
    """
    file = run / BUDGET_FILE
    if not file.is_file():
        return MemoryBudget()
    with undamaged(file):
        return msgspec.json.decode(file.read_bytes(), type=MemoryBudget)


MOST_BYTES = 1 << 20
TIMELINE_FOLDER = "timeline"
OLDER = ".older"


class Entered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane, such as a trainer rank or an engine, has entered a stage, at a Unix time. An idle lane has no stage.

    ``writer`` has the file. The stage may belong to a ``step``, or be about a ``version`` of the weights.
    """

    writer: str
    lane: str
    at: float
    stage: str = ""
    step: int = -1
    version: str = ""
    about: str = ""


def enter(run: Path, writer: str, lane: str, stage: str, *, step: int = -1, version: str = "", about: str = "") -> None:
    """Append a line to the file of ``writer``, which only this process writes. Costs about 50 µs."""
    folder = run / TIMELINE_FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{writer}.jsonl"
    line = Entered(writer=writer, lane=lane, at=time.time(), stage=stage, step=step, version=version, about=about)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        # A power cut may have torn the last line.
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, b"\n" * torn + msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)
    if size > MOST_BYTES:
        path.replace(folder / f"{writer}{OLDER}.jsonl")


class TimelineReader:
    """Reads what all processes of a run entered, of each file only what was added since the last call.

    ``read`` may be called on several threads.
    """

    def __init__(self, run: Path) -> None:
        self._folder, self._lock = run / TIMELINE_FOLDER, threading.Lock()
        # By the first line, which a file keeps when it becomes the older one.
        self._files: dict[bytes, _Read] = {}

    def read(self) -> list[Entered]:
        """Return everything that the files hold, oldest first. Lines that a power cut tore are left out."""
        with self._lock:
            found: dict[bytes, _Read] = {}
            for path in self._folder.glob("*.jsonl"):
                # The file may have become the older one.
                with suppress(FileNotFoundError), path.open("rb") as file:
                    first = file.readline()
                    found[first] = self._files.get(first, _Read(0, [])).advanced(file)
            self._files = found
            entered = [one for read in found.values() for one in read.entered]
        return sorted(entered, key=lambda one: one.at)


class _Read(NamedTuple):
    """What was read of a file, up to ``offset``."""

    offset: int
    entered: list[Entered]

    def advanced(self, file: BinaryIO) -> "_Read":
        file.seek(self.offset)
        whole, newline, _ = file.read().rpartition(b"\n")
        for line in whole.splitlines():
            with suppress(*UNDECODABLE):
                self.entered.append(msgspec.json.decode(line, type=Entered))
        return _Read(self.offset + len(whole) + len(newline), self.entered)


def read_timeline(run: Path) -> list[Entered]:
    """Read what all processes of a run entered, oldest first. Lines that a power cut tore are left out."""
    return TimelineReader(run).read()


Phase = Literal[
    "starting",
    "waiting for a batch",
    "training",
    "meeting the ranks",
    "publishing",
    "checkpointing",
    "reporting",
    "evaluating the final weights",
]
# In the order of a step.
PHASES: tuple[str, ...] = get_args(Phase)


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The phase that a rank is in ``since`` a Unix time. ``step`` counts from 0. ``host`` is the machine's name."""

    rank: int
    pid: int
    step: int
    phase: str
    since: float
    host: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Step and phase, which compare as the progress of two ranks."""
        return self.step, PHASES.index(self.phase) if self.phase in PHASES else 0


def beat(run: Path, rank: int, step: int, phase: Phase) -> None:
    """Record the phase that this rank enters. Writes a few hundred bytes, twice."""
    folder = run / "ranks"
    folder.mkdir(exist_ok=True)
    now = Beat(rank=rank, pid=os.getpid(), step=step, phase=phase, since=time.time(), host=socket.gethostname())
    replace_file(folder / f"{rank}.json", msgspec.json.encode(now) + b"\n")
    enter(run, f"trainer-{rank}", f"trainer-{rank}", phase, step=step)


def read_beats(run: Path) -> list[Beat]:
    """Read the last heartbeat of each rank, in order of rank. Raises UserError for a damaged file."""
    found = []
    for file in (run / "ranks").glob("*.json"):
        with undamaged(file):
            found.append(msgspec.json.decode(file.read_bytes(), type=Beat))
    return sorted(found, key=lambda beat: beat.rank)


PROGRESS_FOLDER = "progress"
# A process writes its progress at most this often.
PROGRESS_S = 1.0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The work that a process has been at ``since`` a Unix time: ``done`` of ``total`` parts, such as micro-batches.

    It was written at the time ``at``.
    """

    work: str
    done: int
    total: int
    unit: str
    since: float
    at: float
    about: str = ""

    @property
    def left_s(self) -> float | None:
        """The seconds that the rest takes at the speed so far; None before the first part is done."""
        return (self.at - self.since) / self.done * (self.total - self.done) if self.done else None


class ProgressWriter:
    """Writes the progress of the process ``name``, which is the only one to write its file."""

    def __init__(self, run: Path, name: str, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = run / PROGRESS_FOLDER / f"{name}.json", clock
        self._work, self._since, self._written = "", 0.0, 0.0

    def __call__(self, work: str, done: int, total: int, unit: str, about: str = "") -> None:
        """Record that ``done`` of ``total`` parts are done. Costs little more often than each PROGRESS_S."""
        now = self._clock()
        if work != self._work or done == 0:
            self._work, self._since = work, now
        elif now - self._written < PROGRESS_S:
            return
        self._written = now
        self._path.parent.mkdir(exist_ok=True)
        progress = Progress(work=work, done=done, total=total, unit=unit, since=self._since, at=now, about=about)
        replace_file(self._path, msgspec.json.encode(progress) + b"\n")


def read_progress(run: Path, name: str) -> Progress | None:
    """Read the progress of a process, perhaps an earlier one of this name; None if it has written none.

    Raises UserError for a damaged file.
    """
    path = run / PROGRESS_FOLDER / f"{name}.json"
    with undamaged(path), suppress(FileNotFoundError):
        return msgspec.json.decode(path.read_bytes(), type=Progress)
    return None


def missing_ranks(beats: list[Beat], mine: int, states: dict[int, str]) -> list[Beat]:
    """Return the ranks that probably did not arrive in the collective that rank ``mine`` waits in.

    ``states`` are process states by rank. These are the ranks that cannot run; else those that are behind; else all
    others, since a phase has several collectives.
    """
    own = next((beat for beat in beats if beat.rank == mine), None)
    others = [beat for beat in beats if beat.rank != mine]
    halted = [beat for beat in others if states.get(beat.rank, GONE) in (*HALTED, *ENDED)]
    behind = [beat for beat in others if own is not None and beat.place < own.place]
    return halted or behind or others


def who_is_missing(run: Path, mine: int, world: int) -> str:
    """Describe which of the ``world`` ranks did not arrive, and why, after a collective of rank ``mine`` failed."""
    # A run may continue with fewer ranks.
    beats = [beat for beat in read_beats(run) if beat.rank < world]
    states = {beat.rank: state_of(beat.pid) if beat.host == socket.gethostname() else REMOTE for beat in beats}
    return "; ".join(
        f"rank {beat.rank} (pid {beat.pid}) did not arrive: it {describe(states[beat.rank])}, "
        f"{beat.phase} of step {beat.step} for {time.time() - beat.since:.0f} s"
        for beat in missing_ranks(beats, mine, states)
    )


PROFILES_FOLDER = "profiles"


class ProfileRequest(msgspec.Struct, frozen=True):
    """The newest request, in ``RUN/profiles/request.json``: the next ``steps`` of every rank."""

    id: str
    steps: int


def write_request(run: Path, steps: int) -> None:
    """Ask all ranks to profile their next ``steps``."""
    (run / PROFILES_FOLDER).mkdir(exist_ok=True)
    request = ProfileRequest(secrets.token_hex(8), steps)
    replace_file(_request_file(run), msgspec.json.encode(request) + b"\n")


def read_request(run: Path) -> ProfileRequest | None:
    """Read the newest request; None if there was none. Raises UserError, naming the file, if it is damaged."""
    file = _request_file(run)
    try:
        with undamaged(file):
            return msgspec.json.decode(file.read_bytes(), type=ProfileRequest)
    except FileNotFoundError:
        return None


def trace_file(run: Path, step: int, rank: int) -> Path:
    """Return where a rank writes the trace of a step, for Perfetto."""
    return run / PROFILES_FOLDER / f"step-{step:06d}-rank{rank}.json.gz"


def traces(run: Path) -> dict[Path, int]:
    """Return the traces that are there, of all steps and ranks, each with the time when it was written, in ns.

    A resumed run that trains a step again replaces its trace.
    """
    return {file: file.stat().st_mtime_ns for file in (run / PROFILES_FOLDER).glob("step-*-rank*.json.gz")}


def _request_file(run: Path) -> Path:
    return run / PROFILES_FOLDER / "request.json"


@dataclass(frozen=True)
class ProcessState:
    """The state of a process: waiting, starting, running, restarting, ended or failed, ``since`` a Unix time."""

    name: str
    state: str
    restarts: int = 0
    since: float = field(default=0.0, compare=False)


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``RUN/processes.json``, with a state of ``ProcessState``.

    ``started`` is the start time in /proc/PID/stat, which exposes a reused pid. ``exit`` is that of
    ``Popen.returncode``. An empty ``host`` is the launcher's own.
    """

    name: str
    role: str
    pid: int
    started: int
    state: str
    restarts: int = 0
    exit: int | None = None
    host: str = ""


def read_roster(run: Path) -> list[ProcessRecord]:
    """Return the newest start of every process of the run. Raises UserError if it never started any."""
    try:
        return msgspec.json.decode((run / ROSTER_FILE).read_bytes(), type=list[ProcessRecord])
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{run} is not the folder of a run that was started: {error}") from error


def describe_exit(code: int) -> str:
    """Describe an exit code, naming the signal that caused it."""
    if code in EXIT_STOPPED:
        return f"exit code {code}: asked to stop by {signal.Signals(code - EXIT_SIGNAL).name}"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def said_last(output: str) -> str:
    """Return the line of the last error in a process's output or, without an error, its last line that is not empty."""
    last = error = ""
    traceback = False
    for line in output.splitlines():
        last = line if line.strip() else last
        if traceback and line and not line[0].isspace():
            error, traceback = line, False
        elif line.startswith("Traceback (most recent call last)"):
            traceback = True
        elif _ERROR.match(line):
            error = line
    return error or last
