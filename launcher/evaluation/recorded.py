"""Evaluations that runs have recorded, or that ``rl-async eval --jsonl`` wrote."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rl_async.errors import UserError
from rl_async.evaluation import Answer, answers_of, average
from rl_async.launcher.evaluation.lines import last_answer, number_of, prompt_of, question_of, read_lines
from rl_async.messages import Trajectory
from rl_async.recording import evaluations, read_trajectories

TaskKey = tuple[str, str, str]  # data source, role and task


class Evaluation(NamedTuple):
    """A recorded evaluation: of a version of a run, or of what ``rl-async eval`` evaluated.

    ``means`` has the mean reward of each task, ``unscored`` counts episodes that could not be scored and count as 0,
    ``asked`` has a number of each task's prompt, by which two are told apart, ``questions`` what the user said last in
    it, and ``replies`` the last answer of the first sample that there is.
    """

    name: str
    means: Mapping[TaskKey, float]
    unscored: int
    asked: Mapping[TaskKey, int]
    questions: Mapping[TaskKey, str]
    replies: Mapping[TaskKey, str]


def read_evaluation(where: str) -> Evaluation:
    """Read the evaluation that ``RUN``, ``RUN@VERSION`` (without a version: the newest) or a file of JSON lines names.

    Raises UserError.
    """
    if where.endswith(".jsonl") and Path(where).is_file():
        return _of_lines(Path(where))
    name, at, version = where.rpartition("@")
    if not at or not version.isdigit():
        name, version = where, ""
    run = Path(name)
    if not run.is_dir():
        raise UserError(f"no run folder {run}, and no file of JSON lines")
    files = evaluations(run / "trajectories")
    if not files:
        raise UserError(f"{run} has no evaluation: a run evaluates if it has data.eval_path, and `rl-async eval` does")
    if version and int(version) not in files:
        raise UserError(f"{run} has no evaluation of version {version}, but of {', '.join(map(str, files))}")
    chosen = int(version) if version else max(files)
    rows = sorted(read_trajectories(files[chosen]), key=lambda row: (row.sample, row.segment))
    first, replies = dict[TaskKey, Trajectory](), dict[TaskKey, str]()
    for row in rows:
        if row.sample == first.setdefault(_key(row), row).sample:
            replies[_key(row)] = last_answer(row.turns)
    prompts = {key: prompt_of(row.turns) for key, row in first.items()}
    return Evaluation(
        f"{run.name}@{chosen}",
        *_rewards(_answers(rows)),
        {key: number_of(prompt) for key, prompt in prompts.items()},
        {key: question_of(prompt) for key, prompt in prompts.items()},
        replies,
    )


def read_answers(file: Path) -> list[Answer]:
    """Return the episodes of an evaluation that a run has recorded, role by role."""
    return _answers(list(read_trajectories(file)))


def _answers(rows: Sequence[Trajectory]) -> list[Answer]:
    tasks = {row.group_id: (row.data_source, row.task_id) for row in rows}
    return answers_of([row.header() for row in rows], tasks)


def _of_lines(path: Path) -> Evaluation:
    lines = read_lines(path)
    if not lines:
        raise UserError(f"{path} has no episodes")
    by_sample = sorted(lines, key=lambda line: line.sample, reverse=True)
    first = {(line.source, line.role, line.task): line for line in by_sample}
    return Evaluation(
        path.name,
        *_rewards([Answer(line.source, line.task, line.reward, line.role, line.scored) for line in lines]),
        {key: number_of(line.prompt) for key, line in first.items()},
        {key: question_of(line.prompt) for key, line in first.items()},
        {key: line.answer for key, line in first.items()},
    )


def _rewards(answers: Sequence[Answer]) -> tuple[dict[TaskKey, float], int]:
    """Return the mean reward of each task, and how many episodes could not be scored."""
    rewards: dict[TaskKey, list[float]] = {}
    for answer in answers:
        rewards.setdefault((answer.source, answer.role, answer.task), []).append(answer.reward)
    means = {key: average(values) for key, values in rewards.items()}
    return means, sum(not answer.scored for answer in answers)


def _key(row: Trajectory) -> TaskKey:
    return row.data_source, row.role, row.task_id
