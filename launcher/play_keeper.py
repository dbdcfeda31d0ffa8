"""Keeps one agent program: starts it, reports its exit code, and leaves neither a process nor a file of it behind.

``python -I -S play_keeper.py LIFELINE STATUS FOLDER PROGRAM...`` where LIFELINE and STATUS are file descriptors. The
keeper makes FOLDER and runs the program in FOLDER/workspace, in its own session; FOLDER/home may serve as its HOME. It
writes the exit code to STATUS once every process that the program had started is gone. When LIFELINE ends, because
``play`` closed it or died, the keeper kills the remaining processes, removes FOLDER and exits. It imports nothing but
the standard library, and so starts in milliseconds."""

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

# Options of prctl.
SUBREAPER, DEATH_SIGNAL = 36, 1
# The exit code that shells use.
CANNOT_START = 127
# Killed processes must end within this time.
GONE_S = 10.0


def main() -> int:
    lifeline, status, folder, program = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    # Only the lifeline ends the keeper. The program does not inherit a handler, as it would SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None, use_errno=True)
    # Descendants whose parents have ended become children of the keeper.
    if libc.prctl(SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    os.mkdir(folder, 0o700)
    try:
        code = _run(program, folder / "workspace", lifeline, lambda: libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))
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


def kill_all(within_s: float = GONE_S) -> None:
    """Kill every descendant: children of a killed process become the keeper's own, until none is left.

    Raises TimeoutError for processes that do not end in time, such as one that waits for a disk.
    """
    deadline = time.monotonic() + within_s
    while pids := _children():
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes did not end within {within_s:g} s of being killed: {pids}")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue
        time.sleep(0.002)


def _children() -> list[int]:
    """Return the ids of this process's children."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # The process's name, in parentheses, may contain anything, so fields are counted from its end.
            parent = int(fields.rpartition(b")")[2].split()[1])
            if parent == os.getpid():
                found.append(int(name))
    return found


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
