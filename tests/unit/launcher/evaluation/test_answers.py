"""Held-out answers of two evaluations stand beside each other, matched by task."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rl_async.configs.load import dump, load_config
from rl_async.errors import UserError
from rl_async.launcher.recorded_evaluations import show_evaluations
from rl_async.messages import Trajectory, Turn
from rl_async.recording import write_trajectories
from tests.conftest import make_rows


def row(task: str, question: str, answer: str, reward: float) -> Trajectory:
    turns = [Turn(role="user", text=question), Turn(role="assistant", text=answer)]
    return msgspec.structs.replace(make_rows(0)[0], task_id=task, sample=0, segment=0, reward=reward, turns=turns)


def test_the_first_and_the_last_evaluation_stand_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    first = [row("t:0", "What is 1 + 1?", "It is [bold]3[/bold]\x1b[2J", 0.0), row("t:1", "What is 2 + 2?", "4", 1.0)]
    last = [
        row("t:1", "What is 2 + 2?", "four", 0.0),
        row("t:0", "What is 1 + 1?", "2", 1.0),
        row("t:9", "?", "9", 1.0),
    ]
    for step, rows in ((0, first), (5, first), (10, last)):
        write_trajectories(folder / f"eval-{step:06d}.jsonl.gz", rows)
    console = Console(width=200, record=True, file=io.StringIO())
    show_evaluations(tmp_path, console)
    text = console.export_text()
    improved, worse = (next(line for line in text.splitlines() if question in line) for question in ("1 + 1", "2 + 2"))
    assert "[bold]3[/bold]" in improved and "2" in improved and "\x1b" not in text
    assert text.index(improved) < text.index(worse)
    assert "version 0" in text and "version 10" in text and "mean reward of 2" in text and text.count("0.500") == 2


def test_each_source_has_a_line_before_and_after_with_the_rewards_that_pass_in_this_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(load_config("calculator", ["eval.solved=0.5"])))
    rows = [row("t:0", "?", "a", 0.5), row("t:1", "?", "b", 0.0)]
    sources = [msgspec.structs.replace(one, data_source=one.task_id, group_id=at) for at, one in enumerate(rows)]
    for step in (0, 5):
        write_trajectories(tmp_path / "trajectories" / f"eval-{step:06d}.jsonl.gz", sources)
    console = Console(width=200, record=True, file=io.StringIO())
    show_evaluations(tmp_path, console)
    lines = [words for words in map(str.split, console.export_text().splitlines()) if "[" in "".join(words)]
    assert [(words[0], words[1], words[3], words[6]) for words in lines] == 2 * [
        ("t:0", "1", "0.500", "1.000"),
        ("t:1", "1", "0.000", "0.000"),
        ("all", "2", "0.250", "0.500"),
    ]


def test_one_evaluation_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.before"):
        show_evaluations(tmp_path)


def test_a_run_that_is_not_there_is_told_from_one_without_evaluations(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        show_evaluations(tmp_path / "missing")
