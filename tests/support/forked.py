"""Python processes forked from one that has imported torch and Transformers, which each would take seconds to import.

The process that they are forked from begins with the first of them and ends with the tests' own. It has one thread, no
group and no model, and has drawn nothing: what is forked differs from a new process by its imports alone.
"""

import atexit
import functools
import itertools
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from benchmarks.processes.ranks import free_ports

ROOT = Path(__file__).parents[2]
IMPORTED = [
    *("transformers.models.qwen3.modeling_qwen3", "aiohttp.web", "tests.conftest"),
    *("rl_async.trainer.step.models", "rl_async.trainer.train", "rl_async.weight_sync.coordinator"),
    *("rl_async.rollout_server.connect", "rl_async.transfer_queue.client.async_client"),
]
NUMBERS = itertools.count()
TOLD = 3000  # characters of a failed rank's last words


class Forked:
    """``python -m module arguments`` in ``cwd``, with what tests use of ``subprocess.Popen``."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> None:
        self._log = _folder() / str(next(NUMBERS))
        target = (module, arguments, dict(environment or {}), cwd, self._log)
        self._process = _context().Process(target=_become, args=target, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, -n if signal n ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout, *self._said())
        return self.returncode

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """What it has said on standard output and error when it has ended."""
        self.wait(timeout)
        return self._said()

    def first_line(self, timeout_s: float = 60.0) -> str:
        """Of its standard output, as soon as it is there."""
        deadline = time.monotonic() + timeout_s
        while "\n" not in (said := self._said()[0]):
            assert self.returncode is None and time.monotonic() < deadline, self._said()[1][-TOLD:]
            time.sleep(0.01)
        return said.partition("\n")[0]

    def _said(self) -> tuple[str, str]:
        out, errors = (file.read_text() if file.exists() else "" for file in _files(self._log))
        return out, errors


def start_ranks(module: str, *arguments: str, ranks: int, environment: Mapping[str, str] | None = None) -> list[Forked]:
    """``module`` as the ranks of one group, of one thread each."""
    (port,) = free_ports(1)
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared = group | dict(environment or {})
    return [Forked(module, *arguments, environment=shared | {"RANK": str(rank)}) for rank in range(ranks)]


def run_ranks(module: str, *arguments: str, ranks: int, timeout_s: float = 280.0) -> list[str]:
    """The same until they have ended, which they must do well; returns what each printed."""
    processes = start_ranks(module, *arguments, ranks=ranks)
    try:
        told = [process.communicate(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, f"{module} ended with {codes}:\n" + "\n".join(errors[-TOLD:] for _, errors in told)
    return [out for out, _ in told]


@functools.cache
def _folder() -> Path:
    """Where the processes' words are."""
    path = tempfile.mkdtemp(prefix="forked-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def _context() -> ForkServerContext:
    """A server runs; it was started without threads of OpenMP, which would be missing in what is forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    forkserver.ensure_running()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    return context


def _files(log: Path) -> tuple[Path, Path]:
    return log.with_suffix(".out"), log.with_suffix(".err")


def _become(module: str, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, log: Path) -> None:
    """In the new process: its output into files, and then the module."""
    for number, file in enumerate(_files(log), start=1):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), number)
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
