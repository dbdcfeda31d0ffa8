"""One evaluation by data source: avg@k and pass@k."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rl_async.evaluation.statistics import Interval, average, mean_of, pass_at, passes
from rl_async.messages import Reserved, Sampling, Task, Trajectory, TrajectoryHeader, Turn, role_rewards

GIVEN_UP = "every attempt failed; the ledger and the workers' logs say why"


class Answer(NamedTuple):
    """One held-out episode; of an episode of several roles, what one of them earned."""

    source: str
    task: str
    reward: float
    role: str = ""
    scored: bool = True  # false: it could not be scored, and counts as 0


class Tried(NamedTuple):
    """One task: how often it was sampled, the mean reward, and how many samples passed."""

    samples: int
    mean: float
    passed: int


class Summary(msgspec.Struct, kw_only=True):
    """How one data source was answered. Each task counts once, however often it was sampled."""

    source: str  # as ``line_of`` names it
    tasks: int
    episodes: int
    k: int  # the smallest number of samples of a task
    average: Interval  # avg@k
    passed: dict[int, Interval]  # pass@1, and pass@k if k > 1

    def metrics(self) -> dict[str, float]:
        """Return it as metrics: ``SOURCE/avg``, ``SOURCE/pass@1``, ``SOURCE/pass@k`` with the number k, each with
        ``/low`` and ``/high`` of its interval where that has bounds, ``SOURCE/tasks`` and ``SOURCE/samples``."""
        estimates = {"avg": self.average} | {f"pass@{k}": found for k, found in self.passed.items()}
        numbers = {"tasks": float(self.tasks), "samples": float(self.k)}
        for name, found in estimates.items():
            numbers |= {name: found.value, f"{name}/low": found.low, f"{name}/high": found.high}
        source = self.source or "unnamed"
        return {f"{source}/{name}": value for name, value in numbers.items() if math.isfinite(value)}


def failed_row(
    task: Task,
    group_id: int,
    sample: int,
    error: str,
    *,
    attempt: int = 0,
    role: str = "",
    segment: int = 0,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
) -> Trajectory:
    """Return the row of a held-out episode that failed: without tokens, and unscored, so that it counts as 0."""
    return Trajectory(
        task_id=task.task_id,
        group_id=group_id,
        sample=sample,
        attempt=attempt,
        episode_id=f"{group_id}.{sample}.{attempt}",
        segment=segment,
        role=role,
        partition="eval",
        token_ids=np.array([], np.int32),
        loss_mask=np.array([], np.bool_),
        logprobs=np.array([], np.float32),
        versions=[],
        sampling=sampling,
        reward=0.0,
        scored=False,
        finish_reason="error",
        error=error,
        turns=[Turn(role=message["role"], text=message["content"]) for message in task.prompt],
        ground_truth=task.ground_truth,
        data_source=task.data_source,
    )


def failed_rows(result: Reserved, rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Return a row for each episode of an evaluation that failed for good; of a game, one for each role.

    Without them a policy whose wrong answers run out of time would have better rewards than one that gives them.
    """
    roles: dict[str, set[str]] = {}
    for row in rows:
        roles.setdefault(row.data_source, set()).add(row.role)
    made = []
    for group, sample in result.failed:
        task = result.tasks[group]
        for segment, role in enumerate(sorted(roles.get(task.data_source, {""}))):
            made.append(failed_row(task, group, sample, GIVEN_UP, role=role, segment=segment))
    return made


def answers_of(headers: Sequence[TrajectoryHeader], tasks: Mapping[int, tuple[str, str]]) -> list[Answer]:
    """Return an evaluation's episodes, role by role; ``tasks`` has the data source and the name of each group's task.

    Those that could not be scored count as 0, as they do in ``eval/reward``.
    """
    rewards = role_rewards(headers)
    players = dict.fromkeys((header.group_id, header.sample, header.role) for header in headers)
    return [
        Answer(*tasks[group], rewards.get(player, 0.0), role, player in rewards)
        for player in players
        for group, _, role in [player]
    ]


def summarize(answers: Iterable[Answer], solved: float) -> list[Summary]:
    """Return a summary per data source and role, by name. An episode passes with a reward of ``solved`` or more."""
    by_source: dict[str, dict[str, list[float]]] = {}
    for answer in answers:
        by_source.setdefault(line_of(answer.source, answer.role), {}).setdefault(answer.task, []).append(answer.reward)
    return [
        summary(source, [_tried(rewards, solved) for rewards in tasks.values()])
        for source, tasks in sorted(by_source.items())
    ]


def _tried(rewards: Sequence[float], solved: float) -> Tried:
    return Tried(len(rewards), average(rewards), sum(passes(reward, solved) for reward in rewards))


def summarize_with_total(answers: Sequence[Answer], solved: float) -> list[Summary]:
    """Return what ``summarize`` does and, if that has several lines, one over all of them, called ``all``.

    There a task with several roles counts once, with the mean of its roles, and has no pass@k: one game is not as many
    attempts as it has roles.
    """
    summaries = summarize(answers, solved)
    if len(summaries) <= 1:
        return summaries
    if not any(answer.role for answer in answers):
        everything = (answer._replace(source="all", task="/".join(answer[:2])) for answer in answers)
        return summaries + summarize(everything, solved)
    tasks: dict[tuple[str, str], dict[str, list[float]]] = {}
    for answer in answers:
        tasks.setdefault(answer[:2], {}).setdefault(answer.role, []).append(answer.reward)
    tried = [[_tried(rewards, solved) for rewards in roles.values()] for roles in tasks.values()]
    total = Summary(
        source="all",
        tasks=len(tried),
        episodes=sum(max(role.samples for role in roles) for roles in tried),
        k=min(role.samples for roles in tried for role in roles),
        average=mean_of([average([role.mean for role in roles]) for roles in tried]),
        passed={1: mean_of([average([role.passed / role.samples for role in roles]) for roles in tried])},
    )
    return [*summaries, total]


def line_of(source: str, role: str) -> str:
    """Return the name of a data source's line in a table, or of that of one role."""
    return f"{source} as {role}" if role else source


def summary(source: str, tasks: Sequence[Tried]) -> Summary:
    """Return the summary of a data source's tasks."""
    k = min(task.samples for task in tasks)
    return Summary(
        source=source,
        tasks=len(tasks),
        episodes=sum(task.samples for task in tasks),
        k=k,
        average=mean_of([task.mean for task in tasks]),
        passed={
            tries: mean_of([pass_at(tries, task.samples, task.passed) for task in tasks]) for tries in sorted({1, k})
        },
    )
