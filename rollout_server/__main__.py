"""The embedded engine's process: ``python -m rl_async.rollout_server --run RUN --index I --port P``."""

import argparse
import sys

from rl_async.process.allocation import importing
from rl_async.process.role import add_run, role_parser, run_role


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    parser = role_parser("rollout_server", __doc__)
    add_run(parser)
    parser.add_argument("--index", type=int, default=0, help="number of this engine in the run")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--cache-bytes", type=int, help="memory for keys and values (default: rollout.cache_bytes; on a CPU 1 GiB)"
    )
    parser.add_argument(
        "--decode",
        choices=("eager", "static"),
        help="static: steps of fixed shapes, captured as CUDA graphs on CUDA (default there; elsewhere eager)",
    )
    arguments = parser.parse_args()
    return run_role(f"engine-{arguments.index}", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    with importing():
        from rl_async.rollout_server.embedded.server import serve

    serve(arguments.run, arguments.index, arguments.host, arguments.port, arguments.cache_bytes, arguments.decode)


if __name__ == "__main__":
    sys.exit(main())
