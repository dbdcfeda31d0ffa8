"""The live view of a run: a panel that refreshes on a terminal, one line per trainer step otherwise."""

import asyncio
import contextlib
import math
import re
import textwrap
import time
from collections.abc import Callable, Collection
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
from rl_async.insight.live_roles import (
    EngineWatch,
    Observed,
    counters_text,
    duration,
    first_step_text,
    left_text,
    numbered,
    progress_text,
    role_rows,
)
from rl_async.insight.roster import ProcessState
from rl_async.insight.tail import LineTail, LogWarnings, Record, record_of
from rl_async.insight.terminal import printable
from rl_async.messages import EngineList, Inspection, StatusReport
from rl_async.process.http_auth import run_token
from rl_async.process.run_files import Progress, read_beats, read_progress

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
                text = progress_line(progress, time.time())
                if console.is_terminal:
                    live.update(Text(text), refresh=True)
                elif time.monotonic() - told > LINE_S:
                    told = time.monotonic()
                    console.print(text, markup=False, highlight=False, soft_wrap=True)
            await asyncio.sleep(REFRESH_S)


def progress_line(progress: Progress, now: float) -> str:
    """Draw a piece of work as a bar, with its parts, its age and an estimate of the time left."""
    drawn = bar([progress.done, max(0, progress.total - progress.done)], 24, "█░")
    about = f"; {progress.about}" if progress.about else ""
    age = duration(now - progress.since)
    return f"{progress.work}, {age}  {drawn}  {progress_text(progress, now)}{about}"


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
