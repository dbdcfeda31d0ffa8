"""Diagnoses a run: a pure function of an observation, whose types come first.

Causes come before effects. A process that cannot run explains the processes that wait for it; a full disk explains a
process that ended; a rank outside a collective explains the ranks inside. Only if no rule finds anything is the run
called slow or fine. To add a rule, write a function from an ``Observation`` to sentences and enter it in ``RULES``,
causes before effects.
"""

import statistics
from collections.abc import Callable
from typing import Literal

import msgspec

from rl_async.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER
from rl_async.insight.live_figures import away_text, given_up_text, slow_disk_text
from rl_async.messages import GroupRecord, Inspection
from rl_async.process.role import Frame
from rl_async.process.run_files import ENDED, HALTED, ProcessRecord, describe, describe_exit


class ObservedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process as seen in the kernel, its log and its stacks."""

    record: ProcessRecord
    # A letter as in ps, or gone, or remote.
    state: str
    # The kernel function that it waits in.
    waits_in: str = ""
    age_s: float = float("inf")
    # Cores used while it was observed.
    cpu: float = 0.0
    log_age_s: float | None = None
    # The last line of its log, or the last error of a process that ended or was just restarted.
    log_line: str = ""
    # The main thread's calls, innermost first; empty if they are unknown.
    stack: tuple[Frame, ...] = ()

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
    # Figures are None for engines that do not report them.
    paused: bool | None = None
    requests: int | None = None
    # How long it took to answer one request.
    answer_s: float = 0.0
    tokens_per_s: float | None = None


class ObservedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """The queue's answers. ``oldest`` holds, for each state, the group that has been in it longest."""

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
    # The launcher's pid, or None if it does not live.
    launcher: int | None
    launcher_state: str = "S"
    processes: tuple[ObservedProcess, ...] = ()
    ranks: tuple[ObservedRank, ...] = ()
    # None if the queue did not answer.
    queue: ObservedQueue | None = None
    engines: tuple[ObservedEngine, ...] = ()
    deadlines: Deadlines = Deadlines()
    max_restarts: int = 3
    steps: int = 0
    steps_done: int = 0
    # Whether a run of `rl-async eval`, which trains nothing, has recorded all episodes, or only those completed before
    # an early end.
    evaluated: bool = False
    evaluated_in_part: bool = False
    # The median length of the last steps, and a sentence if they are much slower than earlier ones.
    usual_step_s: float | None = None
    slowdown: str = ""
    # Where they are slower since batches come late: the mean seconds of the parts of an episode that was trained
    # lately, and the names of the reward functions.
    episode_s: dict[str, float] = {}
    rewards: tuple[str, ...] = ()
    # Bytes left in the run's folder and in /dev/shm.
    disk_free: int = 1 << 40
    shm_free: int = 1 << 40
    # One line for each observation that failed, with the reason.
    trouble: tuple[str, ...] = ()

    def of_role(self, role: str) -> tuple[ObservedProcess, ...]:
        """Return the processes of one role."""
        return tuple(seen for seen in self.processes if seen.record.role == role)

    def rank_of(self, seen: ObservedProcess) -> ObservedRank | None:
        """Return the heartbeat of a trainer process, or None if the last one is an earlier process's."""
        return next((rank for rank in self.ranks if rank.pid == seen.record.pid), None)


# With fewer free bytes a checkpoint or the journal fails.
LEAST_FREE = 64 << 20
# A step is slow if it takes this many times as long as usual, and longer than QUIET_S.
SLOW_FACTOR, QUIET_S = 3.0, 30.0
# A finding quotes at most this many characters of a log line.
LINE = 400
# A process that has ended this often will probably end again, unless it has run for SETTLED_S since.
AGAIN, SETTLED_S = 2, 60.0
# An engine is slow if its answers take longer than this, and SLOW_FACTOR times as long as those of others.
SLOW_ANSWER_S = 0.2
# A younger process may still be importing.
IMPORTS_S = 20.0
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
Health = Literal["fine", "slow", "stuck", "failed", "over"]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a run. ``findings`` are sentences, the cause first; ``waits`` describes the observed waits."""

    health: Health
    findings: tuple[str, ...]
    waits: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return self.findings[0]


def diagnose(seen: Observation) -> Diagnosis:
    """Apply all rules to an observation; if they find nothing, classify the run as slow or fine."""
    # Without a launcher, the last heartbeats of ranks are out of date, so nothing waits.
    if seen.launcher is None:
        return _over(seen)
    if _is_ending(seen):
        halted = tuple(_stopped(seen)) if seen.launcher_state in HALTED else ()
        ends = f"the run is ending: all {seen.steps} steps are trained, and its processes are being stopped"
        return Diagnosis(health="stuck" if halted else "fine", findings=(*halted, ends))
    waits = tuple(who_waits(seen))
    findings = [sentence for rule in RULES for sentence in rule(seen)]
    if findings:
        return Diagnosis(health="stuck", findings=tuple(findings), waits=waits)
    failed = given_up_text(seen.queue.report.status, None) if seen.queue else ""
    disk = slow_disk_text(seen.queue.report.status) if seen.queue else ""
    also = tuple(filter(None, (failed, _held_up(seen), _slow_part(seen), *_slow_engines(seen), *_without(seen))))
    slower = seen.slowdown or disk
    late = _recovering(seen) or _starting(seen) or _late(seen)
    late = late or (slower and f"nothing is stuck, but the run is slow: {slower}")
    if late:
        also = (disk, *also) if disk not in late else also
        return Diagnosis(health="slow", findings=(late, *also), waits=waits)
    usual = "" if seen.usual_step_s is None else f", {seen.usual_step_s:.1f} s each"
    fine = f"nothing is wrong: {seen.steps_done} of {seen.steps} steps are trained{usual}"
    return Diagnosis(health="fine", findings=(fine, *also), waits=waits)


def _is_ending(seen: Observation) -> bool:
    """Whether all steps are trained and the trainer has ended, so that the launcher ends the other processes."""
    ranks = seen.of_role("trainer")
    return 0 < seen.steps <= seen.steps_done and bool(ranks) and all(p.ended and not p.record.exit for p in ranks)


def needs_stacks(seen: Observation) -> bool:
    """Whether stacks would explain an observation made without them, since a process is silent or late."""
    if seen.launcher is None or _is_ending(seen):
        return False
    return bool(_silent_queue(seen) or _silent_engines(seen) or _late(seen))


def who_waits(seen: Observation) -> list[str]:
    """Return one line per observed wait, from the trainer back to the engines."""
    lines = []
    for process in seen.of_role("trainer"):
        rank = seen.rank_of(process)
        if rank is not None:
            lines.append(f"{process.record.name}: {rank.phase} of step {rank.step} for {rank.for_s:.0f} s")
    if any(rank.phase == "waiting for a batch" for rank in seen.ranks) and seen.queue is not None:
        lines.append("the batch: " + _batch(seen))
    if seen.queue is not None and (lease := seen.queue.report.oldest_lease) is not None:
        lines.append(f"group {lease.group_id}: with {lease.worker} for {lease.age_s:.0f} s")
    return lines


# --- the rules, causes first ------------------------------------------------------------------------------------------


def _disk(seen: Observation) -> list[str]:
    """Find file systems so full that the next write fails."""
    places = (("the run's folder", seen.disk_free), ("/dev/shm", seen.shm_free))
    return [
        f"the disk of {place} is full ({free >> 20} MiB free): checkpoints and the queue's journal cannot be written; "
        "delete old runs, checkpoints (trainer.keep_checkpoints) or trajectories (trainer.keep_trajectories) and "
        "continue with --resume"
        for place, free in places
        if free < LEAST_FREE
    ]


def _stopped(seen: Observation) -> list[str]:
    """Find processes that are stopped by a signal or a debugger."""
    found = []
    if seen.launcher_state in HALTED:
        found.append(
            f"the launcher (pid {seen.launcher}) {describe(seen.launcher_state)}: nothing is restarted until it goes "
            f"on; continue it with kill -CONT {seen.launcher}"
        )
    for process in seen.processes:
        if process.halted:
            pid = process.record.pid
            found.append(
                f"{_named(seen, process)} {describe(process.state)}: {_effect(seen, process)}; continue it with "
                f"kill -CONT {pid}, or kill it with kill -KILL {pid} and {AFTER_KILL[process.record.role]}"
            )
    return found


AFTER_KILL = {
    "prepare": "start again",
    "queue": "it replays its journal (with queue.journal=memory the run ends)",
    "shard": "what it held is generated again",
    "engine": "its requests are replayed elsewhere",
    "reward-model": "it is started again",
    "worker": "its leases are redelivered",
    "trainer": "the run goes on from the last checkpoint",
}


def _gone(seen: Observation) -> list[str]:
    """Find processes that failed and are not being restarted; those that a signal killed come first."""
    gone = [process for process in seen.processes if process.ended and _badly(process) and not _spared(seen, process)]
    gone.sort(key=lambda process: (process.record.exit or 0) >= 0)
    return [f"{_named(seen, process)} {_end(process)}: {_effect(seen, process)}{_said(process)}" for process in gone]


def _restarted(seen: Observation) -> list[str]:
    """Find processes that end again and again, without running for long."""
    return [
        f"{_named(seen, process)} keeps ending: it has ended {_ends(process)} times, and "
        + ("starts again" if process.ended else f"was started again {process.age_s:.0f} s ago")
        + f": {_effect(seen, process)}{_said(process)}; its log: {seen.run}/logs/{process.record.name}.log; it is "
        f"given up after {seen.max_restarts} restarts (launcher.max_restarts)"
        for process in seen.processes
        if _keeps_ending(process)
    ]


def _ends(process: ObservedProcess) -> int:
    return process.record.restarts + process.ended


def _keeps_ending(process: ObservedProcess) -> bool:
    """Whether the process ended more than once, and was just restarted or will be."""
    unsettled = process.record.state in ("restarting", "starting") or (
        process.record.state == "running" and not process.ended and process.age_s < SETTLED_S
    )
    return unsettled and _ends(process) >= AGAIN


def _spared(seen: Observation, process: ObservedProcess) -> bool:
    """Whether the launcher has given the process up, and the run goes on with others of its role."""
    role = process.record.role
    others = [other for other in seen.of_role(role) if other.record.state != "failed"]
    return role in ("engine", "worker") and process.record.state == "failed" and bool(others)


def _without(seen: Observation) -> list[str]:
    """Name the processes without which the run goes on."""
    return [
        f"the run goes on without {_named(seen, process)}, which {_end(process)}{_said(process)}; its log: "
        f"{seen.run}/logs/{process.record.name}.log"
        for process in seen.processes
        if _spared(seen, process)
    ]


def _badly(process: ObservedProcess) -> bool:
    if process.record.state == "ended":
        return process.record.exit not in (None, 0, *EXIT_STOPPED)
    return process.record.state != "restarting" and not _keeps_ending(process)


def _end(process: ObservedProcess) -> str:
    how = describe(process.state) if process.record.exit is None else f"ended ({describe_exit(process.record.exit)})"
    return f"{how} and is not started again" if process.record.state == "failed" else how


def _said(process: ObservedProcess) -> str:
    return f"; its last line: {process.log_line[:LINE]}" if process.log_line else ""


def _recovering(seen: Observation) -> str:
    """Describe the processes that the launcher is restarting; empty if it restarts none."""
    again = [process for process in seen.processes if process.record.state == "restarting"]
    starting = [p for p in seen.processes if p.record.state == "starting" and p.record.restarts and not p.ended]
    return "; ".join(
        [
            *(f"{process.title} {_end(process)} and is started again: {_effect(seen, process)}" for process in again),
            *(f"{p.title} ended and is starting again, since {p.age_s:.0f} s: {_effect(seen, p)}" for p in starting),
        ]
    )


def _starting(seen: Observation) -> str:
    """Describe a queue that is too young to answer; empty if it answers."""
    young = [process for process in seen.of_role("queue") if seen.queue is None and process.age_s < IMPORTS_S]
    return "; ".join(
        f"{process.title} was started {process.age_s:.0f} s ago and does not answer yet" for process in young
    )


def _silent_queue(seen: Observation) -> list[str]:
    if seen.queue is not None:
        return []
    return [
        f"{process.title} runs but does not answer: trainer, workers and launcher wait for it ({_doing(process)})"
        f"{_said(process)}"
        for process in seen.of_role("queue")
        if not process.halted and not process.ended and process.age_s >= IMPORTS_S
    ]


def _silent_engines(seen: Observation) -> list[str]:
    known = {process.record.name: process for process in seen.of_role("engine")}
    found = []
    for engine in seen.engines:
        process = known.get(engine.engine_id.partition(".")[0])
        if engine.answers or (process is not None and (process.halted or process.ended)):
            continue
        title = f"{engine.engine_id} at {engine.url}" if process is None else process.title
        doing = "" if process is None else f" ({_doing(process)})"
        found.append(
            f"{title} is frozen: it does not answer GET /health{doing}; its requests go to other engines, and the "
            "next weight update cuts it off; kill it to have it replaced now"
        )
    return found


def _ranks_apart(seen: Observation) -> list[str]:
    """Find ranks outside the collective that the other ranks wait in."""
    placed = [(process, rank) for process in seen.of_role("trainer") if (rank := seen.rank_of(process)) is not None]
    if len(placed) < 2 or any(process.halted or process.ended for process, _ in placed):
        return []
    waiting = [(process, rank) for process, rank in placed if in_collective(process)]
    absent = [
        (process, rank)
        for process, rank in placed
        # While rank 0 publishes, it signals each second to the waiting ranks that it still does.
        if not in_collective(process) and process.stack and (rank.rank, rank.phase) != (0, "publishing")
    ]
    longest = max((rank.for_s for _, rank in waiting), default=0.0)
    if not waiting or longest < max(QUIET_S, SLOW_FACTOR * (seen.usual_step_s or 0.0)):
        return []
    names = ", ".join(process.record.name for process, _ in waiting)
    return [
        f"{process.title} holds up the other ranks: {names} have waited for it in a collective for {longest:.0f} s; it "
        f"is {rank.phase} of step {rank.step} ({_doing(process)}); beyond {seen.deadlines.collective:.0f} s "
        "(trainer.collective_timeout_s) the run goes on from the last checkpoint"
        for process, rank in absent
    ]


def _all_given_up(seen: Observation) -> list[str]:
    """Find a run that has completed no group and has given up as many as it may have in flight."""
    if seen.queue is None or seen.steps_done or not seen.of_role("trainer"):
        return []
    status = seen.queue.report.status
    failed = given_up_text(status, None)
    if not failed or status.counters["dead_letters"] < status.slots:
        return []
    if status.ready or status.reserved or status.committed:
        return []
    return [f"no group has been completed, and {failed}; tracebacks are in {seen.run}/logs/worker-*.log"]


def _starved(seen: Observation) -> list[str]:
    """Find why the waiting trainer gets no batch: the queue is drained, or workers or running engines are missing."""
    waiting = next((rank for rank in seen.ranks if rank.phase == "waiting for a batch"), None)
    if waiting is None or seen.queue is None or waiting.for_s < QUIET_S:
        return []
    report = seen.queue.report
    if report.draining:
        return ["the queue is drained: nothing is admitted; `rl-async queue drain RUN --undo` lets it go on"]
    if report.status.unattended_s:
        return [
            f"{away_text(report.status)}: the trainer waits for a batch without a deadline; start an agent program "
            f"(docs/how-to/gateway.md), and see `rl-async gateway ls {seen.run}`"
        ]
    if report.status.workers == 0:
        return [f"no agent worker is connected: {_batch(seen)}; the workers' logs say why"]
    if seen.engines and all(engine.paused for engine in seen.engines):
        return [
            f"every engine is paused while the trainer has waited for a batch for {waiting.for_s:.0f} s: a weight "
            "update did not end; trainer-0's log names the engine"
        ]
    if not seen.engines:
        return [f"no engine is registered: {_batch(seen)}; the engines' logs say why"]
    return []


RULES: tuple[Callable[[Observation], list[str]], ...] = (
    _disk,
    _stopped,
    _gone,
    _restarted,
    _silent_queue,
    _silent_engines,
    _ranks_apart,
    _all_given_up,
    _starved,
)


# --- words ------------------------------------------------------------------------------------------------------------


def in_collective(process: ObservedProcess) -> bool:
    """Whether the main thread is in a collective operation of torch.distributed."""
    return any(frame.file.endswith(COLLECTIVES) for frame in process.stack[:8])


def _named(seen: Observation, process: ObservedProcess) -> str:
    rank = seen.rank_of(process)
    return process.title if rank is None else f"trainer rank {rank.rank} (pid {process.record.pid})"


def _doing(process: ObservedProcess) -> str:
    if process.stack:
        frame = process.stack[0]
        return f"it is in {frame.name}, {'/'.join(frame.file.split('/')[-2:])}:{frame.line}"
    kernel = f", in the kernel's {process.waits_in}" if process.waits_in else ""
    return f"it {describe(process.state)}{kernel}, and shows no Python stack"


def _effect(seen: Observation, process: ObservedProcess) -> str:
    """Describe the effect of a process that makes no progress on the others."""
    role = process.record.role
    if role == "trainer":
        if process.ended and process.record.exit in (EXIT_USER, EXIT_FAILED):
            return "the run ends, as it would fail again"
        if process.ended:
            return "all ranks start again from the last checkpoint (without one, from the beginning)"
        others = [other for other in seen.of_role("trainer") if other is not process and not other.halted]
        waits = [f"rank {rank.rank} {_wait(other, rank)}" for other in others if (rank := seen.rank_of(other))]
        return ", ".join(waits) or "nothing is trained and no weights are published"
    if role == "worker" and seen.queue is not None:
        held = [group for group in seen.queue.oldest if any(_is(process, worker) for worker in group.workers)]
        lease = seen.queue.report.oldest_lease
        if lease is not None and _is(process, lease.worker):
            return f"it holds group {lease.group_id} for {lease.age_s:.0f} s, until its lease expires"
        return f"it holds group {held[0].group_id}" if held else "it holds no lease; others go on"
    if role == "engine" and not any(engine.answers for engine in seen.engines):
        return "no other engine answers, so nothing is generated"
    return {
        "queue": "trainer, workers and launcher wait for it",
        "engine": "its requests go to other engines, and wait if there are none",
        "shard": "the trainer waits for the trajectories that it keeps",
        "reward-model": "episodes wait for their rewards",
    }.get(role, "others wait for it")


def _wait(process: ObservedProcess, rank: ObservedRank) -> str:
    """Describe how a rank waits, or waited, for another one."""
    call = next((frame.name for frame in process.stack if frame.file.endswith(COLLECTIVES)), "")
    verb = "waited" if process.ended else f"waits in {call}" if call else "waits"
    return f"{verb} for it, {rank.phase} of step {rank.step} for {rank.for_s:.0f} s"


def _is(process: ObservedProcess, worker: str) -> bool:
    """Whether this process is the worker of this name in the queue (``Session``)."""
    return f"-{process.record.pid}-" in worker


def _batch(seen: Observation) -> str:
    assert seen.queue is not None
    status = seen.queue.report.status
    return (
        f"{status.ready} groups are ready, {status.leased} are being generated, {status.waiting} wait for a worker, "
        f"{status.reserved} are being trained"
    )


def _late(seen: Observation) -> str:
    """Describe a rank that has been in its phase much longer than usual; empty if none has."""
    slowest = max(seen.ranks, key=lambda rank: rank.for_s, default=None)
    if slowest is None:
        return ""
    usual = seen.usual_step_s
    if slowest.for_s < max(QUIET_S, SLOW_FACTOR * (usual or 0.0)):
        return ""
    deadline = {
        "waiting for a batch": f"; the deadline is {seen.deadlines.batch:.0f} s (trainer.batch_timeout_s)",
        "publishing": f"; the deadline is {seen.deadlines.sync:.0f} s (weight_sync.sync_timeout_s)",
    }.get(slowest.phase, "")
    than = "" if usual is None else f", where a whole step usually takes {usual:.1f} s"
    batch = f": {_batch(seen)}" if slowest.phase == "waiting for a batch" and seen.queue else ""
    return (
        f"nothing is stuck, but the run is slow: trainer rank {slowest.rank} is {slowest.phase} of step "
        f"{slowest.step} for {slowest.for_s:.0f} s{than}{batch}{deadline}"
    )


def _slow_engines(seen: Observation) -> list[str]:
    """Describe engines that answer much later, or serve older weights, than others."""
    found = []
    newest = str(seen.queue.report.status.published) if seen.queue else ""
    for engine in seen.engines:
        others = [other for other in seen.engines if other is not engine and other.answers]
        if not (engine.answers and others):
            continue
        usual = statistics.median(other.answer_s for other in others)
        behind = engine.version != newest and any(other.version == newest for other in others)
        rate = "" if engine.tokens_per_s is None else f", {engine.tokens_per_s:.0f} tokens/s"
        if engine.answer_s > max(SLOW_ANSWER_S, SLOW_FACTOR * usual):
            found.append(
                f"{engine.engine_id} is slow: it answers after {engine.answer_s:.2f} s, "
                f"others after {usual:.2f} s{rate}"
            )
        elif behind:
            found.append(
                f"{engine.engine_id} serves version {engine.version}, while {newest} is published: it is being brought "
                f"up to date, or is too slow for it{rate}"
            )
    return found


def _slow_part(seen: Observation) -> str:
    """Describe the part of an episode that takes most of its time, where batches come late; empty elsewhere."""
    if not seen.episode_s:
        return ""
    part = max(seen.episode_s, key=lambda name: seen.episode_s[name])
    words = {"generate": "answers of engines", "tools": "tool calls", "environment": "its environment"}
    named = f"its reward ({', '.join(seen.rewards)})" if part == "reward" else words[part]
    return (
        f"an episode that was trained lately took {sum(seen.episode_s.values()):.1f} s on average, "
        f"{seen.episode_s[part]:.1f} s of them for {named}"
    )


def _held_up(seen: Observation) -> str:
    """Describe how often the queue stood still; empty if it did not."""
    times = seen.queue.report.status.counters.get("held_up", 0) if seen.queue else 0
    if not times:
        return ""
    often = "once" if times == 1 else f"{times} times"
    return (
        f"the queue stood still {often} for seconds since it was started, as when the disk of its journal is slow: "
        f"{seen.run}/logs/queue.log says for how long"
    )


def _over(seen: Observation) -> Diagnosis:
    """Diagnose a run whose launcher is gone."""
    if seen.steps and seen.steps_done >= seen.steps:
        return Diagnosis(health="over", findings=(f"the run ended well: all {seen.steps} steps are trained",))
    if seen.evaluated:
        return Diagnosis(health="over", findings=("the evaluation ended well",))
    why = "it was interrupted, or its launcher was killed"
    done = f"{seen.steps_done} of {seen.steps} steps were trained"
    if seen.evaluated_in_part:
        why, done = "the evaluation ended early", "trajectories/ has the episodes that were complete"
    failed = [p for p in seen.processes if p.record.state == "failed" and not _spared(seen, p)]
    findings = [f"the run failed with {process.title}: {process.log_line or 'it wrote nothing'}" for process in failed]
    findings = [*_disk(seen), *findings] or [f"the run is not running; {why}"]
    first = f"{findings[0]} ({done})"
    return Diagnosis(health="failed", findings=(first, *findings[1:]))
