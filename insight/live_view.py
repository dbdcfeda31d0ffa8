"""The live view of a run: a panel that refreshes on a terminal, one line per trainer step otherwise."""

import asyncio
import contextlib
import math
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import QueueLost, UserError
from rl_async.files import undamaged
from rl_async.insight.live_figures import (
    MARK,
    UNSCORED,
    History,
    RecordedConversation,
    arguments_text,
    away_text,
    bar,
    conversation_of,
    curve,
    given_up_text,
    held_out,
    mean,
    next_commands,
    no_tool_works,
    nothing_scored_text,
    position,
    scale_of,
    slow_disk_text,
    sparkline,
    step_line,
    summary_lines,
    time_split,
    unplayed_lines,
    unscored_text,
)
from rl_async.insight.tail import LineTail, LogWarnings, Record, record_of
from rl_async.messages import FAILED, EngineList, EngineRecord, Inspection, StatusReport
from rl_async.process.http_auth import run_token
from rl_async.process.role import printable
from rl_async.process.run_files import Beat, ProcessState, Progress, read_beats, read_progress
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

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token
        self._seen: dict[str, SeenEngine] = {}

    @property
    def seen(self) -> Mapping[str, SeenEngine]:
        """The engines of the last call of ``ask``, by id, and those that have been silent since before."""
        return self._seen

    async def ask(self, engines: Sequence[EngineRecord]) -> None:
        """Ask these engines, and forget others. Takes ANSWER_S at most."""
        asked = time.time()
        clients = [connect(engine.kind, engine.url, ANSWER_S, token=self._token()) for engine in engines]
        loads = await ask_loads(clients, ANSWER_S)
        found = {}
        for engine, load in zip(engines, loads, strict=True):
            known = self._seen.get(engine.engine_id, SeenEngine(engine.engine_id))
            found[engine.engine_id] = known.silent(asked) if load is None else known.heard(load, time.time())
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
    # After a restart, the id of a process's engine ends with the restart's number.
    own_engines = [one for one in seen.engines.values() if one.engine_id.partition(".")[0] == name]
    if own_engines:
        engine = max(own_engines, key=lambda one: int(one.engine_id.partition(".")[2] or 0))
        return Row(name, engine_text(engine, seen.now), engine.is_silent(seen.now))
    kind, _, index = name.rpartition("-")
    if kind == "worker" and seen.report is not None:
        # The queue knows a worker by this name, its pid and a random number.
        own = [one for one in seen.report.workers if one.worker.startswith(f"agent-{index}-")]
        if own:
            worker = max(own, key=lambda one: one.samples)
            if not worker.samples:
                return Row(name, "idle, waits for work")
            episodes, groups = numbered(worker.samples, "episode"), numbered(worker.groups, "group")
            return Row(name, f"playing {episodes} of {groups}, the oldest for {duration(worker.oldest_s)}")
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


REFRESH_S = 0.5
# Without a panel, the queue is queried less often.
ASK_S = 5.0
# Engines are asked, and logs read, this often.
LOOK_S = 2.0
# Without a panel and without a step for this long, a line says what each process is doing.
QUIET_S = 60.0
# Without a terminal, the progress of a preparation is a line this often.
LINE_S = 15.0
# After this long without a request from agent programs, a line reports their absence.
AWAY_S = 15.0
# The same line is repeated at most this often.
REMIND_S = 600.0
# A warning is told again when it has occurred this many times as often.
AGAIN = 4
STATE_COLOURS = {"running": "green", "starting": "yellow", "restarting": "yellow", "ended": "dim"}
# The indentation of a turn's text.
INDENT = 10
# At most so many kinds of warnings are shown at once, and at the end.
MOST_WARNINGS = 4
# A terminal at least so large has room for a curve of this height, once there are some steps to draw.
WIDE, HIGH, CURVE = 100, 34, 9
SOME_STEPS = 2
MARKUP = re.compile(r"<tool_call>.*?(</tool_call>|$)", re.DOTALL)
ROLE_COLOURS = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


class Queue(Protocol):
    """The verbs of the queue's client that the view needs."""

    async def inspect(self) -> Inspection: ...
    async def engines(self) -> EngineList: ...


class View:
    """Shows a run until cancelled, and summarizes it.

    ``states`` lists the processes; ``queue`` returns a client, or raises QueueLost while there is none. Both are called
    only on the view's event loop.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        states: Callable[[], Collection[ProcessState]],
        queue: Callable[[], Queue],
        console: Console | None = None,
    ) -> None:
        self._config, self._folder, self._states, self._queue = config, folder, states, queue
        self._console = console or Console()
        self._tail = LineTail(folder / "metrics.jsonl")
        self._history = History()
        # The queue's last answer, and when it was first asked without one since.
        self._inspection: Inspection | None = None
        self._asked_at: float | None = None
        # The launcher has closed its client of the queue, as it does once the run ends or stops.
        self._closing = False
        self._engines = EngineWatch(lambda: run_token(folder, "engines"))
        self._warnings = LogWarnings(folder)
        # The heartbeats of an earlier start are out of date.
        self._began_at = time.time()
        # The time when a line of each kind was last printed.
        self._said: dict[str, float] = {}
        self._began = self._newest_line = time.monotonic()
        # Records of an earlier start are not shown again.
        with undamaged(folder / "metrics.jsonl"):
            for line in self._tail.each():
                self._history.add(line)

    async def run(self) -> None:
        """Consumes metrics.jsonl, recorded trajectories, logs, heartbeats, process states, and the reports of the queue
        and of engines.

        Produces the display. Waits REFRESH_S between updates; queue and engines are asked beside it, so that the
        display goes on while they are silent. Runs until cancelled.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_queue())
            group.create_task(self._look_at_engines())
            if self._console.is_terminal:
                await self._run_live()
            else:
                group.create_task(self._print_troubles())
                await self._run_lines()

    def summary(self) -> str:
        """Summarize the run in a few lines, up to the last record of the trainer, and name the next commands."""
        self._read()
        self._warnings.read()
        seconds = time.monotonic() - self._began
        bound = self._config.queue.max_staleness
        lines = summary_lines(self._history, self._folder, seconds, bound, self._report)
        warned = [f"warning of {warning.line}" for warning in self._warnings.newest_first[:MOST_WARNINGS]]
        unplayed = unplayed_lines(self._config, self._history, self._folder)
        commands = next_commands(self._folder, trained=len(self._history) > 0)
        return "\n".join([*lines, *unplayed, *warned, *commands])

    @property
    def _report(self) -> StatusReport | None:
        return None if self._inspection is None else self._inspection.status

    async def _ask_queue(self) -> None:
        """Ask the queue again and again; the supervisor handles a lost one, so here only its silence is noted."""
        pause_s = REFRESH_S if self._console.is_terminal else ASK_S
        while True:
            try:
                queue = self._queue()
            except QueueLost:
                self._closing = self._inspection is not None
            else:
                asked = time.time()
                self._asked_at = asked if self._asked_at is None else self._asked_at
                with contextlib.suppress(QueueLost):
                    self._inspection = await queue.inspect()
                    self._asked_at = None
            await asyncio.sleep(pause_s)

    async def _look_at_engines(self) -> None:
        """Ask all engines for their load again and again."""
        while True:
            try:
                engines = (await self._queue().engines()).engines
            except QueueLost:
                # Those that are known are asked again once the queue is back.
                engines = None
            if engines is not None:
                await self._engines.ask(engines)
            await asyncio.sleep(LOOK_S)

    def _observed(self) -> Observed:
        now = time.time()
        beats = {f"trainer-{beat.rank}": beat for beat in read_beats(self._folder) if beat.since >= self._began_at}
        progress = {name: found for name in beats if (found := read_progress(self._folder, name)) is not None}
        return Observed(
            now=now,
            states=tuple(self._states()),
            beats=beats,
            progress=progress,
            engines=self._engines.seen,
            report=self._inspection,
            queue_silent_since=self._asked_at,
            queue_closing=self._closing,
            groups=self._config.data.train_batch_groups,
        )

    def _read(self) -> list[Record]:
        found = []
        for line in self._tail.read():
            # One damaged line must not end a run that goes on.
            try:
                with undamaged(self._folder / "metrics.jsonl"):
                    self._history.add(line)
                    found.append(record_of(line))
            except UserError as error:
                self._remind("damaged", str(error))
        return found

    async def _run_lines(self) -> None:
        known: dict[str, ProcessState] = {}
        try:
            while True:
                self._print_news(known)
                await asyncio.sleep(REFRESH_S)
        finally:
            # The last step may have been recorded at the end of the run.
            self._print_news(known)

    async def _print_troubles(self) -> None:
        """Consumes the queue's report and the logs; produces lines on groups that were given up, on absent agent
        programs, on scorers that have scored nothing, on warnings, and on what is done if no step ends for long.

        Waits REFRESH_S between looks. Runs until cancelled.
        """
        reported = 0
        while True:
            report = self._report
            if report is not None and report.unattended_s > AWAY_S:
                self._remind("away", f"{away_text(report)}: start an agent program (docs/how-to/gateway.md)")
            if report is not None and (text := nothing_scored_text(report)):
                self._remind("nothing scored", text)
            if report is not None and (text := slow_disk_text(report)):
                self._remind("slow disk", text)
            if report is not None and (count := report.counters.get("dead_letters", 0)) > 2 * reported:
                reported = count
                self._print(given_up_text(report, None))
            for warning in self._warnings.read():
                if warning.count >= AGAIN * warning.told:
                    warning.told = warning.count
                    self._print(f"warning of {warning.line}")
            if time.monotonic() - self._newest_line > QUIET_S:
                self._newest_line = time.monotonic()
                doing = "; ".join(f"{row.name} {row.text}".strip() for row in role_rows(self._observed()))
                self._print(f"no step for a while: {doing}")
            await asyncio.sleep(REFRESH_S)

    def _remind(self, of: str, line: str) -> None:
        """Print a line of this kind, unless one was printed within REMIND_S."""
        now = time.monotonic()
        if now - self._said.get(of, -math.inf) > REMIND_S:
            self._said[of] = now
            self._print(line)

    def _print_news(self, known: dict[str, ProcessState]) -> None:
        for state in self._states():
            if state.restarts > (known[state.name].restarts if state.name in known else 0):
                self._print(f"{state.name} was restarted ({state.restarts})")
            if state.state == "failed" and known.get(state.name, state).state != "failed":
                self._print(f"{state.name} failed and is not started again; its log: logs/{state.name}.log")
            known[state.name] = state
        for record in self._read():
            self._newest_line = time.monotonic()
            left = left_text(self._history.speeds.newest_s, self._config.trainer.steps - int(record["step"]) - 1)
            self._print("  ".join(filter(None, (step_line(record, self._config.trainer.steps), left))))
            if share := record.get(UNSCORED):
                self._remind("unscored", unscored_text(share))
        if slower := self._history.speeds.slowdown:
            self._remind("slower", f"{slower}; `rl-async doctor {self._folder}` looks for the cause")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    async def _run_live(self) -> None:
        conversation: tuple[int, RecordedConversation] | None = None
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                self._read()
                await asyncio.to_thread(self._warnings.read)
                conversation = await asyncio.to_thread(self._newest_conversation, conversation)
                live.update(self._render(self._observed(), conversation), refresh=True)
                await asyncio.sleep(REFRESH_S)

    def _newest_conversation(
        self, shown: tuple[int, RecordedConversation] | None
    ) -> tuple[int, RecordedConversation] | None:
        """Return a conversation of the newest step, with the step, or the shown one until the newest step has one."""
        record = self._history.last
        if record is None or (shown is not None and shown[0] == record["step"]):
            return shown
        try:
            found = conversation_of(self._folder, record, self._config.trainer.ranks)
        except UserError as error:
            self._remind("damaged", str(error))
            return shown
        return shown if found is None else (int(record["step"]), found)

    def _render(self, seen: Observed, conversation: tuple[int, RecordedConversation] | None) -> RenderableType:
        seconds = int(time.monotonic() - self._began)
        title = f"{self._config.name}  {self._config.mode}  {seconds // 60}:{seconds % 60:02d}"
        panels: list[RenderableType] = [Panel(self._numbers(seen), title=title, title_align="left")]
        if warnings := self._warnings.newest_first:
            lines = [f"{duration(seen.now - one.last)} ago, {one.line}" for one in warnings[:MOST_WARNINGS]]
            if more := len(warnings) - MOST_WARNINGS:
                lines += [f"and {numbered(more, 'other kind')}; logs/*.log has them all"] if more > 0 else []
            panels.append(Panel(Text("\n".join(lines), style="yellow"), title="warnings", title_align="left"))
        if conversation is not None:
            step, recorded = conversation
            head = f"a conversation of step {step}, reward {recorded.reward:g}"
            panels.append(Panel(render_conversation(recorded), title=head, title_align="left"))
        return Group(*panels)

    def _numbers(self, seen: Observed) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        record, steps = self._history.last, self._config.trainer.steps
        if record is None:
            beat = min(seen.beats.values(), key=lambda beat: beat.rank, default=None)
            table.add_row("step", first_step_text(beat, steps))
        else:
            self._add_step(table, record)
        if failed := given_up_text(self._report, record):
            table.add_row("failed", failed)
        if self._report is not None and (text := nothing_scored_text(self._report)):
            table.add_row("not scored", text)
        if self._report is not None and (text := slow_disk_text(self._report)):
            table.add_row("disk", text)
        for row in role_rows(seen):
            state = next((one.state for one in seen.states if one.name == row.name), "")
            colour = "red" if row.trouble else STATE_COLOURS.get(state, "")
            table.add_row(Text(row.name, style=colour), Text(row.text, style="red" if row.trouble else ""))
        if self._report is not None and (text := counters_text(self._report.counters)):
            table.add_row("so far", text)
        return table

    def _add_step(self, table: Table, record: Record) -> None:
        rewards, steps = self._history.values("reward"), self._config.trainer.steps
        split = time_split(record)
        left = left_text(self._history.speeds.newest_s, steps - int(record["step"]) - 1)
        table.add_row("step", ", ".join(filter(None, (position(record, steps), left))))
        evaluations = held_out(self._folder)
        if rewards:
            self._add_rewards(table, rewards, evaluations)
        if evaluations:
            last = max(evaluations)
            before = f"{evaluations[0]:.3f} before, " if 0 in evaluations and last else ""
            table.add_row("held out", f"{before}{evaluations[last]:.3f} at version {last}")
        shares = "  ".join(f"{fill} {name} {s:.2f} s" for fill, (name, s) in zip("░█▒", split.items(), strict=True))
        table.add_row("time", f"{bar(list(split.values()), 20)}  {record.get('time/step_s', 0.0):.2f} s: {shares}")
        table.add_row(
            "staleness",
            f"mean {record.get('staleness/mean', 0.0):.2f}, max {record.get('staleness/max', 0.0):.0f} "
            f"(bound {self._config.queue.max_staleness})",
        )
        table.add_row("tokens", f"{record.get('tokens/per_s', 0.0):,.0f} per second")
        if slower := self._history.speeds.slowdown:
            table.add_row("slower", slower)
        if share := record.get(UNSCORED):
            table.add_row("not scored", unscored_text(share))
        if no_tool_works(record):
            table.add_row("tools", "every call failed; `rl-async show` has the errors, logs/worker-*.log their places")

    def _add_rewards(self, table: Table, rewards: list[float], evaluations: dict[int, float]) -> None:
        """Add the curve of the rewards, or one line of it if the terminal is small."""
        numbers = f"{rewards[-1]:.3f}, last five {mean(rewards[-5:]):.3f}"
        if self._console.width >= WIDE and self._console.height >= HIGH and len(rewards) >= SOME_STEPS:
            width = min(self._console.width - 24, 140)
            marks = f"; {MARK} held out" if evaluations else ""
            lines = curve(rewards, evaluations, width, CURVE)
            table.add_row("reward", Text("\n".join([f"{numbers}{marks}", *lines]), no_wrap=True))
            return
        low, high = scale_of(rewards)
        line = sparkline(rewards, max(10, min(60, self._console.width - 60)), low, high)
        table.add_row("reward", f"{line}  {numbers} (drawn from {low:g} to {high:g})")


async def show_progress(folder: Path, name: str, console: Console) -> None:
    """Consumes the progress of the process ``name``; produces a bar on a terminal, and otherwise a line now and then.

    Waits REFRESH_S between updates. Runs until cancelled.
    """
    began, told = time.time(), time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            progress = read_progress(folder, name)
            # An earlier start may have left its own.
            if progress is not None and progress.since >= began:
                now = time.time()
                drawn = bar([progress.done, max(0, progress.total - progress.done)], 24, "█░")
                about = f"; {progress.about}" if progress.about else ""
                age = duration(now - progress.since)
                text = f"{progress.work}, {age}  {drawn}  {progress_text(progress, now)}{about}"
                if console.is_terminal:
                    live.update(Text(text), refresh=True)
                elif time.monotonic() - told > LINE_S:
                    told = time.monotonic()
                    console.print(text, markup=False, highlight=False, soft_wrap=True)
            await asyncio.sleep(REFRESH_S)


def render_conversation(recorded: RecordedConversation) -> Text:
    """Render a conversation, with one line for each tool call and its result in place of markup and tool messages."""
    text = Text()
    for turn in recorded.turns:
        if turn.role == "tool" and any(turn.tool_calls for turn in recorded.turns):
            continue
        content = printable(MARKUP.sub("", turn.text).strip() if turn.tool_calls else turn.text.strip())
        text.append(f"{printable(turn.role):<{INDENT}}", style=ROLE_COLOURS.get(turn.role, ""))
        text.append(textwrap.indent(content, " " * INDENT).removeprefix(" " * INDENT))
        for number, call in enumerate(turn.tool_calls):
            text.append("\n" + " " * INDENT if content or number else "")
            text.append(printable(f"{call.name}({arguments_text(call.arguments)}) -> "), style=ROLE_COLOURS["tool"])
            text.append(printable(call.error or call.result), style="red" if call.error else "")
        text.append("\n")
    if recorded.error:
        text.append(f"error: {printable(recorded.error)}\n", style="red")
    text.rstrip()
    return text
