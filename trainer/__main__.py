"""The trainer process: one per rank. Builds the parts from the run's config and hands them to ``train``.

``python -m rl_async.trainer --run RUN --queue ADDRESS [--resume]`` trains from the transfer queue;
``--replay FOLDER`` trains on the recorded trajectories of another run instead, without queue or engines.
"""

import argparse
import os
from pathlib import Path

from rl_async.errors import EXIT_FAILED, EXIT_RESTART, RanksLost, RlAsyncError
from rl_async.process.allocation import importing
from rl_async.process.role import add_run, end_with, role_parser, run_role


def main() -> int:
    """Run the trainer; return 0 only if the last step was trained and published, and 143 or 130 if it was asked to stop
    earlier and has saved."""
    arguments = _parse()
    exits = {RanksLost: EXIT_RESTART, RlAsyncError: EXIT_FAILED}
    return run_role(f"trainer-{os.environ.get('RANK', '0')}", lambda: _run(arguments), exits)


def _parse() -> argparse.Namespace:
    parser = role_parser("trainer", __doc__)
    add_run(parser)
    parser.add_argument("--queue", help="address of the transfer queue")
    parser.add_argument(
        "--host", default="127.0.0.1", help="of this machine, where engines meet it (default: loopback)"
    )
    parser.add_argument("--replay", type=Path, help="train on this run folder's recorded trajectories")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, or from step 0")
    arguments = parser.parse_args()
    if (arguments.queue is None) == (arguments.replay is None):
        parser.error("give either --queue or --replay")
    return arguments


def _run(arguments: argparse.Namespace) -> None:
    with importing():
        from rl_async.trainer.rank import run_rank

    run_rank(arguments.run, arguments.queue, arguments.replay, host=arguments.host, resume=arguments.resume)


if __name__ == "__main__":
    end_with(main)
