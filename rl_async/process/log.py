"""The log format of all processes; the supervisor redirects each process into its own file."""

import logging
import sys


def setup_logging(role: str, level: int = logging.INFO) -> logging.Logger:
    """Log to standard error as ``time role level message`` and return the role's logger."""
    logging.basicConfig(
        stream=sys.stderr, level=level, format=f"%(asctime)s {role} %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    for noisy in ("httpx", "urllib3", "filelock", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(f"rl_async.{role}")
