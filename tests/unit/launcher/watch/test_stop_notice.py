"""What is said when a run is asked to stop: the step that it ends with, how long that takes, and what a kill loses."""

import json
import os
import signal
from pathlib import Path

import pytest

from rl_async.launcher.runs.launch import StopNotice, describe_stop
from rl_async.process.run_files import Beat, Phase, beat

NOW = 1000.0


def told(phase: str, *, step: int = 12, since: float = NOW - 20.0, train_s: float | None = 60.0, saved: int = 0) -> str:
    mine = Beat(rank=0, pid=1, step=step, phase=phase, since=since)
    return describe_stop(mine, train_s, saved, NOW, "Ctrl-C")


def test_a_running_step_is_named_with_the_time_it_takes_and_what_a_kill_loses() -> None:
    text = told("training")
    assert "step 12, about 40 s" in text and "losing 13 steps" in text
    assert "losing 1 step" in told("training", saved=12) and "steps" not in told("training", saved=12)
    assert "about 0 s" in told("training", since=NOW - 100), "it takes longer than the step before"
    assert "about" not in told("training", train_s=None), "no step has ended yet"


@pytest.mark.parametrize(
    ("phase", "last"), [("waiting for a batch", 11), ("meeting the ranks", 12), ("publishing", 12)]
)
def test_completed_steps_are_saved(phase: Phase, last: int) -> None:
    assert f"after step {last}," in told(phase) and "about" not in told(phase)


@pytest.mark.parametrize(
    "text", [told("starting"), told("waiting for a batch", saved=12), describe_stop(None, None, 0, NOW, "")]
)
def test_nothing_to_lose(text: str) -> None:
    assert "losing" not in text


def test_the_run_folder_tells_it_but_not_what_an_earlier_start_left(tmp_path: Path) -> None:
    beat(tmp_path, 0, 7, "training")
    old = tmp_path / "ranks" / "0.json"
    earlier = json.loads(old.read_text()) | {"since": 1.0}
    old.write_text(json.dumps(earlier))
    notice = StopNotice(tmp_path)
    assert "losing" not in notice.text(signal.SIGINT)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 7, "time/train_s": 500.0}) + os.linesep)
    for step in (4, 6):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:06d}" / "state.json").touch()
    beat(tmp_path, 0, 8, "training")
    assert "step 8, about 500 s" in notice.text(signal.SIGTERM) and "losing 3 steps" in notice.text(signal.SIGTERM)
