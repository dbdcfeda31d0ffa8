"""Fork Python processes from a server that has imported torch and Transformers, which takes each process seconds.

The server starts with the first fork and ends with the tests; the workers of pytest-xdist come from it and share it. It
has one thread, no process group and no model, and has drawn no random number, so a forked process differs from a new
one only by what is imported.
"""

import atexit
import functools
import importlib
import importlib.util
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from rl_async.process.private_folder import RENDEZVOUS
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
IMPORTED = [
    *("transformers.models.qwen3.modeling_qwen3", "transformers.tokenization_utils_tokenizers", "aiohttp.web"),
    *("tests.conftest", "rl_async.trainer.actor_critic", "rl_async.trainer.train", "rl_async.weight_sync.coordinator"),
    *("rl_async.rollout_server.pool", "rl_async.transfer_queue.client"),
    *("rl_async.launcher.runs.launch", "rl_async.launcher.runs.finetune"),
    *(["rl_async.trainer.megatron.backend"] if importlib.util.find_spec("megatron") else []),
]
NUMBERS = itertools.count()
SHOWN = 3000  # characters of a failed rank's output in the assertion's message


class Forked:
    """``python -m module arguments`` in ``cwd``, or ``module:function``, which is called with the arguments.

    It has the part of ``subprocess.Popen`` that tests use.
    ``parent``: it may fork processes itself; whoever starts it must see that it ends, or the tests never do.
    ``log``: the file of its output and errors together. ``session``: it leads a session, and so a group, of its own.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        parent: bool = False,
        log: Path | None = None,
        session: bool = False,
    ) -> None:
        own = _folder() / str(next(NUMBERS))
        self._files = (log, log) if log else (own.with_suffix(".out"), own.with_suffix(".err"))
        arguments_of_target = (module, arguments, dict(environment or {}), cwd, self._files, session)
        self._process = fork(become, *arguments_of_target, daemon=not parent)
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

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout, *self._output())
        return self.returncode

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """Wait for its end; its standard output and error."""
        self.wait(timeout)
        return self._output()

    def first_line(self, timeout_s: float = 60.0) -> str:
        """The first line of its standard output, as soon as it is complete."""
        deadline = time.monotonic() + timeout_s
        while "\n" not in (output := self._output()[0]):
            assert self.returncode is None and time.monotonic() < deadline, self._output()[1][-SHOWN:]
            time.sleep(0.01)
        return output.partition("\n")[0]

    def _output(self) -> tuple[str, str]:
        out, errors = (file.read_text() if file.exists() else "" for file in self._files)
        return out, errors


def start_ranks(
    module: str,
    *arguments: str,
    ranks: int,
    environment: Mapping[str, str] | None = None,
    logs: Path | None = None,
) -> list[Forked]:
    """Fork ``module`` once per rank of one process group, each with one thread; they meet as a launcher's do.

    ``logs``: the folder for ``rank-0.log`` and so on, which what the ranks say is appended to.
    """
    port, file = str(free_port()), tempfile.mkdtemp(prefix="ranks-", dir=_folder()) + "/meet"
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared = group | {RENDEZVOUS: file} | dict(environment or {})
    files = [logs / f"rank-{rank}.log" if logs else None for rank in range(ranks)]
    return [
        Forked(module, *arguments, environment=shared | {"RANK": str(rank)}, log=log) for rank, log in enumerate(files)
    ]


@contextmanager
def joined() -> Iterator[None]:
    """Compute with one thread as one of the ranks that ``start_ranks`` forked, which meet over gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def run_ranks(module: str, *arguments: str, ranks: int, timeout_s: float = 280.0) -> list[str]:
    """Fork the ranks and wait until all have exited with 0; the standard output of each."""
    processes = start_ranks(module, *arguments, ranks=ranks)
    try:
        outputs = [process.communicate(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, f"{module} ended with {codes}:\n" + "\n".join(errors[-SHOWN:] for _, errors in outputs)
    return [out for out, _ in outputs]


@functools.cache
def _folder() -> Path:
    """The folder of the processes' output, removed at exit."""
    path = tempfile.mkdtemp(prefix="forked-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def _context() -> ForkServerContext:
    """Start the server, without OpenMP's threads: a fork would not have them. A forked process uses the same server."""
    context = multiprocessing.get_context("forkserver")
    server: Any = vars(forkserver)["_forkserver"]
    if server._forkserver_address is not None and server._forkserver_pid is None:  # known, but not a child of this
        server.ensure_running = lambda: None
        return context
    context.set_forkserver_preload(IMPORTED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    forkserver.ensure_running()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    return context


def fork(target: Callable[..., None], *arguments: Any, daemon: bool = True) -> ForkServerProcess:
    """Call ``target`` in a new process. A daemon is killed with the process that forked it, and may not fork."""
    process = _context().Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


def become(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    output: tuple[Path, Path],
    session: bool = False,
) -> None:
    """Run ``module`` or call ``module:function`` in this process, with its output appended to the files ``output``."""
    if session:
        os.setsid()
    # A tracker of its own, as a new process has: when this one is killed, its segments of shared memory go with it. The
    # inherited tracker ends with the tests, and would call them leaked then.
    vars(resource_tracker)["_resource_tracker"]._fd = None
    for number, file in enumerate(output, start=1):
        with file.open("a") as opened:
            os.dup2(opened.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(environment)
    os.chdir(cwd)
    name, _, function = module.partition(":")
    if function:
        getattr(importlib.import_module(name), function)(*arguments)
        return
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
