"""``rl-async view`` and ``rl-async report``: the page on runs, served or as one file."""

import argparse
from pathlib import Path

from rl_async.launcher.cli.options import add_run


def add_view(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a page on runs, finished or running, to this machine's browser: curves, trajectories token by token, "
        "evaluations, and who waits for whom. See docs/view.md."
    )
    runs = "run folders, or folders of runs (default: runs)"
    parser.add_argument("runs", type=Path, nargs="*", default=[Path("runs")], metavar="RUN", help=runs)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    parser.set_defaults(command=_view)


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
