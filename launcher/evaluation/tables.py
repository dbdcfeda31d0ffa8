"""Evaluations and comparisons for the terminal."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_async.evaluation import Interval, Summary
from rl_async.launcher.evaluation.compare import Comparison
from rl_async.launcher.watch.terminal import printable

SHOWN = 5  # tasks that became worse, and as many that became better
LONGEST = 120  # characters of a prompt or an answer; the files have all


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
