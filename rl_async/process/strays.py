"""Ends processes whose keeper was killed before it could end them, found by a variable in their environment."""

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("rl_async.process")

GONE_S = 10.0


def kill_marked(variable: str, value: str, within_s: float = GONE_S) -> None:
    """Kill all processes that were started with this variable, until there are none; log those that do not end in time.

    One that waits for a disk or a device ends when that answers. One that was started without what it should inherit
    escapes.
    """
    marked = f"{variable}={value}".encode()
    deadline = time.monotonic() + within_s
    while pids := [pid for pid in _others() if marked in _environment(pid)]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            log.warning("processes did not end within %g s of being killed: %s", within_s, ", ".join(map(str, pids)))
            return
        time.sleep(0.01)


def _others() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _environment(pid: int) -> list[bytes]:
    """Return a process's variables as it was started with them; none for one that has ended or is another user's."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    return []
