"""Statistics of held-out episodes: avg@k and pass@k by data source with 95 % intervals, and paired tests.

In go rewards by data source, task and role; out come summaries. The trainer records them while a run goes on, and
``rl-async eval``, ``compare`` and the page compute them from recorded episodes: they agree, since this is the only
implementation. All intervals are over tasks, with one number for each. To add an estimate, write its formula and add a
field to ``Summary``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from rl_async.messages import Reserved, Sampling, Task, Trajectory, TrajectoryHeader, Turn, role_rewards

# Of a 95 % interval.
Z = NormalDist().inv_cdf(0.975)
# For up to EXACT changes all 2^n signs are tried, and for more DRAWS of them.
EXACT = 14
DRAWS = 1 << 14
# Rewards that differ by less are equal: weighted sums such as 0.7 + 0.2 + 0.1 miss by the last bit.
ROUNDING = 1e-9


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def passes(reward: float, solved: float) -> bool:
    """Whether a reward is ``solved`` or more."""
    return reward >= solved - ROUNDING


def change_of(before: float, after: float) -> float:
    """Return by how much a number has changed; 0 if rounding may explain it."""
    change = after - before
    return 0.0 if abs(change) < ROUNDING else change


def average(values: Sequence[float]) -> float:
    """Return the mean of numbers, independent of their order."""
    return math.fsum(values) / len(values)


def pass_at(k: int, samples: int, passed: int) -> float:
    """Estimate the chance that one of ``k`` samples passes, without bias: ``passed`` of ``samples`` did.

    1 - C(n - c, k) / C(n, k): Chen et al. (arXiv:2107.03374), section 2.1.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Return the interval of a share ``mean`` of ``count`` trials: Wilson (1927), without continuity correction.

    For the mean of ``count`` numbers between 0 and 1 it is not too narrow, as none of that mean varies more than a
    share does.
    """
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_of(values: Sequence[float]) -> Interval:
    """Return the mean of one number per task: Wilson's interval for numbers between 0 and 1, else as for changes."""
    mean = average(values)
    if all(0.0 <= value <= 1.0 for value in values):
        return Interval(mean, *wilson(min(max(mean, 0.0), 1.0), len(values)))
    return mean_change_of(values)


def mean_change_of(values: Sequence[float]) -> Interval:
    """Return the mean of one number per task: of numbers between -1 and 1 with Agresti and Min's interval.

    That is the normal one after adding two tasks to the ``n`` of the sample, with changes of 1, -1, 0 and 0 counted
    half each: Agresti and Min (2005), Statistics in Medicine 24, for differences of matched shares. Its width follows
    how many tasks changed and by how much, and does not shrink to nothing where none did, as Student's does. For
    numbers other than differences of single answers it is a little too wide.

    Other numbers have Student's interval, which has no bounds for fewer than three numbers or for equal ones.
    """
    count, mean = len(values), average(values)
    if all(-1.0 <= value <= 1.0 for value in values):
        centre = math.fsum(values) / (count + 2)
        variance = (sum(value * value for value in values) + 1) / (count + 2) - centre * centre
        half = Z * math.sqrt(variance / (count + 2))
        return Interval(mean, max(-1.0, centre - half), min(1.0, centre + half))
    variance = sum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    half = _student(count - 1) * math.sqrt(variance / count) if count >= 3 and variance else math.inf
    return Interval(mean, mean - half, mean + half)


def _student(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t, to 1 % from 2 degrees of freedom on: Abramowitz and Stegun, 26.7.5."""
    return Z + sum(
        polynomial / freedom**power
        for power, polynomial in enumerate(
            (
                (Z**3 + Z) / 4,
                (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
                (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
                (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
            ),
            start=1,
        )
    )


def paired_p(changes: Sequence[float]) -> float:
    """Return how likely a mean at least as far from 0 is if each task's change had its sign by chance; two-sided.

    Fisher's randomization test for paired samples: exact for up to ``EXACT`` tasks that changed, else of ``DRAWS``
    draws, with the observed one counted among them (Phipson and Smyth, 2010), and the same for the same changes.
    """
    changed = np.array([change for change in changes if change], dtype=np.float64)
    # Sums in another order may differ in the last bit.
    observed = abs(changed.sum()) * (1 - 1e-12)
    if len(changed) <= EXACT:
        signs = 1 - 2 * ((np.arange(1 << len(changed))[:, None] >> np.arange(len(changed))) & 1)
        return float(np.mean(np.abs(signs @ changed) >= observed))
    generator = np.random.default_rng(0)
    hits = 0
    # In parts, to save memory.
    for _ in range(DRAWS >> 8):
        signs = generator.choice(np.array([-1.0, 1.0]), (1 << 8, len(changed)))
        hits += int(np.count_nonzero(np.abs(signs @ changed) >= observed))
    return (hits + 1) / (DRAWS + 1)


GIVEN_UP = "every attempt failed; the ledger and the workers' logs say why"


class Answer(NamedTuple):
    """The reward of one held-out episode, or of one role of it."""

    source: str
    task: str
    reward: float
    role: str = ""
    # An episode that could not be scored counts as 0.
    scored: bool = True


class Tried(NamedTuple):
    """One task: how often it was sampled, the mean reward, and how many samples passed."""

    samples: int
    mean: float
    passed: int


class Summary(msgspec.Struct, kw_only=True):
    """The results of one data source, under the name that ``line_of`` gives it. Each task counts once.

    ``k`` is the smallest number of samples of a task. ``average`` is avg@k, and ``passed`` is pass@1, and pass@k if
    k > 1.
    """

    source: str
    tasks: int
    episodes: int
    k: int
    average: Interval
    passed: dict[int, Interval]

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
