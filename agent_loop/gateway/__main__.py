"""The gateway process: ``python -m rl_async.agent_loop.gateway --run RUN --queue ADDRESS --port P``."""

import argparse
import sys

from rl_async.errors import EXIT_RESTART, RlAsyncError
from rl_async.process.role import add_run, role_parser, run_role


def main() -> int:
    """Run a gateway until the run is over; return the exit code."""
    parser = role_parser("agent_loop.gateway", __doc__)
    add_run(parser)
    parser.add_argument("--queue", required=True, help="address of the transfer queue, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--host", default="", help="default: agent.gateway.host")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--reward-model", default="", help="URL of the run's own reward model, if it has one")
    given = parser.parse_args()
    return run_role("gateway", lambda: _work(given), {RlAsyncError: EXIT_RESTART})


def _work(given: argparse.Namespace) -> None:
    from rl_async.agent_loop.gateway.server import serve

    serve(given.run, given.queue, given.reward_model, given.host, given.port)


if __name__ == "__main__":
    sys.exit(main())
