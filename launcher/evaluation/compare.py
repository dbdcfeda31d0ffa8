"""Two evaluations of the same tasks: what changed, and whether by more than chance."""

from collections.abc import Mapping, Sequence

import msgspec

from rl_async.errors import UserError
from rl_async.evaluation import Interval, average, change_of, line_of, mean_change_of, mean_of, paired_p
from rl_async.launcher.evaluation.recorded import Evaluation, TaskKey


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
    left_out: int  # tasks that only one of both has, or that have another prompt in each
    unscored: tuple[int, int]  # episodes before and after that could not be scored, and count as 0


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Compare task by task. Raises UserError if they have no task with the same prompt in common."""
    first, second = before.means, after.means
    common = first.keys() & second.keys()
    both = sorted(key for key in common if _asks_the_same(before, after, key))
    if not both:
        raise UserError(f"{before.name} and {after.name} have no task in common that asks the same")
    sources: dict[str, list[TaskKey]] = {}
    for key in both:
        sources.setdefault(line_of(*key[:2]), []).append(key)
    lines = [_change(source, first, second, [[key] for key in keys]) for source, keys in sources.items()]
    # In the total a task counts once, with the mean of its roles.
    if len(sources) > 1:
        tasks: dict[tuple[str, str], list[TaskKey]] = {}
        for key in both:
            tasks.setdefault((key[0], key[2]), []).append(key)
        lines.append(_change("all", first, second, list(tasks.values())))
    return Comparison(
        before=before.name,
        after=after.name,
        sources=lines,
        tasks=sorted(
            (
                TaskChange(
                    source=line_of(*key[:2]),
                    task=key[2],
                    question=before.questions.get(key, ""),
                    before=first[key],
                    after=second[key],
                    replied_before=before.replies.get(key, ""),
                    replied_after=after.replies.get(key, ""),
                )
                for key in both
            ),
            key=lambda task: (task.after - task.before, task.source, task.task),
        ),
        left_out=len(first.keys() | second.keys()) - len(both),
        unscored=(before.unscored, after.unscored),
    )


Means = Mapping[TaskKey, float]


def _change(source: str, first: Means, second: Means, tasks: Sequence[Sequence[TaskKey]]) -> Change:
    """Compare tasks, each given by its keys, of which it has one for each role."""
    before = [average([first[key] for key in keys]) for keys in tasks]
    after = [average([second[key] for key in keys]) for keys in tasks]
    changes = list(map(change_of, before, after))
    return Change(
        source=source,
        tasks=len(tasks),
        before=mean_of(before),
        after=mean_of(after),
        change=mean_change_of(changes),
        better=sum(change > 0 for change in changes),
        worse=sum(change < 0 for change in changes),
        p=paired_p(changes),
    )


def _asks_the_same(before: Evaluation, after: Evaluation, key: TaskKey) -> bool:
    """Whether the policy was told the same first. What a role is told may come from another role's answer."""
    return before.asked[key] == after.asked[key] or key[1] != ""
