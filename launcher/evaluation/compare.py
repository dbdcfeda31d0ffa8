"""Two evaluations of the same tasks: what changed, and whether by more than chance."""

from collections.abc import Mapping, Sequence

import msgspec

from rl_async.errors import UserError
from rl_async.launcher.evaluation.recorded import Evaluation
from rl_async.launcher.evaluation.statistics import Interval, mean_of, normal_mean_of, paired_p


class Change(msgspec.Struct, kw_only=True):
    """How the tasks of one data source that both evaluations have were answered before and after."""

    source: str
    tasks: int
    before: Interval
    after: Interval
    change: Interval  # of the mean, from each task's own change
    better: int
    worse: int
    p: float  # of paired_p


class TaskChange(msgspec.Struct, kw_only=True):
    """One task, with its mean reward and an answer of each side."""

    source: str
    task: str
    question: str
    before: float
    after: float
    replied_before: str
    replied_after: str


class Comparison(msgspec.Struct, kw_only=True):
    """Data sources by name, with several also all of them; tasks, the worst changes first."""

    before: str
    after: str
    sources: list[Change]
    tasks: list[TaskChange]
    left_out: int  # tasks that only one of both has


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Compare task by task. Raises UserError if they have no task in common, or one has another prompt in each."""
    first, second = _mean_rewards(before), _mean_rewards(after)
    both = sorted(first.keys() & second.keys())
    if not both:
        raise UserError(f"{before.name} and {after.name} have no task in common")
    for _, task in both:
        if before.questions.get(task) != after.questions.get(task):
            raise UserError(f"task {task} asks something else in {after.name} than in {before.name}")
    sources = {source: [key for key in both if key[0] == source] for source in sorted({key[0] for key in both})}
    if len(sources) > 1:
        sources["all"] = both
    return Comparison(
        before=before.name,
        after=after.name,
        sources=[_change(source, keys, first, second) for source, keys in sources.items()],
        tasks=sorted(
            (
                TaskChange(
                    source=source,
                    task=task,
                    question=before.questions.get(task, ""),
                    before=first[source, task],
                    after=second[source, task],
                    replied_before=before.replies.get(task, ""),
                    replied_after=after.replies.get(task, ""),
                )
                for source, task in both
            ),
            key=lambda task: (task.after - task.before, task.source, task.task),
        ),
        left_out=len(first.keys() ^ second.keys()),
    )


Means = Mapping[tuple[str, str], float]  # by data source and task


def _mean_rewards(evaluation: Evaluation) -> Means:
    rewards: dict[tuple[str, str], list[float]] = {}
    for answer in evaluation.answers:
        rewards.setdefault((answer.source, answer.task), []).append(answer.reward)
    return {key: sum(values) / len(values) for key, values in rewards.items()}


def _change(source: str, keys: Sequence[tuple[str, str]], first: Means, second: Means) -> Change:
    changes = [second[key] - first[key] for key in keys]
    return Change(
        source=source,
        tasks=len(keys),
        before=mean_of([first[key] for key in keys]),
        after=mean_of([second[key] for key in keys]),
        change=normal_mean_of(changes),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        p=paired_p(changes),
    )
