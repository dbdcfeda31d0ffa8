"""Runs a server for an agent worker, an MCP server or an environment host, and ends all its processes with the worker:
``python guard.py WORKER_PID FOLDER COMMAND...``.

The server inherits the pipes of this process, which reads and writes nothing itself. When the worker dies for any
reason, the kernel sends this process a signal; it then kills the server and all processes that the server started, even
outside its process group, and deletes FOLDER, which it made. It needs the standard library alone, so that it starts in
milliseconds (``python -I -S``).
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

# From prctl(2).
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END, CHILD = signal.SIGTERM, signal.SIGCHLD
# As in shells.
CANNOT_START = 127
# Killed processes have ended within this.
GONE_S = 10.0


def main() -> int:
    """Run the server until it ends or this process is asked to; return the server's exit code."""
    worker, folder, *command = sys.argv[1:]
    libc = ctypes.CDLL(None)
    # Orphans of the server become children of this process.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {END, CHILD})
    libc.prctl(PR_SET_PDEATHSIG, END)
    if os.getppid() != int(worker):
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


if __name__ == "__main__":
    sys.exit(main())
