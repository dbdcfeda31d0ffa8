"""Describes what each process of a run is doing, and for how long, for the live view.

Pure functions of process states, heartbeats of trainer ranks, their progress, the queue's report and the loads of
engines; and ``EngineWatch``, which asks the engines.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_async.insight.live_figures import away_text
from rl_async.insight.roster import ProcessState
from rl_async.messages import FAILED, EngineRecord, Inspection, WorkerRecord
from rl_async.process.run_files import Beat, Progress
from rl_async.rollout_server.api import EngineLoad
from rl_async.rollout_server.pool import ask_loads, connect

# An engine or a queue that has not answered for this long is said to be silent.
SILENT_S = 3.0
# A worker that has not asked the queue for work by then is in trouble.
STARTS_S = 60.0
# The deadline of one answer of an engine.
ANSWER_S = 5.0
# At most so many processes of a role have a line; those that are not running come first.
MOST_LINES = 4
# The queue's counters in words. Those that a line of their own shows are left out.
COUNTERS = {
    "redelivered": "failed samples played again",
    "leases_lost": "samples taken back from a lost or silent worker",
    "requeued": "groups put back by hand",
    "dropped": "groups dropped as too stale or rolled back",
    "refilled": "groups without signal replaced",
    "passed_over": "tasks passed over by the curriculum",
    "accepted_without_signal": "groups without signal accepted",
    "eval_missing": "held-out samples given up",
    "fenced": "late results refused, as another worker has the sample",
    "malformed": "messages refused as malformed",
    "denied": "clients refused",
    "short_of_bytes": "times that workers waited for memory (queue.max_bytes)",
    "shards_lost": "payload shards lost",
    "samples_lost": "samples lost with a shard",
    "consumers_missed": "groups that a consumer missed",
}
NOT_SHOWN = ("dead_letters",)
BATCH, TRAIN = "waiting for a batch", "training"


@dataclass(frozen=True)
class Row:
    """What one process is doing. ``trouble`` marks one that is not working as it should."""

    name: str
    text: str
    trouble: bool = False


@dataclass(frozen=True)
class SeenEngine:
    """The last answer of an engine at the time ``answered``, and the time of the first question without an answer.

    ``per_s`` is its speed between the last two answers in tokens sampled per second, if it counts them.
    """

    engine_id: str
    load: EngineLoad | None = None
    answered: float = 0.0
    silent_since: float | None = None
    per_s: float | None = None

    def heard(self, load: EngineLoad, now: float) -> "SeenEngine":
        """Return this engine after an answer."""
        per_s = None
        if self.load is not None and self.load.tokens is not None and load.tokens is not None and now > self.answered:
            # An engine that was started again counts from 0.
            per_s = max(0, load.tokens.sampled - self.load.tokens.sampled) / (now - self.answered)
        return SeenEngine(self.engine_id, load, now, None, per_s)

    def is_silent(self, now: float) -> bool:
        """Whether it has not answered for SILENT_S."""
        return self.silent_since is not None and now - self.silent_since >= SILENT_S

    def silent(self, asked: float) -> "SeenEngine":
        """Return this engine after a question, asked at that time, had no answer."""
        return self if self.silent_since is not None else replace(self, silent_since=asked)


class EngineWatch:
    """Asks engines for their load, all at once, and remembers their last answers."""

    def __init__(self, token: Callable[[], str], clock: Callable[[], float] = time.time) -> None:
        self._token, self._clock = token, clock
        self._seen: dict[str, SeenEngine] = {}

    @property
    def seen(self) -> Mapping[str, SeenEngine]:
        """The engines of the last call of ``ask``, by id, and those that have been silent since before."""
        return self._seen

    async def ask(self, engines: Sequence[EngineRecord]) -> None:
        """Ask these engines, and forget others. Takes ANSWER_S at most."""
        asked = self._clock()
        clients = [connect(engine.kind, engine.url, ANSWER_S, token=self._token()) for engine in engines]
        loads = await ask_loads(clients, ANSWER_S)
        found = {}
        for engine, load in zip(engines, loads, strict=True):
            known = self._seen.get(engine.engine_id, SeenEngine(engine.engine_id))
            found[engine.engine_id] = known.silent(asked) if load is None else known.heard(load, self._clock())
        self._seen = found


def duration(seconds: float) -> str:
    """Format a duration with its two largest units."""
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def left_text(step_s: Sequence[float], steps_left: int) -> str:
    """Estimate the time that the remaining steps take from the newest ones; empty without any."""
    if not step_s or steps_left <= 0:
        return ""
    return f"about {duration(statistics.median(step_s) * steps_left)} left"


def first_step_text(beat: Beat | None, steps: int) -> str:
    """Describe a run before its first record by the phase of the trainer's first rank."""
    done = f"none of {steps} done"
    if beat is None or beat.phase == "starting":
        return f"{done}; the processes are starting"
    if beat.phase == BATCH:
        return f"{done}; the batch of step {beat.step} is being sampled"
    if beat.phase == TRAIN:
        return f"{done}; step {beat.step} is being trained"
    return f"{done}; step {beat.step}: {beat.phase}"


def numbered(count: int, noun: str) -> str:
    """Return the count with its noun: 1 group, 2,000 groups."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def progress_text(progress: Progress, now: float) -> str:
    """Describe how far a piece of work has come. A long silence of its process counts as part of the work."""
    text = f"{progress.done:,} of {progress.total:,} {progress.unit}"
    left_s = progress.left_s
    if left_s is None:
        return text
    return f"{text}, about {duration(max(0.0, left_s - (now - progress.at)))} left"


def rank_text(beat: Beat, progress: Progress | None, now: float) -> str:
    """Describe the phase of a trainer rank with its age and, within a long one, its progress."""
    text = f"step {beat.step}, {beat.phase} for {duration(now - beat.since)}"
    if beat.phase == "starting":
        return f"starting for {duration(now - beat.since)}"
    if beat.phase != TRAIN or progress is None or progress.since < beat.since:
        return text
    work = "" if progress.work == TRAIN else f"{progress.work}, "
    return f"{text}: {work}{progress_text(progress, now)}"


def engine_text(seen: SeenEngine, now: float) -> str:
    """Describe the work of an engine, or its silence."""
    if seen.is_silent(now):
        return f"has not answered for {duration(now - (seen.silent_since or now))}"
    if seen.load is None:
        return "running"
    work = f"sampling {numbered(seen.load.requests, 'request')}" if seen.load.requests else "idle"
    if seen.load.tokens is None:
        return work
    speed = f", {seen.per_s:,.0f} per second" if seen.per_s is not None and seen.load.requests else ""
    return f"{work}; {seen.load.tokens.sampled:,} tokens sampled so far{speed}"


def worker_text(worker: WorkerRecord) -> str:
    """Describe the work of an agent worker that the queue knows."""
    if not worker.samples:
        return "idle, waits for work"
    episodes, groups = numbered(worker.samples, "episode"), numbered(worker.groups, "group")
    return f"playing {episodes} of {groups}, the oldest for {duration(worker.oldest_s)}"


def queue_text(report: Inspection, groups: int) -> str:
    """Describe the queue: the batch of ``groups`` groups that it collects, and who waits."""
    status = report.status
    text = f"{numbered(status.ready, 'group')} ready ({groups} make a batch), {status.leased} being played"
    if status.slots_used >= status.slots and not status.leased:
        text += "; full, so workers wait for the trainer"
    else:
        text += f", {status.slots_used} of {status.slots} slots used"
    return f"{text}; {away_text(status)}" if status.unattended_s else text


def counters_text(counters: Mapping[str, int]) -> str:
    """Describe the queue's counters in words; empty if all are 0."""
    parts = []
    for name, count in counters.items():
        if not count or name in NOT_SHOWN:
            continue
        if name.startswith(FAILED):
            parts.append(f"{count:,} attempts ended by {name.removeprefix(FAILED)}")
        else:
            parts.append(f"{count:,} {COUNTERS.get(name, name.replace('_', ' '))}")
    return ", ".join(parts)


@dataclass(frozen=True)
class Observed:
    """Everything that the rows are made of, at the Unix time ``now``."""

    now: float
    states: Sequence[ProcessState]
    beats: Mapping[str, Beat]
    progress: Mapping[str, Progress]
    engines: Mapping[str, SeenEngine]
    report: Inspection | None
    # When the queue was first asked without an answer since; None while it answers.
    queue_silent_since: float | None
    # Whether the launcher is ending the run, and asks the queue no more.
    queue_closing: bool
    # The number of groups of a batch.
    groups: int


def role_rows(seen: Observed) -> list[Row]:
    """Return a row per process, at most MOST_LINES of a role; the others are counted in its last one."""
    roles: dict[str, list[Row]] = {}
    for state in seen.states:
        roles.setdefault(state.name.rstrip("0123456789").rstrip("-"), []).append(_row(state, seen))
    rows = []
    for found in roles.values():
        found = [row for row in found if row.trouble] + [row for row in found if not row.trouble]
        rows += found[:MOST_LINES]
        if more := found[MOST_LINES:]:
            troubled = sum(row.trouble for row in more)
            rows.append(Row("", f"and {len(more)} more" + (f", {troubled} of them in trouble" if troubled else "")))
    return rows


def _row(state: ProcessState, seen: Observed) -> Row:
    again = f" (restarted {state.restarts}x)" if state.restarts else ""
    if state.state != "running":
        lasts = state.since and state.state not in ("ended", "failed")
        age = f" for {duration(seen.now - state.since)}" if lasts else ""
        return Row(state.name, f"{state.state}{age}{again}", state.state in ("restarting", "failed"))
    row = _working(state, seen)
    return replace(row, text=row.text + again)


def _working(state: ProcessState, seen: Observed) -> Row:
    """Describe what a running process is doing, as far as it is known."""
    name, age_s = state.name, seen.now - state.since
    if name == "queue":
        return _queue(name, age_s, seen)
    if (beat := seen.beats.get(name)) is not None:
        return Row(name, rank_text(beat, seen.progress.get(name), seen.now))
    if engine := newest_of(name, seen.engines.values()):
        return Row(name, engine_text(engine, seen.now), engine.is_silent(seen.now))
    kind, _, index = name.rpartition("-")
    if kind == "worker" and seen.report is not None:
        # The queue knows a worker by this name, its pid and a random number.
        own = [one for one in seen.report.workers if one.worker.startswith(f"agent-{index}-")]
        if own:
            return Row(name, worker_text(max(own, key=lambda one: one.samples)))
        if age_s > STARTS_S:
            return Row(name, f"the queue has not heard of it (it runs for {duration(age_s)})", trouble=True)
    if kind in ("worker", "trainer"):
        return Row(name, f"starting for {duration(age_s)}")
    return Row(name, "running")


def _queue(name: str, age_s: float, seen: Observed) -> Row:
    silent_s = 0.0 if seen.queue_silent_since is None else seen.now - seen.queue_silent_since
    trained = any(state.name.startswith("trainer") and state.state == "ended" for state in seen.states)
    if trained and (seen.queue_closing or seen.queue_silent_since is not None):
        return Row(name, "closed, as training has ended")
    if seen.queue_closing:
        return Row(name, "the run is stopping; closes once the trainer has ended")
    if seen.report is None:
        return Row(name, f"starting for {duration(age_s)}")
    if silent_s >= SILENT_S:
        return Row(name, f"has not answered for {duration(silent_s)}", trouble=True)
    return Row(name, queue_text(seen.report, seen.groups))


def newest_of(name: str, engines: Iterable[SeenEngine]) -> SeenEngine | None:
    """Return the newest engine of the process ``name``; after a restart, its id ends with the restart's number."""
    own = [one for one in engines if one.engine_id.partition(".")[0] == name]
    return max(own, key=lambda one: int(one.engine_id.partition(".")[2] or 0), default=None)
