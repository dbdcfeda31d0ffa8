"""``rl-async view``, ``report`` and ``trace``: the page on runs, served or as one file, and its timeline as a trace."""

import argparse
from pathlib import Path

from rl_async.errors import UserError
from rl_async.launcher.cli.options import add_run


def add_view(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a page on runs, finished or running, to this machine's browser: curves, trajectories token by token, "
        "evaluations, and who waits for whom. See docs/how-to/view.md."
    )
    runs = "run folders, or folders of runs (default: runs)"
    parser.add_argument("runs", type=Path, nargs="*", default=[Path("runs")], metavar="RUN", help=runs)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    parser.set_defaults(command=_view, steady=True)


def _view(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.view.serve import serve

    serve(arguments.runs, arguments.port)
    return 0


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the page of a run into one file, which opens from disk: all metrics, the config, evaluations, and a "
        "bounded part of its trajectories. Read it before you send it: it says what your data and config say."
    )
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="OUT.html")
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.view.report import write_report

    print(write_report(arguments.run, arguments.out))
    return 0


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write what every process of a run did, and when, as a trace for https://ui.perfetto.dev: "
        "phases, weight updates, answers, tool calls and rewards. See docs/how-to/view.md."
    )
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--steps", metavar="FROM[-TO]", help="whose episodes are in it (default: the newest 20)")
    parser.set_defaults(command=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.timeline.perfetto import write_trace

    print(write_trace(arguments.run, arguments.out, _steps(arguments.steps)))
    return 0


def _steps(given: str | None) -> range | None:
    if given is None:
        return None
    first, _, last = given.partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise UserError(f"--steps: {given!r} is no step and no range of steps such as 10-12")
    return range(int(first), int(last or first) + 1)
