"""Fork vLLM's servers from a process that has imported vLLM, which takes each 10 s of processor time.

That process starts with the first of them, is run by vLLM's Python, and ends with the tests. A server that was forked
has its command line and may hold what ends with it: tests that look at a server, or kill it, start one of their own.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PARENTS: dict[str, socket.socket] = {}
FORKING = {"PYTHONPATH": str(Path(__file__).parent / "vllm_forked")}


class ForkedVllm:
    """``command``, which is ``python -P -m module arguments``, leading a session of its own.

    It has the part of ``subprocess.Popen`` that tests use. Only ``pass_fd`` stays open, under another number, which the
    variable ``fd_variable`` gets.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, fd_variable: str, pass_fd: int
    ) -> None:
        python = command[0]
        if python not in PARENTS:
            PARENTS[python] = _start(python, environment)
        asked = PARENTS[python]
        order = {"argv": command[3:], "environment": dict(environment), "fd_variable": fd_variable}
        with log.open("wb") as output:
            socket.send_fds(asked, [json.dumps(order).encode()], [output.fileno(), pass_fd])
        self.pid = int(asked.recv(32))
        self._handle = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """None while it runs. Its exit code is its parent's to know."""
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def terminate(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, signal.SIGTERM)

    def wait(self, timeout: float) -> int:
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("vLLM", timeout)
        return 0


def _start(python: str, environment: Mapping[str, str]) -> socket.socket:
    """Start the process that forks, with the first server's environment; the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([python, "-P", __file__], stdin=theirs.fileno(), env=environment)
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _serve() -> None:
    """Fork a server for each order that comes, until the tests close their end."""
    from rl_async.rollout_server.vllm.__main__ import VARIABLES

    os.environ.update(VARIABLES)
    import vllm.entrypoints.openai.api_server  # type: ignore[import-not-found]
    import vllm.v1.engine.core  # type: ignore[import-not-found]
    import vllm.v1.worker.cpu_worker  # type: ignore[import-not-found]  # noqa: F401

    # Children leave no zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    asked = socket.socket(fileno=0)
    while True:
        order, fds, _, _ = socket.recv_fds(asked, 1 << 20, 2)
        if not order:
            return
        if (pid := os.fork()) == 0:
            break
        for fd in fds:
            os.close(fd)
        asked.send(str(pid).encode())
    _become(json.loads(order), *fds)


def _become(order: dict[str, object], log: int, passed: int) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(order["environment"] | {order["fd_variable"]: str(passed)})
    module, *sys.argv[1:] = order["argv"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve()
