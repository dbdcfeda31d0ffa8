"""Processes that meet as the ranks of one group, for benchmarks and tests."""

import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOLD = 3000  # characters of a failed rank's last words


def free_ports(count: int) -> list[str]:
    """Ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(probe.getsockname()[1]) for probe in probes]


def run_ranks(
    command: Sequence[str], ranks: int, *, timeout_s: float, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Run ``command`` as this many processes of one thread, in the checkout's root; returns what each printed.

    Raises RuntimeError with its last words if one fails, and subprocess.TimeoutExpired.
    """
    (port,) = free_ports(1)
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared = os.environ | group | (environment or {})
    with ExitStack() as stack:
        files = [
            tuple(stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ("stdout", "stderr")) for _ in range(ranks)
        ]
        processes = [
            subprocess.Popen(command, env=shared | {"RANK": str(rank)}, cwd=ROOT, stdout=out, stderr=err)
            for rank, (out, err) in enumerate(files)
        ]
        try:
            for process in processes:
                process.wait(timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        printed = []
        for rank, (process, (out, err)) in enumerate(zip(processes, files, strict=True)):
            for file in (out, err):
                file.seek(0)
            if process.returncode != 0:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}:\n{err.read()[-TOLD:]}")
            printed.append(out.read())
        return printed
