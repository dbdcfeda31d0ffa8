"""What the live view says of each process."""

from typing import Any

import msgspec

from rl_async.insight.live_roles import (
    MOST_LINES,
    SILENT_S,
    STARTS_S,
    Observed,
    Row,
    SeenEngine,
    counters_text,
    duration,
    first_step_text,
    left_text,
    role_rows,
)
from rl_async.insight.roster import ProcessState
from rl_async.messages import WorkerRecord
from rl_async.process.run_files import Beat, Phase, Progress
from rl_async.rollout_server.api import EngineLoad, EngineTokens
from tests.unit.insight.test_live_view import STATUS, inspection

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
