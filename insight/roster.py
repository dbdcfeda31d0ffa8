"""The states of a run's processes, as ``RUN/processes.json`` shows them to other programs.

The launcher writes the file (``launcher/child_process.py``) with the newest process of each name; the run's timeline
keeps the earlier ones.
"""

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl_async.errors import EXIT_SIGNAL, EXIT_STOPPED, UserError
from rl_async.files import DAMAGE

ROSTER_FILE = "processes.json"
# ``rl_async.process.role`` sets the format of log lines, the last alternative.
_ERROR = re.compile(r"error: |Fatal Python error|\S+ \S+ (ERROR|CRITICAL) ")


@dataclass(frozen=True)
class ProcessState:
    """The state of a process: waiting, starting, running, restarting, ended or failed, ``since`` a Unix time."""

    name: str
    state: str
    restarts: int = 0
    since: float = field(default=0.0, compare=False)


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``RUN/processes.json``, with a state of ``ProcessState``.

    ``started`` is the start time in /proc/PID/stat, which exposes a reused pid. ``exit`` is that of
    ``Popen.returncode``. An empty ``host`` is the launcher's own.
    """

    name: str
    role: str
    pid: int
    started: int
    state: str
    restarts: int = 0
    exit: int | None = None
    host: str = ""


def read_roster(run: Path) -> list[ProcessRecord]:
    """Return the newest start of every process of the run. Raises UserError if it never started any."""
    try:
        return msgspec.json.decode((run / ROSTER_FILE).read_bytes(), type=list[ProcessRecord])
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{run} is not the folder of a run that was started: {error}") from error


def describe_exit(code: int) -> str:
    """Describe an exit code, naming the signal that caused it."""
    if code in EXIT_STOPPED:
        return f"exit code {code}: asked to stop by {signal.Signals(code - EXIT_SIGNAL).name}"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def said_last(output: str) -> str:
    """Return the line of the last error in a process's output or, without an error, its last line that is not empty."""
    last = error = ""
    traceback = False
    for line in output.splitlines():
        last = line if line.strip() else last
        if traceback and line and not line[0].isspace():
            error, traceback = line, False
        elif line.startswith("Traceback (most recent call last)"):
            traceback = True
        elif _ERROR.match(line):
            error = line
    return error or last
