"""Evaluations that runs have recorded."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rl_async.errors import UserError
from rl_async.launcher.evaluation.summary import Answer, answers_of
from rl_async.messages import Trajectory
from rl_async.recording import evaluations, read_trajectories


class Evaluation(NamedTuple):
    """A recorded evaluation: of the version after ``step`` of a run, or of what ``rl-async eval`` evaluated."""

    name: str
    answers: list[Answer]
    questions: Mapping[str, str]  # the last words of each task's prompt
    replies: Mapping[str, str]  # the last answer to each task, of the first sample


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
    rows = read_trajectories(files[chosen])
    tasks = {row.group_id: (row.data_source, row.task_id) for row in rows}
    return Evaluation(
        f"{run.name}@{chosen}",
        answers_of([row.header() for row in rows], tasks),
        {row.task_id: said(row, "user") for row in rows if row.segment == 0},
        {row.task_id: said(row, "assistant") for row in rows if row.sample == 0},
    )


def said(row: Trajectory, role: str) -> str:
    """Return the last turn of a role; empty if there is none."""
    return next((turn.text for turn in reversed(row.turns) if turn.role == role), "")
