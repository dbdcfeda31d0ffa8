"""Evaluations that runs have recorded."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rl_async.errors import UserError
from rl_async.launcher.evaluation.summary import Answer, answers_of
from rl_async.messages import Trajectory, Turn
from rl_async.recording import evaluations, read_trajectories

TaskKey = tuple[str, str, str]  # data source, role and task


class Evaluation(NamedTuple):
    """A recorded evaluation: of the version after ``step`` of a run, or of what ``rl-async eval`` evaluated.

    ``prompts`` has what was said before the policy's first turn, and ``replies`` the last answer of the first sample.
    """

    name: str
    answers: list[Answer]
    prompts: Mapping[TaskKey, tuple[Turn, ...]]
    replies: Mapping[TaskKey, str]


def read_evaluation(where: str) -> Evaluation:
    """Read the evaluation that ``RUN`` or ``RUN@STEP`` names: without a step, the newest. Raises UserError."""
    name, at, step = where.rpartition("@")
    if not at or not step.isdigit():
        name, step = where, ""
    run = Path(name)
    if not run.is_dir():
        raise UserError(f"no run folder {run}")
    files = evaluations(run / "trajectories")
    if not files:
        raise UserError(f"{run} has no evaluation: a run evaluates if it has data.eval_path, and `rl-async eval` does")
    if step and int(step) not in files:
        raise UserError(f"{run} has no evaluation of step {step}, but of {', '.join(map(str, files))}")
    chosen = int(step) if step else max(files)
    rows = sorted(read_trajectories(files[chosen]), key=lambda row: row.segment)
    tasks = {row.group_id: (row.data_source, row.task_id) for row in rows}
    first = [row for row in rows if row.sample == 0]
    return Evaluation(
        f"{run.name}@{chosen}",
        answers_of([row.header() for row in rows], tasks),
        {_key(row): tuple(takewhile(_is_told, row.turns)) for row in reversed(first)},
        {_key(row): last_answer(row) for row in first},
    )


def last_answer(row: Trajectory) -> str:
    """Return the policy's last turn; empty if it had none."""
    return next((turn.text for turn in reversed(row.turns) if turn.role == "assistant"), "")


def _key(row: Trajectory) -> TaskKey:
    return row.data_source, row.role, row.task_id


def _is_told(turn: Turn) -> bool:
    return turn.role != "assistant"
