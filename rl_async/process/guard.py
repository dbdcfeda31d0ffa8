"""Runs a server or an agent program, and leaves neither a process nor a file of it behind.

``python guard.py WORKER_PID FOLDER COMMAND...`` runs an MCP server or an environment host for an agent worker. The
server inherits the pipes of this process, which reads and writes nothing itself. When the worker dies for any reason,
the kernel sends this process a signal; it then kills the server and all processes that the server started, even outside
its process group, and deletes FOLDER, which it made.

``python guard.py --keep LIFELINE STATUS FOLDER PROGRAM...``, with two file descriptors, keeps an agent program of
``rl-async play``. It makes FOLDER and runs the program in FOLDER/workspace, in its own session; FOLDER/home may serve
as its HOME. It writes the exit code to STATUS once every process that the program had started is gone. When LIFELINE
ends, because ``play`` closed it or died, it kills the remaining processes, removes FOLDER and exits.

It needs the standard library alone, so that it starts in milliseconds (``python -I -S``).
"""

import ctypes
import errno
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

KEEP = "--keep"

# From prctl(2).
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END, CHILD = signal.SIGTERM, signal.SIGCHLD
# As in shells.
CANNOT_START = 127
# Killed processes have ended within this.
GONE_S = 10.0


def main() -> int:
    """Run what the arguments name until it ends or this process is asked to; return the exit code."""
    if sys.argv[1] == KEEP:
        lifeline, status, folder, *program = sys.argv[2:]
        return keep(int(lifeline), int(status), Path(folder), program)
    worker, folder, *command = sys.argv[1:]
    return serve(int(worker), Path(folder), command)


def serve(worker: int, folder: Path, command: list[str]) -> int:
    """Run a server of the process ``worker``; return the server's exit code."""
    libc = ctypes.CDLL(None)
    # Orphans of the server become children of this process.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {END, CHILD})
    libc.prctl(PR_SET_PDEATHSIG, END)
    if os.getppid() != worker:
        return CANNOT_START
    os.mkdir(folder, 0o700)

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    try:
        server = subprocess.Popen(command, preexec_fn=in_child)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return CANNOT_START
    finally:
        # The server alone holds these streams, so that its end closes them.
        for stream in (0, 1):
            os.close(stream)
    try:
        while signal.sigwait({END, CHILD}) == CHILD:
            code = reap(server.pid)
            if code is not None:
                return code
        return 128 + END
    finally:
        try:
            kill_all()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def reap(server: int) -> int | None:
    """Collect the children that have ended; return the server's exit code if it is one of them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == server:
                found = os.waitstatus_to_exitcode(status) % 256
    return found


def kill_all(within_s: float = GONE_S) -> None:
    """Kill the children of this process until there are none: what a killed one leaves behind becomes a child.

    Raises TimeoutError for those that do not end in time, such as one that waits for a disk.
    """
    deadline = time.monotonic() + within_s
    while pids := children():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes did not end within {within_s:g} s of being killed: {pids}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        reap(0)


def children() -> list[int]:
    """Return the pids of the children of this process, by the parents in ``/proc/PID/stat``."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            # The process may have ended.
            with suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(entry))
    return found


def keep(lifeline: int, status: int, folder: Path, program: list[str]) -> int:
    """Run an agent program until it or the lifeline ends, and report its exit code."""
    # Only the lifeline ends the keeper. The program does not inherit a handler, as it would SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None, use_errno=True)
    # Descendants whose parents have ended become children of the keeper.
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    os.mkdir(folder, 0o700)
    try:
        code = _run(program, folder / "workspace", lifeline, lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
        kill_all()
        # `play` may have stopped waiting.
        with suppress(BrokenPipeError):
            os.write(status, b"%d\n" % code)
        os.close(status)
        while os.read(lifeline, 1):
            pass
    finally:
        try:
            kill_all()
        finally:
            remove(folder)
    return 0


def _run(program: list[str], workspace: Path, lifeline: int, die_with_keeper: Callable[[], Any]) -> int:
    """Run the program until it or the lifeline ends; return its exit code, negative for a signal."""
    try:
        workspace.mkdir()
        (workspace.parent / "home").mkdir()
        started = subprocess.Popen(
            program, cwd=workspace, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_keeper
        )
    except OSError as error:
        os.write(2, f"cannot start {program[0]}: {error.strerror}\n".encode())
        return CANNOT_START
    finally:
        # From here on, only the program's own processes hold the pipes of its output open.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    ended = os.pidfd_open(started.pid)
    select.select([ended, lifeline], [], [])
    if started.poll() is None:
        os.killpg(started.pid, signal.SIGKILL)
    return started.wait()


def remove(folder: Path) -> None:
    """Remove the folder and read-only files in it. Raises OSError, for example if a link has replaced the folder."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no folder any more", str(folder))
    os.chmod(folder, 0o700)
    for place, names, _ in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
