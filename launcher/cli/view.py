"""``rl-async view``: the page on runs."""

import argparse
from pathlib import Path


def add_view(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a page on runs, finished or running, to this machine's browser: curves, trajectories token by token, "
        "evaluations, and who waits for whom. It changes nothing. See docs/view.md."
    )
    runs = "run folders, or folders of runs (default: runs)"
    parser.add_argument("runs", type=Path, nargs="*", default=[Path("runs")], metavar="RUN", help=runs)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    parser.set_defaults(command=_view)


def _view(arguments: argparse.Namespace) -> int:
    from rl_async.launcher.view.serve import serve

    serve(arguments.runs, arguments.port)
    return 0
