"""The live view: what it computes, and that both of its forms show it."""

import asyncio
import gzip
import io
import json
import math
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rl_async.configs.load import load_config
from rl_async.errors import QueueLost, UserError
from rl_async.files import last_line
from rl_async.insight import live_figures
from rl_async.insight.live_figures import (
    MARK,
    History,
    RecordedConversation,
    arguments_text,
    bar,
    conversation_of,
    curve,
    held_out,
    next_commands,
    scale_of,
    sparkline,
    step_line,
    summary_lines,
    unplayed_lines,
)
from rl_async.insight.live_view import (
    ASK_S,
    MOST_LINES,
    REFRESH_S,
    SILENT_S,
    STARTS_S,
    Observed,
    Row,
    SeenEngine,
    View,
    counters_text,
    duration,
    first_step_text,
    left_text,
    render_conversation,
    role_rows,
)
from rl_async.insight.tail import MOST_KINDS, OTHERS, LineTail, LogWarnings, last_record
from rl_async.messages import EngineList, Inspection, StatusReport, ToolCall, Turn, Version, WorkerRecord
from rl_async.process.run_files import Beat, Phase, ProcessState, Progress
from rl_async.rollout_server.api import EngineLoad, EngineTokens

STATUS = StatusReport(
    published=Version(),
    waiting=0,
    leased=7,
    ready=5,
    reserved=0,
    committed=0,
    slots_used=12,
    slots=48,
    max_staleness=1,
    admitted=12,
    payload_bytes=0,
    counters={"redelivered": 3, "fenced": 0},
    oldest_lease_s=0.0,
    workers=1,
    finished=False,
)


def record(step: int, reward: float = 0.5, **more: float) -> dict[str, float]:
    times = {"time/step_s": 2.0, "time/wait_batch_s": 1.0, "time/train_s": 0.8, "time/sync_s": 0.2}
    return {
        "step": step,
        "lineage": 0,
        "reward/mean": reward,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        **times,
        **more,
    }


def line(step: int, reward: float = 0.5, **more: float) -> bytes:
    return json.dumps(record(step, reward, **more)).encode()


def append(folder: Path, *records: dict[str, float]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def write_conversation(folder: Path, step: int, answer: str) -> None:
    (folder / "trajectories").mkdir(exist_ok=True)
    call = {"name": "calculator", "arguments": '{"expression": "1+2"}', "result": "3"}
    turns = [
        {"role": "user", "text": "what is 1+2?"},
        {"role": "assistant", "text": "calling", "tool_calls": [call]},
        {"role": "tool", "text": "3"},
        {"role": "assistant", "text": answer},
    ]
    row = {"task_id": "t", "token_ids": [1, 2], "turns": turns, "reward": 1.0, "finish_reason": "stop"}
    path = folder / "trajectories" / f"step-{step:06d}-lineage0-rank0.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(row) + "\n{torn")


def test_escape_sequences_of_a_conversation_are_shown_and_not_obeyed() -> None:
    bad = "\x1b[2J\x1b]0;owned\x07"
    call = ToolCall(name=bad, arguments='{"x": "\\u001b[2J"}', result=bad)
    turns = [Turn(role=bad, text=bad), Turn(role="assistant", text=bad, tool_calls=[call])]
    text = render_conversation(RecordedConversation(turns=turns, reward=1.0, error=bad)).plain
    assert "\x1b" not in text and "\x07" not in text and text.count("\\x1b]0;owned\\x07") == 6


def test_only_complete_lines_are_read(tmp_path: Path) -> None:
    file, tail = tmp_path / "x", LineTail(tmp_path / "x")
    assert tail.read() == []
    file.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"]
    file.write_bytes(b"one\ntwo\n")
    assert tail.read() == [b"two"]


def test_a_long_run_is_remembered_in_a_few_bytes_per_step_and_each_step_costs_the_same() -> None:
    history, steps = History(), 2_000
    tracemalloc.start()
    for step in range(steps):
        history.add(line(step, 0.5, **{"eval/reward": 0.25}, **{f"other/{i}": 0.1 for i in range(20)}))
    ours = tracemalloc.Filter(True, live_figures.__file__)
    used = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)
    tracemalloc.stop()
    assert used < steps * 50
    assert len(history) == len(history.values("reward")) == len(history.values("held_out")) == steps
    assert history.last is not None and history.last["other/3"] == 0.1


def test_the_last_whole_line_is_found_from_the_end(tmp_path: Path) -> None:
    file = tmp_path / "x"
    assert last_line(file) == b""
    for text, found in ((b"", b""), (b"torn", b""), (b"one\n", b"one"), (b"one\ntwo\nthr", b"two")):
        file.write_bytes(text)
        assert last_line(file) == found
    file.write_bytes(b"x" * 100 + b"\n" + b"y" * (1 << 20) + b"\n" + b"last\n")
    assert last_line(file) == b"last"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time/step_s": 4.5, "time/sync_s": 4.4, "tokens/per_s": 110.0}, "publishing weights"),
        ({"time/step_s": 4.5, "time/wait_batch_s": 4.3, "tokens/per_s": 110.0}, "waiting for a batch"),
        # The answers are longer.
        ({"time/step_s": 4.5, "time/train_s": 4.3, "tokens/per_s": 900.0}, ""),
        # A step of so little is not slow.
        ({"time/step_s": 1.4, "time/sync_s": 1.3, "tokens/per_s": 110.0}, ""),
    ],
)
def test_a_run_that_is_slower_than_its_own_earlier_steps_is_told_with_the_phase(
    changes: dict[str, float], words: str
) -> None:
    usual = {"time/step_s": 0.5, "time/wait_batch_s": 0.2, "time/train_s": 0.2, "time/sync_s": 0.1}
    history, steps = History(), 1000
    for step in range(steps):
        history.add(line(step, 0.5, **usual, **{"tokens/per_s": 1000.0}))
    assert history.speeds.slowdown == ""
    for step in range(steps, steps + 10):
        history.add(line(step, 0.5, **(usual | changes)))
    assert words in history.speeds.slowdown and bool(words) == bool(history.speeds.slowdown)
    assert bool(history.speeds.slower_phase) == bool(words)


def test_a_step_trained_again_after_a_resume_replaces_what_was_abandoned() -> None:
    history = History()
    for step, reward in [(0, 0.1), (1, 0.2), (2, 0.9), (1, 0.3)]:
        history.add(line(step, reward))
    assert history.values("reward") == [0.1, 0.3]
    assert history.last is not None and history.last["step"] == 1


def test_a_metric_that_is_not_a_number_is_remembered_as_such() -> None:
    history = History()
    history.add(msgspec.json.encode(record(0, math.nan)))

    assert history.last is not None and math.isnan(history.last["reward/mean"])


def test_sparklines_show_the_shape_in_any_width() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([i / 99 for i in range(100)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([-5.0, 7.0], 2) == "▁█"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""


def test_a_curve_fills_its_lines_from_below_and_marks_held_out_values() -> None:
    assert curve([0.0, 0.5, 1.0], {3: 1.0}, 40, 4) == [
        f"1.00▕  {MARK}",
        "    ▕  █",
        "0.33▕ ██",
        "0.00▕▁██",
        "     0 2",
    ]
    # As many steps as fit share a column.
    lines = curve([i / 99 for i in range(100)], {}, 26, 3)
    assert {len(line) for line in lines[:1]} == {26} and lines[-1].split() == ["0", "99"]


def test_a_curve_of_rewards_outside_0_and_1_shows_its_range() -> None:
    assert scale_of([0.2, 0.7]) == scale_of([]) == (0.0, 1.0)
    assert scale_of([-2.0, 7.0]) == (-2.0, 7.0) and scale_of([5.0, 5.0]) == (5.0, 6.0)
    lines = curve([-2.0, 7.0], {}, 40, 3)
    assert lines[0].split("▕")[0].strip() == "7.00" and lines[2].split("▕")[0].strip() == "-2.00"


def test_a_resume_replaces_the_evaluations_of_versions_that_it_trains_again(tmp_path: Path) -> None:
    assert held_out(tmp_path) == {}
    rows = [{"lineage": 0, "eval/step": step, "eval/reward": step / 10} for step in (0, 2, 4)]
    rows.append({"lineage": 1, "eval/step": 2, "eval/reward": 0.9})
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert held_out(tmp_path) == {0: 0.0, 2: 0.9}


def test_bars_have_the_width_asked_for() -> None:
    assert bar([1, 1, 2], 8) == "░░██▒▒▒▒"
    assert len(bar([0.1, 0.2, 0.7], 13)) == 13
    assert bar([0, 0, 0], 8) == ""


def test_the_conversation_of_a_step_is_read_once_it_is_recorded_and_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert conversation_of(tmp_path, record(12), ranks=2) is None
    write_conversation(tmp_path, 12, "new")
    write_conversation(tmp_path, 13, "another step's")
    monkeypatch.setattr(os, "scandir", lambda _: pytest.fail("a folder with a file for every step is not listed"))
    found = conversation_of(tmp_path, record(12), ranks=2)
    assert found is not None and found.turns[-1].text == "new"
    assert conversation_of(tmp_path, record(12, lineage=1), ranks=2) is None


def test_the_summary_tells_first_and_last_rewards_and_staleness(tmp_path: Path) -> None:
    history = History()
    for step in range(10):
        history.add(line(step, 0.2 if step < 5 else 0.9))
    (tmp_path / "evaluations.jsonl").write_text(
        '{"lineage":0,"eval/step":4.0,"eval/reward":0.4}\n{"lineage":0,"eval/step":10.0,"eval/reward":0.95}\n'
    )
    text = "\n".join(summary_lines(history, tmp_path, 61.0, bound=1))
    for part in ("0.200", "0.900", "0.950 at version 10", "at most 1 (bound 1)", "61 s", str(tmp_path)):
        assert part in text
    assert "0.4" not in text  # which is no reward before training
    (tmp_path / "evaluations.jsonl").write_text(
        '{"lineage":0,"eval/step":0.0,"eval/reward":0.25}\n{"lineage":0,"eval/step":10.0,"eval/reward":0.95}\n'
    )
    assert "0.250 before, 0.950 at version 10" in "\n".join(summary_lines(history, tmp_path, 61.0, bound=1))
    assert "no step" in summary_lines(History(), tmp_path, 1.0, 1)[0]


def test_short_runs_are_not_compared_with_themselves(tmp_path: Path) -> None:
    history = History()
    for step, reward in enumerate((0.2, 0.5, 0.8)):
        history.add(line(step, reward))
    assert "0.200 (mean of the first step) -> 0.800" in summary_lines(history, tmp_path, 1.0, bound=1)[0]


def test_a_step_in_which_no_tool_worked_says_so() -> None:
    calls = {"rollout/tool_calls_mean": 0.75, "rollout/tool_errors_mean": 0.75}
    assert "every tool call failed" in step_line(record(0, 0.1, **calls), 4)
    assert "failed" not in step_line(record(0, 0.1, **calls | {"rollout/tool_errors_mean": 0.5}), 4)
    assert "failed" not in step_line(record(0, 0.1), 4)


FAILING = msgspec.structs.replace(STATUS, counters={"dead_letters": 16}, last_failure="RuntimeError: loop \x1bbroke")


def test_unscored_episodes_and_groups_given_up_are_told_by_each_step_and_at_the_end(tmp_path: Path) -> None:
    failures = {"reward/unscored_fraction": 0.664, "queue/dead_letters": 16.0}
    assert "66.4% of episodes not scored  16 groups given up" in step_line(record(0, 1.0, **failures), 4)
    good = step_line(record(0, 1.0, **dict.fromkeys(failures, 0.0)), 4)
    assert "scored" not in good and "given up" not in good
    history = History()
    for step, more in enumerate((failures, {"reward/unscored_fraction": 0.0, "queue/dead_letters": 16.0})):
        history.add(line(step, 1.0, **more))
    told = "\n".join(summary_lines(history, tmp_path, 1.0, bound=1))
    assert "33.2% of episodes" in told and "16 groups" in told and "worker-" in told
    told = "\n".join(summary_lines(history, tmp_path, 1.0, 1, FAILING))
    assert "16 groups" in told and "loop \\x1bbroke" in told
    assert "16 groups" in "\n".join(summary_lines(History(), tmp_path, 1.0, 1, FAILING)), "no step was trained"
    history.add(line(2, 1.0))
    assert "given up" not in "\n".join(summary_lines(History(), tmp_path, 1.0, 1, STATUS))


class Output(io.StringIO):
    """A terminal's output; ``shown`` is set once a text was written to it."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted, self.shown = wanted, asyncio.Event()

    def write(self, text: str) -> int:
        if self._wanted in text:
            self.shown.set()
        return super().write(text)


class FakeQueue:
    """A queue with one report, or one that was lost; it has no engines."""

    def __init__(self, report: StatusReport, lost: bool = False) -> None:
        self._report, self._lost = report, lost

    async def inspect(self) -> Inspection:
        if self._lost:
            raise QueueLost("no answer")
        return inspection(self._report)

    async def engines(self) -> EngineList:
        if self._lost:
            raise QueueLost("no answer")
        return EngineList(revision=0, engines=[], published=Version())


def inspection(report: StatusReport, workers: Sequence[WorkerRecord] = ()) -> Inspection:
    return Inspection(
        status=report,
        group_size=16,
        draining=False,
        submitted=0,
        oldest_lease=None,
        ages_s={},
        rates={},
        dead_letters=[],
        workers=list(workers),
    )


async def show(
    folder: Path,
    *,
    terminal: bool,
    lost: bool = False,
    trainer: str = "running",
    away_s: float = 0.0,
    report: StatusReport = STATUS,
    warnings: Sequence[str] = (),
    size: tuple[int, int] = (140, 30),
    **more: float,
) -> str:
    """Return what the view prints while one step is trained."""
    output = Output("(2 of 40 done)")
    console = Console(file=output, force_terminal=terminal, width=size[0], height=size[1])
    queue = FakeQueue(msgspec.structs.replace(report, unattended_s=away_s), lost)
    states = [
        ProcessState("queue", "running"),
        ProcessState("engine-0", "running", 1),
        ProcessState("trainer-0", trainer),
    ]
    append(folder, record(0, 0.111))
    config = load_config("calculator", ["trainer.steps=40", *(["agent.gateway={}"] if away_s else [])], name="mine")
    (folder / "logs").mkdir(exist_ok=True)
    # Warnings of an earlier start are not shown again.
    (folder / "logs" / "worker-1.log").write_text("10:00:00 agent-1 WARNING earlier\n")
    view = View(config, folder, lambda: states, lambda: queue, console)
    (folder / "logs" / "worker-0.log").write_text("".join(f"{line}\n" for line in warnings))
    running = asyncio.create_task(view.run())
    append(folder, record(1, 0.777, **{"eval/reward": 0.66, "queue/ready_groups": 4.0, "tokens/per_s": 1234.0}, **more))
    write_conversation(folder, 1, "42")
    async with asyncio.timeout(60.0):
        # One update shows everything. The tasks beside it have begun when this one goes on.
        await output.shown.wait()
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return output.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
async def test_a_run_in_which_nothing_is_scored_says_so_before_its_first_step(tmp_path: Path, terminal: bool) -> None:
    none = msgspec.structs.replace(STATUS, unscored=12345)
    assert "12345" in await show(tmp_path, terminal=terminal, report=none)
    assert "12345" not in await show(tmp_path, terminal=terminal, report=msgspec.structs.replace(none, scored=1))
    assert ASK_S + REFRESH_S < 60.0


@pytest.mark.parametrize("terminal", [False, True])
async def test_a_queue_whose_disk_is_slow_is_told(tmp_path: Path, terminal: bool) -> None:
    slow = msgspec.structs.replace(STATUS, flush_s=12345.0)
    assert "12345" in await show(tmp_path, terminal=terminal, report=slow)
    assert "disk" not in await show(tmp_path, terminal=terminal, report=msgspec.structs.replace(slow, flush_s=0.5))


async def test_without_a_terminal_each_new_step_is_one_line(tmp_path: Path) -> None:
    lines = (await show(tmp_path, terminal=False)).splitlines()
    assert lines[0] == "engine-0 was restarted (1)"
    assert len(lines) == 2, "the step before the view began is not news"
    for part in (
        "step 1 (2 of 40 done)",
        "reward 0.777",
        "wait 1.00",
        "train 0.80",
        "sync 0.20",
        "ready 4",
        "1234",
        "eval 0.660",
    ):
        assert part in lines[1]


async def test_on_a_terminal_everything_is_shown(tmp_path: Path) -> None:
    text = await show(tmp_path, terminal=True)
    for part in (
        "mine",
        "1 (2 of 40 done)",
        "a conversation of step 1,",
        "0.777",
        "waiting 1.00",
        "training 0.80",
        "syncing 0.20",
        "bound 1",
        "5 groups ready",
    ):
        assert part in text
    for part in (
        "3 failed samples played again",
        "engine-0",
        "1,234",
        "what is 1+2?",
        "calculator(expression=1+2)",
        "42",
    ):
        assert part in text
    assert "fenced" not in text


@pytest.mark.parametrize("terminal", [True, False])
async def test_an_absence_of_all_agent_programs_is_shown(tmp_path: Path, terminal: bool) -> None:
    text = await show(tmp_path, terminal=terminal, away_s=280.0)
    assert text.count("no program has asked for an episode for 280 s") >= 1
    assert terminal or text.count("280 s") == 1, "a line is not repeated at once"


@pytest.mark.parametrize("terminal", [True, False])
async def test_failing_episodes_and_scorers_are_shown_while_they_fail(tmp_path: Path, terminal: bool) -> None:
    failing = {"reward/unscored_fraction": 0.25}
    text = await show(tmp_path, terminal=terminal, report=FAILING, **failing)
    for part in ("16 groups were given up", "loop \\x1bbroke", "25.0% of episodes could not be scored"):
        assert text.count(part) >= 1
        assert terminal or text.count(part) == 1


def test_the_summary_says_that_nobody_played_the_held_out_tasks(tmp_path: Path) -> None:
    config = load_config("calculator", ["trainer.steps=2", "agent.gateway={}"])
    history = History()
    history.add(line(0, version=1))
    assert unplayed_lines(config, history, tmp_path) == [], "the run did not get that far"
    history.add(line(1, version=2))
    assert "held-out" in unplayed_lines(config, history, tmp_path)[0]
    (tmp_path / "evaluations.jsonl").write_text('{"lineage":0,"eval/step":2.0,"eval/reward":0.4}\n')
    assert unplayed_lines(config, history, tmp_path) == []
    assert unplayed_lines(load_config("calculator", ["trainer.steps=2"]), history, tmp_path / "none") == []


@pytest.mark.parametrize("terminal", [True, False])
async def test_repeated_warnings_of_processes_reach_the_terminal_with_their_number(
    tmp_path: Path, terminal: bool
) -> None:
    lost = [f"10:00:{i:02d} agent-0 WARNING request {i}.0: engine-0 was lost after {i} tokens" for i in range(12)]
    text = await show(tmp_path, terminal=terminal, warnings=[*lost, "10:01:00 agent-0 INFO fine"])
    assert "engine-0 was lost" in text and "12 times" in text
    assert "fine" not in text and "earlier" not in text


@pytest.mark.parametrize(("size", "drawn"), [((140, 40), True), ((140, 30), False), ((80, 40), False)])
async def test_a_large_terminal_gets_a_curve_with_its_scale_and_held_out_values(
    tmp_path: Path, size: tuple[int, int], drawn: bool
) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"lineage":0,"eval/step":1.0,"eval/reward":0.4}\n')
    text = await show(tmp_path, terminal=True, size=size)
    assert (MARK in text) is drawn and ("1.00▕" in text) is drawn
    assert "0.400 at version 1" in text


@pytest.mark.parametrize("trained", [True, False])
def test_the_last_lines_name_three_commands_with_the_folder_of_the_run(trained: bool) -> None:
    head, *commands = next_commands(Path("my runs/mine"), trained=trained)
    assert head == "next:" and len(commands) == 3
    assert sum("'my runs/mine" in command for command in commands) == 3 - (not trained)


async def test_a_queue_that_has_ended_with_the_run_lacks_nothing(tmp_path: Path) -> None:
    text = await show(tmp_path, terminal=True, lost=True, trainer="ended")
    assert "closed, as training has ended" in text and "has not answered" not in text


async def test_a_queue_that_the_launcher_lets_go_of_is_not_silent(tmp_path: Path) -> None:
    reports = [inspection(STATUS)]

    class Once(FakeQueue):
        async def inspect(self) -> Inspection:
            return reports.pop()

    def queue() -> Once:
        if not reports:
            raise QueueLost("the queue is not running")
        return Once(STATUS)

    output = Output("the run is stopping")
    console = Console(file=output, force_terminal=True, width=140, height=30)
    states = [ProcessState("queue", "running"), ProcessState("trainer-0", "running")]
    running = asyncio.create_task(View(load_config("calculator"), tmp_path, lambda: states, queue, console).run())
    async with asyncio.timeout(60.0):
        await output.shown.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"a": 1, "b": "x"}', "a=1, b=x"),
        ('{"arguments": {"x": 1}, "name": "y"}', "arguments={'x': 1}, name=y"),
        ("{not json", "{not json"),
        ("[1]", "[1]"),
    ],
)
def test_arguments_are_written_as_people_do(written: str, shown: str) -> None:
    assert arguments_text(written) == shown


def test_a_conversation_shows_each_call_once() -> None:
    call = ToolCall(name="calculator", arguments='{"expression": "1+2"}', result="3")
    turns = [
        Turn(role="user", text="what is 1+2?"),
        Turn(role="assistant", text="let me see\n<tool_call>\n{...}\n</tool_call>", tool_calls=[call]),
        Turn(role="tool", text="3"),
        Turn(role="assistant", text="first line\nsecond line"),
    ]
    assert render_conversation(RecordedConversation(turns=turns, reward=1.0)).plain.splitlines() == [
        "user      what is 1+2?",
        "assistant let me see",
        "          calculator(expression=1+2) -> 3",
        "assistant first line",
        "          second line",
    ]


NOW = 1000.0


def states(*names: str, state: str = "running") -> list[ProcessState]:
    return [ProcessState(name, state, since=NOW - 12.0) for name in names]


def observed(*states: ProcessState, **more: Any) -> Observed:
    settings = {"beats": {}, "progress": {}, "engines": {}, "report": None, "queue_silent_since": None, "groups": 24}
    settings["queue_closing"] = False
    return Observed(now=NOW, states=states, **(settings | more))


def row(*states: ProcessState, **more: Any) -> Row:
    """Return the row of the first process."""
    return next(row for row in role_rows(observed(*states, **more)) if row.name == states[0].name)


def beat(phase: Phase, ago: float = 138.0, step: int = 0) -> dict[str, Beat]:
    return {"trainer-0": Beat(rank=0, pid=1, step=step, phase=phase, since=NOW - ago)}


def load(requests: int, sampled: int) -> EngineLoad:
    tokens = EngineTokens(prompt=0, sampled=sampled, looked_up=0, found=0)
    return EngineLoad(running=requests, waiting=0, cache_usage=0.0, tokens=tokens)


def test_a_first_step_that_is_trained_for_minutes_is_not_said_to_be_sampled() -> None:
    (training,) = beat("training").values()
    assert "trained" in first_step_text(training, 10) and "sampled" not in first_step_text(training, 10)
    (waiting,) = beat("waiting for a batch").values()
    assert "sampled" in first_step_text(waiting, 10)
    assert "starting" in first_step_text(None, 10)


def test_a_long_phase_has_its_age_its_progress_and_the_time_left() -> None:
    done = Progress(work="training", done=30, total=90, unit="micro-batches", since=NOW - 60, at=NOW)
    text = row(*states("trainer-0"), beats=beat("training"), progress={"trainer-0": done}).text
    for part in ("step 0", "2 min 18 s", "30 of 90 micro-batches", "about 2 min 00 s left"):
        assert part in text
    # That progress is of the step before.
    stale = row(*states("trainer-0"), beats=beat("training", ago=5.0), progress={"trainer-0": done}).text
    assert "micro-batches" not in stale and "5 s" in stale
    elsewhere = row(*states("trainer-0"), beats=beat("publishing"), progress={"trainer-0": done}).text
    assert "publishing" in elsewhere and "micro-batches" not in elsewhere
    assert row(*states("trainer-0")).text == "starting for 12 s"


def test_an_engine_that_is_silent_says_for_how_long() -> None:
    seen = SeenEngine("engine-0").heard(load(8, 100), NOW - 4).heard(load(8, 500), NOW - 2)
    text = row(*states("engine-0"), engines={"engine-0": seen})
    assert not text.trouble and "8 requests" in text.text and "500 tokens" in text.text and "200 per" in text.text
    silent = seen.silent(NOW - 12).silent(NOW - 6)
    text = row(*states("engine-0"), engines={"engine-0": silent})
    assert text.trouble and "12 s" in text.text
    assert not row(*states("engine-0"), engines={"engine-0": seen.silent(NOW - SILENT_S / 2)}).trouble
    again = silent.heard(load(0, 3), NOW)
    assert again.silent_since is None and again.per_s == 0, "it counts from 0 after a restart"


def test_the_engine_of_the_newest_restart_is_shown() -> None:
    engines = {
        name: SeenEngine(name).heard(load(1, tokens), NOW) for name, tokens in (("engine-1.2", 7), ("engine-1", 9))
    }
    assert "7 tokens" in row(ProcessState("engine-1", "running", 2), engines=engines).text
    assert "(restarted 2x)" in row(ProcessState("engine-1", "running", 2), engines=engines).text


def test_a_process_that_is_not_running_has_its_state_and_its_age() -> None:
    assert row(*states("engine-0", state="starting")) == Row("engine-0", "starting for 12 s")
    assert row(*states("engine-0", state="restarting")).trouble and row(*states("engine-0", state="failed")).trouble
    assert row(*states("engine-0", state="ended")) == Row("engine-0", "ended")


def test_a_worker_says_what_it_plays_or_that_it_is_unknown_to_the_queue() -> None:
    playing = WorkerRecord(worker="agent-1-77-abc", samples=384, groups=24, oldest_s=41.0)
    report = inspection(STATUS, [playing, WorkerRecord(worker="agent-11-78-abc", samples=1, groups=1, oldest_s=1.0)])
    text = row(*states("worker-1"), report=report).text
    assert "384 episodes" in text and "41 s" in text
    young, old = (ProcessState("worker-2", "running", since=NOW - age) for age in (1.0, STARTS_S + 1))
    assert not row(young, report=report).trouble and row(old, report=report).trouble


def test_a_queue_that_does_not_answer_says_for_how_long_unless_training_has_ended() -> None:
    text = row(*states("queue"), queue_silent_since=NOW - 20, report=inspection(STATUS))
    assert text.trouble and "20 s" in text.text
    text = row(*states("queue"), *states("trainer-0", state="ended"), queue_silent_since=NOW - 20)
    assert not text.trouble and "closed" in text.text
    stopping = row(*states("queue", "trainer-0"), report=inspection(STATUS), queue_closing=True)
    assert not stopping.trouble and "stopping" in stopping.text
    assert row(*states("queue"), queue_silent_since=NOW - 20) == Row("queue", "starting for 12 s")
    full = msgspec.structs.replace(STATUS, leased=0, slots_used=48)
    assert "workers wait for the trainer" in row(*states("queue"), report=inspection(full)).text


def test_of_many_processes_those_in_trouble_are_shown() -> None:
    many = [*states(*(f"engine-{i}" for i in range(20))), ProcessState("engine-20", "failed")]
    rows = role_rows(observed(*many))
    assert len(rows) == MOST_LINES + 1 and rows[0].name == "engine-20" and "17 more" in rows[-1].text


def test_counters_are_told_in_words() -> None:
    text = counters_text({"redelivered": 3, "leases_lost": 12, "fenced": 0, "dead_letters": 2, "failed/ToolError": 4})
    assert "3 failed samples" in text and "12 samples taken back" in text and "4 attempts ended by ToolError" in text
    for word in ("redelivered", "leases_lost", "dead", "refused"):
        assert word not in text
    assert counters_text({"fenced": 0}) == ""


def test_durations_have_two_units_and_the_rest_is_estimated_from_the_newest_steps() -> None:
    assert [duration(s) for s in (0.4, 99, 100, 5999, 7260)] == [
        "0 s",
        "99 s",
        "1 min 40 s",
        "99 min 59 s",
        "2 h 01 min",
    ]
    assert left_text([10.0, 12.0, 90.0], 50) == "about 10 min 00 s left"
    assert left_text([], 5) == left_text([1.0], 0) == ""


# Lines that are read while they are written, and warnings of logs, one entry for each kind.


def test_a_number_that_was_none_in_training_is_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":0,"loss":null}\n{"step":1,"lo')
    tail = LineTail(path)
    (record,) = tail.records()
    assert record["step"] == 0 and math.isnan(record["loss"])
    with path.open("a") as file:
        file.write('ss":2.5}\n')
    assert tail.records() == [{"step": 1.0, "loss": 2.5}]
    assert last_record(path) == {"step": 1.0, "loss": 2.5}
    path.write_bytes(b'{"step": \xff}\n')
    for read in (lambda: last_record(path), LineTail(path).records):
        with pytest.raises(UserError, match=r"metrics\.jsonl"):
            read()


def write(run: Path, name: str, *lines: str) -> None:
    (run / "logs").mkdir(exist_ok=True)
    with (run / "logs" / f"{name}.log").open("a") as log:
        log.writelines(line + "\n" for line in lines)


def counts(warnings: LogWarnings) -> dict[str, int]:
    return {warning.text: warning.count for warning in warnings.newest_first}


def test_lines_that_differ_in_numbers_alone_are_of_one_kind_in_all_processes(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    write(tmp_path, "worker-0", "10:00:00 agent-0 WARNING request 45.13.0.3: engine-0 was lost after 0 tokens")
    write(tmp_path, "worker-1", "10:00:01 agent-1 WARNING request 7.1.0.3: engine-1 was lost after 12 tokens")
    write(tmp_path, "launcher", "10:00:02 WARNING engine-0 ended", "10:00:02 INFO engine-0 started")
    write(tmp_path, "trainer-0", "10:00:03 trainer-0 ERROR engine-0 ended", "no line of a log")
    assert {found.count for found in warnings.read()} == {2, 1}
    (lost,) = [found for found in warnings.newest_first if "lost" in found.text]
    assert lost.processes == "worker-0, worker-1" and "2 times" in lost.line
    assert len(warnings.newest_first) == 3, "an error is no warning"
    assert warnings.read() == [], "nothing is new"


def test_a_process_that_thins_out_its_lines_says_how_many_there_were(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    write(tmp_path, "worker-0", *(f"10:00:00 agent-0 WARNING it failed ({times} times)" for times in (2, 64)))
    warnings.read()
    assert counts(warnings) == {"it failed (64 times)": 64}


def test_what_was_logged_before_is_not_read_and_new_logs_are_read_from_their_beginning(tmp_path: Path) -> None:
    write(tmp_path, "engine-0", "10:00:00 engine-0 WARNING before")
    warnings = LogWarnings(tmp_path)
    write(tmp_path, "engine-0", "10:00:01 engine-0 WARNING after \x1b[2J")
    write(tmp_path, "engine-1", "10:00:01 engine-1 WARNING new")
    # It repeats what is shown.
    write(tmp_path, "output", "10:00:01 engine-1 WARNING shown")
    warnings.read()
    assert counts(warnings) == {"after \\x1b[2J": 1, "new": 1}


def test_the_number_of_kinds_is_bounded(tmp_path: Path) -> None:
    warnings = LogWarnings(tmp_path)
    words = ["".join("abcdefghij"[int(digit)] for digit in str(i)) for i in range(MOST_KINDS + 5)]
    write(tmp_path, "engine-0", *(f"10:00:00 engine-0 WARNING {word}" for word in words))
    warnings.read()
    found = warnings.newest_first
    assert len(found) == MOST_KINDS + 1
    assert [one.count for one in found if one.text.startswith(OTHERS)] == [5]
