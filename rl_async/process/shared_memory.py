"""Names of shared memory segments, by which whoever starts a process removes those that it left.

A segment outlives its process. Python's resource tracker unlinks what a killed process left, unless it is killed with
it, as a supervisor does to a whole process group.
"""

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

PREFIX = "RL_ASYNC_SHARED_MEMORY"
SEGMENTS = Path("/dev/shm")  # on Linux


def prefix_for(file: Path) -> str:
    """Return the prefix for the segments of the process whose own file this is, the same at each of its starts."""
    return f"rl-async-{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:12]}-"


def segment_name() -> str:
    """Return a new name, with the prefix that this process was started with."""
    return f"{os.environ.get(PREFIX, 'rl-async-')}{secrets.token_hex(4)}"


def sweep(prefix: str) -> None:
    """Unlink this user's segments with this prefix, whose process must have ended; mappings of them stay."""
    for segment in SEGMENTS.glob(f"{prefix}*"):
        with suppress(FileNotFoundError):  # the resource tracker was faster
            if segment.lstat().st_uid == os.getuid():
                segment.unlink()
