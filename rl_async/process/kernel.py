"""Processes as Linux's ``/proc`` shows them: their state, and those whose keeper was killed before it ended them.

On other systems every process looks gone. psutil is not used: it has no caught signals and no wait channel, and its
start times change with the wall clock, while the ticks since the boot that ``processes.json`` holds identify a process
exactly. Strays are found by a variable in their environment.
"""

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import msgspec

GONE = "gone"
REMOTE = "remote"
MEANING = {
    "R": "is running",
    "S": "sleeps",
    "D": "waits for a disk or a device",
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "I": "is idle",
    GONE: "is gone",
    REMOTE: "is on another machine",
}
HALTED = ("T", "t")
ENDED = ("Z", "X", GONE)


class ProcStat(msgspec.Struct, frozen=True):
    """Fields of ``/proc/PID/stat``: the state's letter, and in clock ticks CPU time and start since the boot."""

    state: str = GONE
    cpu_ticks: int = 0
    started: int = 0


def read_stat(pid: int) -> ProcStat:
    """Read the current state of a process; GONE if it does not exist."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # The name is in brackets and may contain anything; fields are counted after the last bracket (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ProcStat(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))
    return ProcStat()


def state_of(pid: int) -> str:
    """Return the state as one letter, as in ``ps``, or GONE."""
    return read_stat(pid).state


def age_s(stat: ProcStat) -> float:
    """Return the seconds since the process was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / os.sysconf("SC_CLK_TCK")


def describe(state: str) -> str:
    """Render a state as a verb phrase."""
    return MEANING.get(state, f"is in state {state}")


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process handles the signal; without a handler the signal may kill it."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def waits_in(pid: int) -> str:
    """Return the kernel function that the main thread sleeps in; empty if it runs or is hidden."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""


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
