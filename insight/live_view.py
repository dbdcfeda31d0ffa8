"""The live view of a run: a panel that refreshes on a terminal, one line per trainer step otherwise."""

import asyncio
import math
import re
import textwrap
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import QueueLost, UserError
from rl_async.files import undamaged
from rl_async.insight.live_figures import (
    UNSCORED,
    History,
    RecordedConversation,
    arguments_text,
    away_text,
    bar,
    conversation_of,
    given_up_text,
    mean,
    no_tool_works,
    nothing_scored_text,
    position,
    sparkline,
    step_line,
    summary_lines,
    time_split,
    unplayed_lines,
    unscored_text,
)
from rl_async.insight.roster import ProcessState
from rl_async.insight.tail import LineTail, Record, record_of
from rl_async.insight.terminal import printable
from rl_async.messages import StatusReport

REFRESH_S = 0.5
# Without a panel, the queue is queried less often.
ASK_S = 5.0
# After this long without a request from agent programs, a line reports their absence.
AWAY_S = 15.0
# The same line is repeated at most this often.
REMIND_S = 600.0
STATE_COLOURS = {"running": "green", "starting": "yellow", "restarting": "yellow", "ended": "dim"}
# The indentation of a turn's text.
INDENT = 10
MARKUP = re.compile(r"<tool_call>.*?(</tool_call>|$)", re.DOTALL)
ROLE_COLOURS = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


class View:
    """Shows a run until cancelled, and summarizes it.

    ``states`` lists the processes; ``status`` queries the queue. Both are called only on the view's event loop.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        states: Callable[[], Collection[ProcessState]],
        status: Callable[[], Awaitable[StatusReport]],
        console: Console | None = None,
    ) -> None:
        self._config, self._folder, self._states, self._status = config, folder, states, status
        self._console = console or Console()
        self._tail = LineTail(folder / "metrics.jsonl")
        self._history = History()
        # The queue's last answer.
        self._report: StatusReport | None = None
        # The time when a line of each kind was last printed.
        self._said: dict[str, float] = {}
        self._began = time.monotonic()
        # Records of an earlier start are not shown again.
        with undamaged(folder / "metrics.jsonl"):
            for line in self._tail.each():
                self._history.add(line)

    async def run(self) -> None:
        """Consumes metrics.jsonl, recorded trajectories, process states and the queue's status.

        Produces the display. Waits REFRESH_S between updates, and for the queue's answer up to its
        client's deadline. Runs until cancelled.
        """
        if self._console.is_terminal:
            await self._run_live()
        else:
            await self._run_lines()

    def summary(self) -> str:
        """Summarize the run in a few lines, up to the last record of the trainer."""
        self._read()
        seconds = time.monotonic() - self._began
        bound = self._config.queue.max_staleness
        lines = summary_lines(self._history, self._folder, seconds, bound, self._report)
        return "\n".join([*lines, *unplayed_lines(self._config, self._history, self._folder)])

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
            async with asyncio.TaskGroup() as group:
                # In a separate task, since the queue may take long to answer.
                group.create_task(self._print_troubles())
                while True:
                    self._print_news(known)
                    await asyncio.sleep(REFRESH_S)
        finally:
            # The last step may have been recorded at the end of the run.
            self._print_news(known)

    async def _print_troubles(self) -> None:
        """Consumes the queue's status; produces lines on groups that were given up, on absent agent programs, and on
        scorers that have scored nothing.

        Waits ASK_S between questions, and for the answers. Runs until cancelled.
        """
        reported = 0
        while True:
            report = await self._queue_report()
            if report is not None and report.unattended_s > AWAY_S:
                self._remind("away", f"{away_text(report)}: start an agent program (docs/how-to/gateway.md)")
            if report is not None and (text := nothing_scored_text(report)):
                self._remind("nothing scored", text)
            if report is not None and (count := report.counters.get("dead_letters", 0)) > 2 * reported:
                reported = count
                self._print(given_up_text(report, None))
            await asyncio.sleep(ASK_S)

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
            self._print(step_line(record, self._config.trainer.steps))
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
                conversation = await asyncio.to_thread(self._newest_conversation, conversation)
                report = await self._queue_report()
                live.update(self._render(report, conversation), refresh=True)
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

    async def _queue_report(self) -> StatusReport | None:
        """Query the queue. The supervisor handles a lost queue, so here it only gives None, shown as "no answer"."""
        try:
            self._report = await self._status()
        except QueueLost:
            return None
        return self._report

    def _render(
        self, report: StatusReport | None, conversation: tuple[int, RecordedConversation] | None
    ) -> RenderableType:
        seconds = int(time.monotonic() - self._began)
        title = f"{self._config.name}  {self._config.mode}  {seconds // 60}:{seconds % 60:02d}"
        panels: list[RenderableType] = [Panel(self._numbers(report), title=title, title_align="left")]
        if conversation is not None:
            step, recorded = conversation
            head = f"a conversation of step {step}, reward {recorded.reward:g}"
            panels.append(Panel(render_conversation(recorded), title=head, title_align="left"))
        return Group(*panels)

    def _numbers(self, report: StatusReport | None) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        record = self._history.last
        if record is None:
            table.add_row("step", f"none of {self._config.trainer.steps} done, the first batch is being sampled")
        else:
            self._add_step(table, record)
        if failed := given_up_text(self._report, record):
            table.add_row("failed", failed)
        if self._report is not None and (text := nothing_scored_text(self._report)):
            table.add_row("not scored", text)
        states = self._states()
        table.add_row("queue", _queue_text(report, states))
        table.add_row("processes", _processes_text(states))
        return table

    def _add_step(self, table: Table, record: Record) -> None:
        rewards = self._history.values("reward")
        split = time_split(record)
        width = max(10, min(60, self._console.width - 40))
        table.add_row("step", position(record, self._config.trainer.steps))
        table.add_row("reward", f"{sparkline(rewards, width)}  {rewards[-1]:.3f}, last five {mean(rewards[-5:]):.3f}")
        if evaluations := self._history.values("held_out"):
            table.add_row("held out", f"{evaluations[-1]:.3f}")
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


def _queue_text(report: StatusReport | None, states: Iterable[ProcessState]) -> str:
    if report is None:
        trained = any(state.name.startswith("trainer") and state.state == "ended" for state in states)
        return "closed, as training has ended" if trained else "no answer"
    text = f"{report.ready} groups ready, {report.leased} leased, {report.slots_used} of {report.slots} slots used"
    troubles = {name: count for name, count in report.counters.items() if count}
    text += f", {away_text(report)}" if report.unattended_s else ""
    return text + "".join(f", {name} {count}" for name, count in troubles.items())


def _processes_text(states: Iterable[ProcessState]) -> Text:
    text = Text()
    for state in states:
        text.append(state.name, style=STATE_COLOURS.get(state.state, "red"))
        text.append(f" {state.state}")
        text.append(f" (restarted {state.restarts}x)  " if state.restarts else "  ")
    return text


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
