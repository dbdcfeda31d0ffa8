"""All benchmarks, one after another, each in a process of its own; their figures in one file.

    python -m benchmarks [--json FILE] [--only NAME ...]

Peers are looked for where ``PEERS`` says, and nothing is installed: a benchmark whose peer is missing runs without it,
and the command that makes the peer is printed and written down. The file holds, by benchmark, its figures under their
own names, its exit code and how long it took, and the load of the machine when it began and when it ended: compare
figures only if nothing else ran. All take less than 40 minutes on two idle cores. For a machine whose cores are not
idle, start ``stress-ng --cpu 1`` first.

Not among them, since they take long and say more about learning than about speed: ``growth``, ``low_precision``,
``router_replay``, and the rest of ``real_model``.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

import psutil

from benchmarks.processes.whole_run import INSTALL

TIMEOUT_S = 1800.0  # of one benchmark


class Peer(NamedTuple):
    """Another project that figures compare with: a program, and how to get it."""

    program: str
    install: str

    @property
    def path(self) -> str | None:
        """Where the program is, as benchmarks that work in other folders find it; None if it is missing."""
        found = which(self.program)
        return found and os.path.abspath(found)


class Benchmark(NamedTuple):
    """A module of this folder with its arguments, and its peers by the option that names them (empty: none does)."""

    arguments: Sequence[str] = ()
    peers: Sequence[tuple[str, str]] = ()


PEERS = {
    "TransferQueue": Peer(
        ".venv-transferqueue/bin/python",
        "python3 -m venv .venv-transferqueue && .venv-transferqueue/bin/pip install TransferQueue==0.1.11",
    ),
    "Redis": Peer("redis-server", "apt-get install redis-server (and pip install 'rl-async[redis]')"),
    "vLLM": Peer(".venv-vllm/bin/python", "scripts/install vllm"),
    "TRL": Peer(".venv-trl/bin/python", INSTALL),
}

REAL = ("real_embedded_vs_vllm", "real_mismatch_fp32_max", "real_step_vs_trl")
BENCHMARKS = {
    "transfer_queue": Benchmark(("--groups", "100000"), (("--transferqueue", "TransferQueue"), ("", "Redis"))),
    "weight_sync": Benchmark(),
    "slow_engine": Benchmark(),
    "reshard": Benchmark(),
    "loading": Benchmark(),
    "engines": Benchmark(peers=(("--vllm", "vLLM"),)),
    "trainer": Benchmark(peers=(("--trl", "TRL"),)),
    "overlap": Benchmark(),
    "tails": Benchmark(),
    "algorithms": Benchmark(),
    "batches": Benchmark(),
    "sandbox": Benchmark(),
    "scale": Benchmark(),
    "planned": Benchmark(),
    "view": Benchmark(),
    "startup": Benchmark(),
    "real_model": Benchmark(("--only", *REAL), (("--vllm", "vLLM"), ("--trl", "TRL"))),
}


def load() -> dict[str, float]:
    """The machine's load average over a minute, and the share of its processor time that is used just now."""
    return {"average": psutil.getloadavg()[0], "cores_busy": psutil.cpu_percent(1.0) / 100 * (psutil.cpu_count() or 1)}


def missing(benchmark: Benchmark) -> dict[str, str]:
    """The commands that make the peers that are not there, by peer."""
    return {name: PEERS[name].install for _, name in benchmark.peers if PEERS[name].path is None}


def command(name: str, benchmark: Benchmark, file: Path) -> list[str]:
    """The command line of a benchmark with those of its peers that are there."""
    named = [
        part for option, peer in benchmark.peers if option and (path := PEERS[peer].path) for part in (option, path)
    ]
    return [sys.executable, "-m", f"benchmarks.{name}", *benchmark.arguments, *named, "--json", str(file)]


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a benchmark with the processes that it started, if it is still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(name: str, benchmark: Benchmark) -> dict[str, Any]:
    """Run one benchmark; what it found, or none, and in which circumstances."""
    lacking = missing(benchmark)
    for peer, install in lacking.items():
        print(f"{name}: no {PEERS[peer].program}, so nothing is compared with {peer}; get it with: {install}")
    before, began = load(), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "figures.json"
        kept_here = os.environ | {"TMPDIR": folder}  # so that nothing is left of a benchmark that is ended
        process = subprocess.Popen(command(name, benchmark, file), env=kept_here, start_new_session=True)
        try:
            code: int | None = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        figures = json.loads(file.read_text()) if file.exists() else {}
    return {
        "figures": figures,
        "exit_code": code,  # null: it was ended after TIMEOUT_S
        "seconds": time.monotonic() - began,
        "load_before": before,
        "load_after": load(),
        "missing_peers": lacking,
    }


def main() -> int:
    """Return 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    arguments = parser.parse_args()
    cores, memory = psutil.cpu_count(), psutil.virtual_memory().total
    found: dict[str, Any] = {"machine": {"cores": cores, "memory_bytes": memory}, "benchmarks": {}}
    for name in arguments.only:
        print(f"== {name}, load {psutil.getloadavg()[0]:.2f} on {cores} cores", flush=True)
        found["benchmarks"][name] = measure(name, BENCHMARKS[name])
        if arguments.json:  # after each, so that an interrupted run leaves what it has found
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    failed = [name for name, result in found["benchmarks"].items() if result["exit_code"] != 0]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
