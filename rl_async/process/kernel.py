"""What Linux says about a process in ``/proc``. Elsewhere every process looks gone."""

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

GONE = "gone"
AFAR = "afar"
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
    AFAR: "is on another machine",
}
HALTED = ("T", "t")
ENDED = ("Z", "X", GONE)


class ProcStat(msgspec.Struct, frozen=True):
    """Of ``/proc/PID/stat``: the state's letter, and in clock ticks the CPU time used and the start since the boot."""

    state: str = GONE
    cpu_ticks: int = 0
    started: int = 0


def read_stat(pid: int) -> ProcStat:
    """The process as it is now; state ``gone`` if there is none."""
    with suppress(FileNotFoundError, ProcessLookupError):
        # The name stands in brackets and may hold anything; fields are counted from the last one on (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return ProcStat(fields[0], int(fields[11]) + int(fields[12]), int(fields[19]))
    return ProcStat()


def state_of(pid: int) -> str:
    """One letter as in ``ps``, or ``gone``."""
    return read_stat(pid).state


def age_s(stat: ProcStat) -> float:
    """Seconds since the process was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started / os.sysconf("SC_CLK_TCK")


def describe(state: str) -> str:
    """The state as a verb."""
    return MEANING.get(state, f"is in state {state}")


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process has a handler for the signal; without one it may be killed by it."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def waits_in(pid: int) -> str:
    """The kernel function that the main thread sleeps in; empty if it runs, or if the kernel does not tell."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
        return "" if name == "0" else name
    return ""
