"""The agent worker process: ``python -m rl_async.agent_loop --run RUN --index I --queue ADDRESS``."""

import argparse
import sys

from rl_async.errors import EXIT_RESTART, RlAsyncError
from rl_async.process.allocation import importing, reuse_freed_memory
from rl_async.process.role import add_run, role_parser, run_role


def main() -> int:
    """Run one worker until the run is over; return the exit code."""
    parser = role_parser("agent_loop", __doc__)
    add_run(parser)
    parser.add_argument("--index", type=int, required=True, help="number of this worker")
    parser.add_argument("--queue", required=True, help="address of the transfer queue, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--reward-model", default="", help="URL of the run's own reward model, if it has one")
    given = parser.parse_args()
    reuse_freed_memory()
    return run_role(f"agent-{given.index}", lambda: _work(given), {RlAsyncError: EXIT_RESTART})


def _work(given: argparse.Namespace) -> None:
    with importing():
        from rl_async.agent_loop.worker import work

    work(given.run, given.index, given.queue, given.reward_model)


if __name__ == "__main__":
    sys.exit(main())
