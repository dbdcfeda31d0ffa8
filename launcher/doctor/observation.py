"""A snapshot of a run: the types that ``observe.py`` fills and ``diagnosis.py`` reads."""

import msgspec

from rl_async.launcher.supervise.roster import ProcessRecord
from rl_async.messages import GroupRecord, Inspection
from rl_async.process.kernel import ENDED, HALTED
from rl_async.process.role import Frame


class ObservedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process as the kernel, its log and its stacks show it."""

    record: ProcessRecord
    state: str  # a letter as in ps, or gone, or remote
    waits_in: str = ""  # kernel function
    age_s: float = float("inf")  # since it was started
    cpu: float = 0.0  # cores used while it was observed
    log_age_s: float | None = None
    log_line: str = ""  # the last one; of a process that ended or has just been started again, its last error
    stack: tuple[Frame, ...] = ()  # of its main thread, innermost call first; empty: unknown

    @property
    def title(self) -> str:
        return f"{self.record.name} (pid {self.record.pid})"

    @property
    def halted(self) -> bool:
        return self.state in HALTED

    @property
    def ended(self) -> bool:
        return self.state in ENDED


class ObservedRank(msgspec.Struct, frozen=True, kw_only=True):
    """The last heartbeat of a trainer rank."""

    rank: int
    pid: int
    step: int
    phase: str
    for_s: float


class ObservedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of the registry, queried over HTTP."""

    engine_id: str
    url: str
    answers: bool
    version: str = "none yet"
    paused: bool | None = None  # None: unknown
    requests: int | None = None
    # How long its answer to one request took, and tokens that it sampled per second, if it counts them.
    answer_s: float = 0.0
    tokens_per_s: float | None = None


class ObservedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """What the queue answered; ``oldest`` has, for each state, the group that has been longest in it."""

    report: Inspection
    oldest: tuple[GroupRecord, ...] = ()


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of the run's config, in seconds."""

    batch: float = 300.0
    collective: float = 600.0
    lease: float = 15.0
    sync: float = 240.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was observed of a run at one moment."""

    run: str
    launcher: int | None  # its pid; None: the run has no launcher
    launcher_state: str = "S"
    processes: tuple[ObservedProcess, ...] = ()
    ranks: tuple[ObservedRank, ...] = ()
    queue: ObservedQueue | None = None  # None: it did not answer
    engines: tuple[ObservedEngine, ...] = ()
    deadlines: Deadlines = Deadlines()
    max_restarts: int = 3
    steps: int = 0  # of the whole run
    steps_done: int = 0
    evaluated: bool = False  # it was to evaluate only (`rl-async eval`), and did
    evaluated_in_part: bool = False  # it was to, and ended before all episodes were complete
    usual_step_s: float | None = None  # median of the last steps
    # How much slower these are than earlier ones, if they are much slower.
    slowdown: str = ""
    disk_free: int = 1 << 40  # bytes, of the run's folder
    shm_free: int = 1 << 40  # bytes, of /dev/shm
    trouble: tuple[str, ...] = ()  # what could not be observed, and why

    def of_role(self, role: str) -> tuple[ObservedProcess, ...]:
        """Return the processes of one role."""
        return tuple(seen for seen in self.processes if seen.record.role == role)

    def rank_of(self, seen: ObservedProcess) -> ObservedRank | None:
        """Return the heartbeat of a trainer process; None if the last one was an earlier process's."""
        return next((rank for rank in self.ranks if rank.pid == seen.record.pid), None)
