"""The processes of a run, for who looks at it from outside: ``RUN/processes.json``, kept by the supervisor."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_async.errors import UserError
from rl_async.files import replace_file
from rl_async.launcher.plan.spec import ProcessSpec
from rl_async.launcher.supervise.process import Process

FILE = "processes.json"


@dataclass(frozen=True)
class ProcessState:
    """One process as the supervisor sees it. ``state`` is one word, e.g. starting, running, restarting, ended."""

    name: str
    state: str
    restarts: int = 0


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process as its supervisor knows it; ``RUN/processes.json`` has all of them."""

    name: str
    role: str
    pid: int
    started: int  # of /proc/PID/stat, so that another process of that number is not taken for it
    state: str  # running, restarting, ended, failed
    restarts: int = 0
    exit: int | None = None  # as Popen.returncode
    host: str = ""  # empty: the launcher's own


class Roster:
    """The newest process of each name."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._started: dict[str, tuple[ProcessSpec, Process]] = {}

    def add(self, spec: ProcessSpec, child: Process) -> None:
        """A process was started."""
        self._started[spec.name] = (spec, child)

    def write(self, states: Mapping[str, ProcessState]) -> None:
        """Replace the file in one step."""
        records = []
        for name, (spec, child) in self._started.items():
            alone = "running" if child.returncode is None else "ended"  # of one that nobody keeps: the preparation
            known = states.get(name, ProcessState(name, alone))
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


def read_roster(run: Path) -> list[ProcessRecord]:
    """Every process that the run started, its newest start each. Raises UserError if it never started any."""
    try:
        return msgspec.json.decode((run / FILE).read_bytes(), type=list[ProcessRecord])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{run} is not the folder of a run that was started: {error}") from error
