"""The embedded engine's process: ``python -m rl_async.rollout_server --run RUN --index I --port P``."""

import argparse
import signal
import sys
from pathlib import Path

from rl_async.errors import UserError
from rl_async.process.lifeline import watch_lifeline
from rl_async.process.log import setup_logging
from rl_async.process.stacks import answer_with_stacks


def main() -> None:
    """Serve until SIGTERM."""
    watch_lifeline()
    answer_with_stacks()
    parser = argparse.ArgumentParser(prog="python -m rl_async.rollout_server", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run folder with config.yaml")
    parser.add_argument("--index", type=int, default=0, help="number of this engine in the run")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only; there is no access control")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    setup_logging(f"engine-{arguments.index}")
    # Exit also while the model loads; uvicorn takes the signal over while it serves, and raises it again at its end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from rl_async.rollout_server.embedded.process import serve  # imports torch, which --help must not

    try:
        serve(arguments.run, arguments.index, arguments.host, arguments.port)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
