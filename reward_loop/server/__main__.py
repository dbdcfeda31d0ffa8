"""The reward model's process: ``python -m rl_async.reward_loop.server --model PATH --port P``.

The variable RL_ASYNC_TOKEN_FILE names the file with the token that every request must carry.
"""

import argparse
import sys

from rl_async.process.role import role_parser, run_role


def main() -> int:
    """Serve until SIGTERM; the exit code."""
    parser = role_parser("reward_loop.server", __doc__)
    parser.add_argument("--model", required=True, help="folder of a sequence classifier with one label")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--batch-size", type=int, default=32, help="conversations per forward pass")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on CPU")
    arguments = parser.parse_args()
    return run_role("reward-model", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    from rl_async.reward_loop.server.app import serve

    serve(arguments)


if __name__ == "__main__":
    sys.exit(main())
