"""The states of a run's processes, and the file that shows them to other programs: ``RUN/processes.json``.

The run's timeline keeps the earlier ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_async.errors import UserError
from rl_async.files import DAMAGE, replace_file
from rl_async.launcher.plan.spec import ProcessSpec
from rl_async.launcher.supervise.process import Process, describe_exit
from rl_async.process.run_files import enter

FILE = "processes.json"


@dataclass(frozen=True)
class ProcessState:
    """The state of a process, one word: waiting, starting, running, restarting, ended or failed."""

    name: str
    state: str
    restarts: int = 0


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``RUN/processes.json``."""

    name: str
    role: str
    pid: int
    started: int  # of /proc/PID/stat, so that a reused pid is recognized
    state: str  # running, restarting, ended, failed
    restarts: int = 0
    exit: int | None = None  # as Popen.returncode
    host: str = ""  # empty: the launcher's own


class Roster:
    """Writes ``RUN/processes.json`` with the newest process of each name."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._started: dict[str, tuple[ProcessSpec, Process]] = {}
        self._entered: dict[str, tuple[int, str]] = {}  # pid and state that the timeline has

    def add(self, spec: ProcessSpec, child: Process) -> None:
        """Enter a process that was started, in place of an earlier one of its name."""
        self._started[spec.name] = (spec, child)

    def write(self, states: Mapping[str, ProcessState]) -> None:
        """Replace the file, with the states of the processes that have one."""
        records = []
        for name, (spec, child) in self._started.items():
            unkept = "running" if child.returncode is None else "ended"  # the preparation is not among ``states``
            known = states.get(name, ProcessState(name, unkept))
            records.append(
                ProcessRecord(
                    name=name,
                    role=spec.role,
                    pid=child.pid,
                    started=child.started,
                    host=child.host,
                    state=known.state,
                    restarts=known.restarts,
                    exit=child.returncode,
                )
            )
        replace_file(self._run / FILE, msgspec.json.encode(records) + b"\n")
        for record in records:
            if self._entered.get(record.name) != (record.pid, record.state):
                exited = "" if record.exit is None else f", {describe_exit(record.exit)}"
                enter(self._run, "launcher", record.name, record.state, about=f"pid {record.pid}{exited}")
                self._entered[record.name] = record.pid, record.state


def read_roster(run: Path) -> list[ProcessRecord]:
    """Every process that the run started, its newest start each. Raises UserError if it never started any."""
    try:
        return msgspec.json.decode((run / FILE).read_bytes(), type=list[ProcessRecord])
    except (OSError, *DAMAGE) as error:
        raise UserError(f"{run} is not the folder of a run that was started: {error}") from error
