"""Reads a process's state from Linux's ``/proc``; on other systems every process looks gone.

psutil is not used: it has no caught signals and no wait channel, and its start times change with the wall clock, while
the ticks since the boot that ``processes.json`` holds identify a process exactly.
"""

import os
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
    """Read the current state of a process; GONE if there is none."""
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
    """Return the kernel function in which the main thread sleeps; empty if it runs or is hidden."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""
