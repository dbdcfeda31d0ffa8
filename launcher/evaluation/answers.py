"""``rl-async show RUN --eval``: a run's first and last evaluation by data source, and their answers side by side."""

import gzip
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import EvalConfig
from rl_async.errors import UserError
from rl_async.evaluation import summarize_with_total
from rl_async.launcher.evaluation.recorded import read_answers
from rl_async.launcher.evaluation.tables import summary_table
from rl_async.launcher.watch.terminal import printable
from rl_async.messages import Turn
from rl_async.recording import evaluations

LONGEST = 160  # characters of a prompt or an answer; the files have all


class HeldOut(msgspec.Struct):
    """The part of a recorded held-out trajectory that is shown; other fields of the line are skipped."""

    task_id: str
    sample: int
    reward: float
    turns: list[Turn]
    segment: int = 0
    role: str = ""


def show_evaluations(run: Path, console: Console | None = None) -> None:
    """Print what each data source earned in the first and the last evaluation, and then their answers side by side,
    tasks that changed most first.

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
        console.print(summary_table(summarize_with_total(read_answers(file), solved), title))
    console.print(side_by_side(before, after, f"version {first}", f"version {last}"))


def _solved(run: Path) -> float:
    """Return the run's ``eval.solved``; the default if its config is missing or of another version."""
    try:
        return load_resolved(run / "config.yaml").eval.solved
    except UserError:
        return EvalConfig().solved


def side_by_side(first: Path, last: Path, *names: str) -> Table:
    """Lay out two evaluations with one line per task, sample and role that both have, and their mean rewards below."""
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
    with gzip.open(file, "rb") as lines:
        rows = [msgspec.json.decode(line, type=HeldOut) for line in lines]
    rows.sort(key=lambda row: row.segment)
    return {(row.task_id, row.sample, row.role): row for row in rows}  # the last row of each


def _said(row: HeldOut, role: str) -> str:
    """Return the last turn of a role, on one line and harmless to a terminal."""
    said = [turn.text for turn in row.turns if turn.role == role]
    text = printable(" ".join(said[-1].split()) if said else "")
    return escape(text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")
