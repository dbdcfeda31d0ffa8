"""Reads recorded evaluations, compares them task by task, and lays them out as tables.

The held-out episodes come from ``rl-async eval`` as they are played, from a run's folder, or as JSON lines, one for
each episode and role (``rl-async eval --jsonl``). A comparison gives the changes and whether they are more than chance;
``rl-async show RUN --eval`` prints a run's first and last evaluation by data source, and their answers side by side.
``rl_async.evaluation`` has the statistics.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import EvalConfig
from rl_async.errors import UserError
from rl_async.evaluation import (
    Answer,
    Interval,
    Summary,
    answers_of,
    average,
    change_of,
    line_of,
    mean_change_of,
    mean_of,
    paired_p,
    summarize_with_total,
)
from rl_async.files import DAMAGE, nearest_run, undamaged, written_whole
from rl_async.messages import Trajectory, Turn, role_rewards
from rl_async.process.role import printable
from rl_async.recording import evaluations, read_trajectories

# Role and text of each message before the policy's first turn.
Prompt = Sequence[tuple[str, str]]


class EpisodeLine(msgspec.Struct, kw_only=True):
    """One held-out episode, or one role of an episode with several."""

    source: str
    task: str
    sample: int
    role: str
    reward: float
    scored: bool
    finish_reason: str
    ground_truth: str
    prompt: list[tuple[str, str]]
    answer: str
    error: str


def write_lines(path: Path, rows: Iterable[Trajectory]) -> None:
    """Write a line for each episode and role, ordered by group; the file is written whole or not at all."""
    rows = sorted(rows, key=lambda row: row.key)
    rewards = role_rewards(row.header() for row in rows)
    last = {(row.group_id, row.sample, row.role): row for row in rows}
    with written_whole(path) as partial, partial.open("wb") as file:
        for player, row in last.items():
            line = EpisodeLine(
                source=row.data_source,
                task=row.task_id,
                sample=row.sample,
                role=row.role,
                reward=rewards.get(player, 0.0),
                scored=player in rewards,
                finish_reason=row.finish_reason,
                ground_truth=row.ground_truth,
                prompt=[*prompt_of(row.turns)],
                answer=last_answer(row.turns),
                error=row.error,
            )
            file.write(msgspec.json.encode(line) + b"\n")


def read_lines(path: Path) -> list[EpisodeLine]:
    """Read a file of ``write_lines``. Raises UserError, naming the first invalid line."""
    found = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                found.append(msgspec.json.decode(line, type=EpisodeLine))
            except DAMAGE as error:
                raise UserError(f"{path}, line {number} is none of `rl-async eval --jsonl`: {error}") from error
    return found


def prompt_of(turns: Sequence[Turn]) -> Prompt:
    """Return the messages before the policy's first turn."""
    return [(turn.role, turn.text) for turn in takewhile(lambda turn: turn.role != "assistant", turns)]


def number_of(prompt: Prompt) -> int:
    """Return a checksum of a prompt."""
    return zlib.crc32(msgspec.json.encode(prompt))


def question_of(prompt: Prompt) -> str:
    """Return the user's last message, or an empty string."""
    return next((text for role, text in reversed(prompt) if role == "user"), "")


def last_answer(turns: Sequence[Turn]) -> str:
    """Return the policy's last turn, or an empty string."""
    return next((turn.text for turn in reversed(turns) if turn.role == "assistant"), "")


# Data source, role and task.
TaskKey = tuple[str, str, str]


class Evaluation(NamedTuple):
    """A recorded evaluation of a version of a run, or by ``rl-async eval``.

    ``means`` holds the mean reward of each task, where the ``unscored`` episodes count as 0. ``asked`` holds a checksum
    of each task's prompt, ``questions`` the user's last message in it, and ``replies`` the last answer of the first
    recorded sample.
    """

    name: str
    means: Mapping[TaskKey, float]
    unscored: int
    asked: Mapping[TaskKey, int]
    questions: Mapping[TaskKey, str]
    replies: Mapping[TaskKey, str]


def read_evaluation(where: str) -> Evaluation:
    """Read an evaluation given as ``RUN`` (its newest), ``RUN@VERSION`` or a file of JSON lines. Raises UserError."""
    if where.endswith(".jsonl") and Path(where).is_file():
        return _of_lines(Path(where))
    name, at, version = where.rpartition("@")
    if not at or not version.isdigit():
        name, version = where, ""
    run = Path(name)
    if not run.is_dir():
        close = nearest_run(run) or "name a run as runs/NAME"
        raise UserError(f"no run folder {run}, and no file of JSON lines; {close}")
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


def _answers(rows: Sequence[Trajectory]) -> list[Answer]:
    """Return an answer for each episode and role in these rows."""
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
    """Return the mean reward of each task, and the number of episodes that could not be scored."""
    rewards: dict[TaskKey, list[float]] = {}
    for answer in answers:
        rewards.setdefault((answer.source, answer.role, answer.task), []).append(answer.reward)
    means = {key: average(values) for key, values in rewards.items()}
    return means, sum(not answer.scored for answer in answers)


def _key(row: Trajectory) -> TaskKey:
    return row.data_source, row.role, row.task_id


class Change(msgspec.Struct, kw_only=True):
    """Rewards before and after for the tasks of one data source that both evaluations have.

    ``change`` is the change of the mean, estimated from the change of each task; ``p`` is that of ``paired_p``.
    """

    source: str
    tasks: int
    before: Interval
    after: Interval
    change: Interval
    better: int
    worse: int
    p: float


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
    """The changes of each data source and, if there are several, of all; and of each task, the worst changes first."""

    before: str
    after: str
    sources: list[Change]
    tasks: list[TaskChange]
    # Tasks that only one evaluation has, or whose prompts differ.
    left_out: int
    # Episodes before and after that could not be scored and count as 0.
    unscored: tuple[int, int]


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Compare task by task. Raises UserError if the evaluations share no task with the same prompt."""
    first, second = before.means, after.means
    common = first.keys() & second.keys()
    # In a game, a prompt may quote another role's answer, so prompts must only be equal for tasks without roles.
    both = sorted(key for key in common if before.asked[key] == after.asked[key] or key[1] != "")
    if not both:
        raise UserError(f"{before.name} and {after.name} have no task in common that asks the same")
    sources: dict[str, list[TaskKey]] = {}
    for key in both:
        sources.setdefault(line_of(*key[:2]), []).append(key)
    lines = [_change(source, first, second, [[key] for key in keys]) for source, keys in sources.items()]
    # In the total, a task counts once, with the mean of its roles.
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
    """Compare tasks, each given by its keys, one for each role."""
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


# At most this many tasks that became worse are shown, and as many that became better.
SHOWN = 5
# At most this many characters of a prompt or an answer are shown; the files hold the whole texts.
LONGEST = 120


def summary_table(summaries: Sequence[Summary], what: str) -> Table:
    """Lay out an evaluation, one line per data source; ``what`` is its title."""
    table = Table(
        title=f"{what}, with 95 % intervals", title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False
    )
    table.add_column("source", overflow="fold")
    for name in ("tasks", "samples", "avg@k", "pass@1", "pass@k"):
        table.add_column(name, justify="right")
    for line in summaries:
        passed = [_interval(line.passed[1]), _interval(line.passed[line.k]) if line.k > 1 else ""]
        samples = f"{line.k}" if line.episodes == line.k * line.tasks else f"{line.k} or more"
        table.add_row(_cell(line.source or "unnamed"), str(line.tasks), samples, _interval(line.average), *passed)
    return table


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a table of the data sources, and then the tasks that changed most."""
    title = f"before: {_cell(comparison.before)}, after: {_cell(comparison.after)}"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("source", overflow="fold")
    for name in ("tasks", "before", "after", "change [95 %]", "better", "worse", "p"):
        table.add_column(name, justify="right")
    for line in comparison.sources:
        means = (f"{line.before.value:.3f}", f"{line.after.value:.3f}")
        change = f"{line.change.value:+.3f} [{line.change.low:+.3f}, {line.change.high:+.3f}]"
        counts = (str(line.better), str(line.worse), f"{line.p:.1g}")
        table.add_row(_cell(line.source or "unnamed"), str(line.tasks), *means, escape(change), *counts)
    console.print(table)
    if comparison.left_out:
        console.print(
            f"left out: {comparison.left_out} tasks that only one has, or whose prompts differ", highlight=False
        )
    if any(comparison.unscored):
        before, after = comparison.unscored
        console.print(f"episodes that could not be scored, and count as 0: {before} and {after}", highlight=False)
    for text in _changed_most(comparison):
        console.print(text, highlight=False, markup=False)


def _interval(found: Interval) -> str:
    return escape(f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]")


def _changed_most(comparison: Comparison) -> Iterator[str]:
    worse = [task for task in comparison.tasks if task.after < task.before][:SHOWN]
    better = [task for task in reversed(comparison.tasks) if task.after > task.before][:SHOWN]
    for name, tasks in (("became worse", worse), ("became better", better)):
        if tasks:
            yield f"\n{name}, most first:"
        for task in tasks:
            yield f"  {_short(task.question)}"
            yield f"    {task.before:.2f}  {_short(task.replied_before)}"
            yield f"    {task.after:.2f}  {_short(task.replied_after)}"


def _cell(text: str) -> str:
    return escape(printable(text))


def _short(text: str) -> str:
    """Return the text on one line, harmless to a terminal."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


# Like LONGEST, for a table whose columns fold.
LONGEST_ANSWER = 160


class HeldOut(msgspec.Struct):
    """The part of a recorded held-out trajectory that is shown; other fields of the line are skipped."""

    task_id: str
    sample: int
    reward: float
    turns: list[Turn]
    segment: int = 0
    role: str = ""


def show_evaluations(run: Path, console: Console | None = None) -> None:
    """Print the rewards of the first and the last evaluation by data source, and then their answers side by side.

    Raises UserError unless the run has recorded two.
    """
    if not run.is_dir():
        raise UserError(f"no run folder {run}")
    files = evaluations(run / "trajectories")
    if len(files) < 2:
        raise UserError(
            f"{run} has {len(files)} evaluations so far, and two are needed; they take data.eval_path, the first also "
            "eval.before=true"
        )
    console = console or Console()
    (first, before), *_, (last, after) = files.items()
    solved = _solved(run)
    for version, file in ((first, before), (last, after)):
        title = f"version {version}: held-out reward, passed at {solved:g} or more"
        answers = _answers(list(read_trajectories(file)))
        console.print(summary_table(summarize_with_total(answers, solved), title))
    console.print(side_by_side(before, after, f"version {first}", f"version {last}"))


def _solved(run: Path) -> float:
    """Return the run's ``eval.solved``, or the default if its config is missing or of another version."""
    try:
        return load_resolved(run / "config.yaml").eval.solved
    except UserError:
        return EvalConfig().solved


def side_by_side(first: Path, last: Path, *names: str) -> Table:
    """Lay out two evaluations: a line per common task, sample and role, the largest loss first, and mean rewards."""
    before, after = _read(first), _read(last)
    both = sorted(before.keys() & after.keys(), key=lambda key: (before[key].reward - after[key].reward, key))
    means = [sum(rows[key].reward for key in both) / max(len(both), 1) for rows in (before, after)]
    table = Table(title="held-out answers", title_justify="left", show_footer=True)
    table.add_column("task", f"mean reward of {len(both)}", overflow="fold")
    for name, mean in zip(names, means, strict=True):
        table.add_column(name, overflow="fold")
        table.add_column("reward", f"{mean:.3f}", justify="right")
    for key in both:
        old, new = before[key], after[key]
        answers = [cell for row in (old, new) for cell in (_said(row, "assistant"), f"{row.reward:g}")]
        table.add_row(f"{printable(old.role)}: " * bool(old.role) + _said(old, "user"), *answers)
    return table


def _read(file: Path) -> dict[tuple[str, int, str], HeldOut]:
    with undamaged(file), gzip.open(file, "rb") as lines:
        rows = [msgspec.json.decode(line, type=HeldOut) for line in lines]
    rows.sort(key=lambda row: row.segment)
    # The last segment of each episode and role counts.
    return {(row.task_id, row.sample, row.role): row for row in rows}


def _said(row: HeldOut, role: str) -> str:
    """Return the last turn of a role, on one line and harmless to a terminal."""
    said = [turn.text for turn in row.turns if turn.role == role]
    text = printable(" ".join(said[-1].split()) if said else "")
    return escape(text if len(text) <= LONGEST_ANSWER else f"{text[: LONGEST_ANSWER - 3]}...")
