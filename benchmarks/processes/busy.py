"""A process that keeps one core busy, as a neighbour on a shared machine does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep one core busy while the block runs."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
