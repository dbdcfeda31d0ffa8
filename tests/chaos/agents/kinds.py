"""The kinds of runs, the processes that a round may kill in each, and the leftovers of a finished run.

Left behind may be processes, mounts, Unix sockets, temporary files and shared memory.

In namespaces of its own (``host/isolation.py``) a chaos run sees no one else's, so all of it is the run's.

To add a kind: an entry in KINDS with its settings, and in VICTIMS what its processes look like.
"""

import getpass
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from rl_async.agent_loop.environments.host_pool import MODULE as HOST
from rl_async.process import guard
from rl_async.process.private_folder import private_folder
from rl_async.process.run_files import ENDED, read_stat

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


ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
TASKS = "artifacts/calculator/tasks.jsonl"  # where the preset's other files are made
USER_CODE, PROGRAM = HERE / "user_code.py", HERE / "program.py"
SERVER = ROOT / "examples" / "mcp_calculator.py"
# A server that leaves a process behind, in a session of its own, before it becomes the server. (Not by bash, which
# reads ~/.bashrc where its input is a socket, and whatever that starts is killed in the middle, too.)
START_SERVER = f"[sh, -c, 'setsid sleep 600 <&- >&- 2>&- & exec \"$@\"', sh, {sys.executable}, {SERVER}"

Processes = dict[int, Process]
IsVictim = Callable[[Process, Processes], bool]


class Kind(NamedTuple):
    """``played``: by agent programs, with ``rl-async play``. ``victims``: whom rounds kill, each as often."""

    settings: tuple[str, ...]
    victims: tuple[str, ...]
    played: bool = False


def _module(name: str) -> IsVictim:
    return lambda process, _: process.argv[1:4] == ("-P", "-m", name)


def _kept(by: str, *, last: str = "") -> IsVictim:
    """What a keeper or guard of ours started; ``last``: within its last argument."""

    def kept(process: Process, everyone: Processes) -> bool:
        parent = everyone.get(process.parent)
        return parent is not None and by in parent.argv and last in process.argv[-1:][0] and process.name != "sleep"

    return kept


def _in_sandbox(process: Process, everyone: Processes) -> bool:
    parent = everyone.get(process.parent)
    return parent is not None and _first_of_sandbox(parent, everyone)


def _first_of_sandbox(process: Process, _: Processes) -> bool:
    return process.name != "bwrap" and process.argv[1:4] == ("-I", "-S", "/inside.py")


def _guarded(server: Callable[[Process], bool]) -> IsVictim:
    """The guard of such a server."""
    return lambda process, _: guard.__file__ in process.argv and server(process)


def _of_host(process: Process, everyone: Processes) -> bool:
    parent = everyone.get(process.parent)
    return parent is not None and VICTIMS["environment host"](parent, everyone)


VICTIMS: dict[str, IsVictim] = {
    "agent worker": _module("rl_async.agent_loop"),
    "gateway": _module("rl_async.agent_loop.gateway"),
    "MCP server of a worker": _kept(guard.__file__, last="shared"),
    "MCP server of an episode": _kept(guard.__file__, last="own"),
    "guard of an MCP server": _guarded(lambda process: f"rl_async.{HOST}" not in process.argv),
    "environment host": _module(f"rl_async.{HOST}"),
    "guard of an environment host": _guarded(lambda process: f"rl_async.{HOST}" in process.argv),
    "container of an environment": _of_host,
    "sandbox": lambda process, _: process.name == "bwrap",
    "first process of a sandbox": _first_of_sandbox,
    "program in a sandbox": _in_sandbox,
    "agent program": _kept(guard.KEEP),
    "keeper of an agent program": lambda process, _: guard.KEEP in process.argv,
    "rl-async play": lambda process, _: process.argv[1:4] == ("-m", "rl_async.launcher.cli", "play"),
}
LOOP = f"agent.loop={USER_CODE}:play"
WORKERS = (LOOP, f"data.path={TASKS}", "agent.workers=2", "agent.concurrency=4")
KINDS = {
    "mcp": Kind(
        (
            *WORKERS,
            "agent.tools=[]",
            f"agent.mcp=[{{command: {START_SERVER}, shared], scope: worker, name: shared}}, "
            f"{{command: {START_SERVER}, '{{workspace}}/own'], scope: episode, name: own}}]",
        ),
        ("MCP server of a worker", "MCP server of an episode", "guard of an MCP server", "agent worker"),
    ),
    "environments": Kind(
        (
            *WORKERS,
            "agent.tools=[]",
            f"agent.environment={USER_CODE}:InContainer",
            "agent.environment_hosts={ready: 2, processes: 2}",
            "reward.functions=[{name: environment}]",
        ),
        ("environment host", "guard of an environment host", "container of an environment", "agent worker"),
    ),
    "sandbox": Kind(
        (*WORKERS, "agent.tools=[python, bash]"),
        ("sandbox", "first process of a sandbox", "program in a sandbox", "agent worker"),
    ),
    "gateway": Kind(
        ("agent.gateway={idle_timeout_s: 5}",),
        ("agent program", "keeper of an agent program", "rl-async play", "gateway"),
        played=True,
    ),
}


def victims(role: str, running: list[Process]) -> list[Process]:
    """Return the processes of a role."""
    everyone = {process.pid: process for process in running}
    return [process for process in running if process.argv and VICTIMS[role](process, everyone)]
