"""What is there besides what was there before: processes, mounts, Unix sockets, temporary files, shared memory.

In namespaces of its own (``host/isolation.py``) a chaos run sees no one else's, so all of it is the run's.
"""

import getpass
import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple, Self

from rl_async.process.kernel import ENDED, read_stat
from rl_async.process.private_folder import private_folder

FOLDERS = (Path("/tmp"), Path("/dev/shm"))
OURS = private_folder(Path()).parent  # stays, for the runs of this user, whose folders in it do not
TORCH = f"file /tmp/torchinductor_{getpass.getuser()}"  # the cache of PyTorch's compiler
GONE_S = 60.0  # within which what was killed, or told to end, has gone


class Process(NamedTuple):
    """A process that runs. ``started``: ticks since the boot, which with the pid identify it."""

    pid: int
    started: int
    parent: int
    name: str
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}): {' '.join(self.argv)[:200]}"


def processes() -> list[Process]:
    """Return the processes of this namespace that run."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            before, _, fields = Path("/proc", name, "stat").read_text().rpartition(")")
            argv = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        state, parent, started = (fields.split()[place] for place in (0, 1, 19))
        if state not in ENDED:
            found.append(Process(int(name), int(started), int(parent), before.partition("(")[2], tuple(argv)))
    return found


class Seen(NamedTuple):
    """What there is at one moment, each as a line that names it."""

    processes: frozenset[Process]
    others: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        mounts = {f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        sockets = {f"socket {words[7]}" for words in lines if len(words) == 8}
        files = {f"file {path}" for folder in FOLDERS for path in folder.iterdir() if path != OURS}
        files |= {f"file {path}" for path in (OURS.iterdir() if OURS.exists() else ())}
        return cls(frozenset(processes()), frozenset((mounts | sockets | files) - {TORCH}))


def left_behind(before: Seen, within_s: float = GONE_S) -> list[str]:
    """Return what is there now and was not before, once so long has passed; nothing, as soon as there is nothing."""
    deadline = time.monotonic() + within_s
    while True:
        now = Seen.now()
        known = {(process.pid, process.started) for process in before.processes}
        new = [process for process in now.processes if (process.pid, process.started) not in known]
        found = [str(process) for process in new] + sorted(now.others - before.others)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def kill(process: Process) -> bool:
    """Kill it, if it still runs."""
    if read_stat(process.pid).started != process.started:
        return False
    try:
        os.kill(process.pid, 9)
    except ProcessLookupError:
        return False
    return True


def own_temporary_folders(kept: list[Path], aside: Path) -> None:
    """Mount empty folders over FOLDERS for this mount namespace; ``kept``: what stays to be seen in them.

    ``aside``: an empty folder elsewhere.
    """
    inside = {aside / str(n): path for n, path in enumerate(kept) if any(map(path.is_relative_to, FOLDERS))}
    for place, path in inside.items():
        place.mkdir()
        _mount("--bind", path, place)
    for folder in FOLDERS:
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder)
    for place, path in inside.items():
        path.mkdir(parents=True, exist_ok=True)  # one may be in another
        _mount("--bind", place, path)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)
