"""Kills and freezes processes of whole runs at random moments, the launcher and Redis included: scripts/chaos_run -h.

A run has two engines, two agent workers, two trainer ranks, two payload shards and a queue that journals to a Redis
server. Faults strike until the run has trained all its steps; a launcher that was killed is started again with
``--resume``. Then the run's history must hold (``history.py``), and ``rl-async audit`` must agree. More runs follow
until all rounds have struck.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rl_async.process.kernel import read_stat
from tests.chaos.history import Expected, problems
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Expected(steps=30, groups=4, samples=4, staleness=1)
PROGRESS_S = 240.0  # within which a step must be trained, whatever happens
BETWEEN_S = 5.0  # at most, from one fault to the next
FROZEN_S = 12.0  # at most; longer than a lease, and than a weight update may take
SILENT_S = 3.0  # at most, until Redis is started again
ROLES = ("queue", "shard", "engine", "worker", "trainer", "launcher", "redis")
SMALL = (
    f"trainer.steps={EXPECTED.steps} data.train_batch_groups={EXPECTED.groups} rollout.group_size={EXPECTED.samples} "
    f"queue.max_staleness={EXPECTED.staleness} trainer.ranks=2 trainer.checkpoint_every=3 rollout.engines=2 "
    "trainer.collective_timeout_s=30 trainer.batch_timeout_s=200 agent.workers=2 queue.shards=2 queue.journal=redis "
    "queue.lease_s=8 queue.max_attempts=1000 weight_sync.timeout_s=6 weight_sync.sync_timeout_s=60 "
    "launcher.max_restarts=10000 launcher.stop_timeout_s=5 debug.min_train_s=0.3 eval.every=0 eval.tasks=4 "
    "warm_start.min_steps=1 warm_start.max_steps=2 warm_start.check_every=1 warm_start.gate=0"
).split()


class Fault(NamedTuple):
    """What strikes whom."""

    role: str
    signal: str


class Redis:
    """A Redis server that forces every write to disk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        folder.mkdir()
        self.start()

    def start(self) -> None:
        """Start it on what it wrote before."""
        words = f"--port {self._port} --bind 127.0.0.1 --appendonly yes --appendfsync always --dir {self._folder}"
        with (self._folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(["redis-server", *words.split(), "--save", ""], stdout=log, stderr=log)

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


class ChaoticRun:
    """One run, with its launcher and its Redis server."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name, self.folder = home, name, home / "runs" / name
        self.redis = Redis(home / f"redis-{name}")
        self._launch()

    def _launch(self, *more: str) -> None:
        words = ["launch", "--mode", "disaggregated", "--config", "calculator", "--name", self.name, *more, *SMALL]
        with (self.home / f"{self.name}.log").open("ab") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "rl_async.launcher.cli", *words, f"queue.redis_url={self.redis.url}"],
                cwd=self.home,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )

    def exit(self) -> int | None:
        """Return the launcher's exit code, or None while it runs."""
        return self._launcher.poll()

    def steps(self) -> int:
        """Return how many lines of metrics there are, in all lineages."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def strike(self, fault: Fault, rng: random.Random) -> bool:
        """Strike a process of the role, and return when it goes on. False if none is running now."""
        if fault.role == "launcher":
            return self._strike_launcher(fault, rng)
        pids = [self.redis.process.pid] if fault.role == "redis" else self._pids(fault.role)
        if not pids:
            return False
        pid = rng.choice(pids)
        try:
            os.kill(pid, signal.SIGKILL if fault.signal == "kill" else signal.SIGSTOP)
            if fault.signal == "freeze":
                time.sleep(rng.random() * FROZEN_S)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # it ended before, or its supervisor replaced it while it was frozen
            return fault.signal == "freeze"
        if fault == ("redis", "kill"):
            self.redis.process.wait()
            time.sleep(rng.random() * SILENT_S)
            self.redis.start()
        return True

    def _strike_launcher(self, fault: Fault, rng: random.Random) -> bool:
        children = [pid for role in ROLES for pid in self._pids(role)]
        if not children:
            return False
        if fault.signal == "freeze":
            self._launcher.send_signal(signal.SIGSTOP)
            time.sleep(rng.random() * FROZEN_S)
            self._launcher.send_signal(signal.SIGCONT)
            return True
        self._launcher.kill()
        self._launcher.wait()
        deadline = time.monotonic() + PROGRESS_S
        while any(read_stat(pid).state not in ("Z", "gone") for pid in children):
            if time.monotonic() > deadline:
                sys.exit(f"processes outlived their launcher: {children}; see {self.folder}")
            time.sleep(0.05)
        self._launch("--resume")
        return True

    def _pids(self, role: str) -> list[int]:
        """Return the running processes of a role."""
        path = self.folder / "processes.json"
        if not path.exists():
            return []
        records = [record for record in json.loads(path.read_text()) if record["role"] == role]
        running = [record for record in records if record["state"] == "running"]
        return [record["pid"] for record in running if read_stat(record["pid"]).started == record["started"]]

    def close(self) -> None:
        """End what is left; the launcher's processes end with it."""
        self._launcher.kill()
        self._launcher.wait()
        self.redis.stop()


def one_run(home: Path, name: str, faults: list[Fault], rng: random.Random) -> list[Fault]:
    """Run to the end, striking one fault after the other; return those that struck. Ends the program on a problem."""
    run = ChaoticRun(home, name)
    struck: list[Fault] = []
    try:
        before, since, next_fault = 0, time.monotonic(), 0.0
        while run.exit() is None:
            time.sleep(0.05)
            if (steps := run.steps()) > before:
                before, since = steps, time.monotonic()
            if time.monotonic() - since > PROGRESS_S:
                sys.exit(
                    f"{name}: no step was trained within {PROGRESS_S:.0f} s, after {struck[-3:]}; see {run.folder}"
                )
            if before and len(struck) < len(faults) and time.monotonic() > next_fault:
                if run.strike(faults[len(struck)], rng):
                    struck.append(faults[len(struck)])
                next_fault = time.monotonic() + rng.random() * BETWEEN_S
        if run.exit() != 0:
            sys.exit(f"{name} ended with {run.exit()} after {struck[-3:]}; see {home}/{name}.log and {run.folder}")
    finally:
        run.close()
    found = problems(run.folder, EXPECTED)
    audit = [sys.executable, "-m", "rl_async.launcher.cli", "audit", str(run.folder)]
    audited = subprocess.run(audit, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if audited.returncode != 0 or "ok: every admitted group" not in audited.stdout:  # "ok so far" exits with 0 as well
        found.append(f"audit: {audited.stdout}{audited.stderr}")
    if found:
        sys.exit(f"{name}: " + "\n".join(found[:20]) + f"\nsee {run.folder}")
    return struck


def all_faults(rounds: int, rng: random.Random) -> list[Fault]:
    """Every role with every signal equally often, in random order."""
    kinds = [Fault(role, kind) for role in ROLES for kind in ("kill", "freeze")]
    faults = [kinds[number % len(kinds)] for number in range(rounds)]
    rng.shuffle(faults)
    return faults


def main() -> int:
    """Run until all rounds have struck; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/chaos_run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="faults in all (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None:
        sys.exit("needs a Redis server: apt-get install redis-server")
    rng, began = random.Random(arguments.seed), time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="chaos-run-"))
    left, struck, runs = all_faults(arguments.rounds, rng), Counter[Fault](), 0
    while left:
        done = one_run(home, f"run-{runs}", left, rng)
        if not done:
            sys.exit(f"run-{runs} ended before any fault struck; see {home}")
        runs, left = runs + 1, left[len(done) :]
        struck.update(done)
        print(f"run {runs}: ended well after {len(done)} faults; {len(left)} to go", flush=True)
    for role in ROLES:
        print(f"{role:10}" + "".join(f"{kind:>10} {struck[Fault(role, kind)]:3}" for kind in ("kill", "freeze")))
    print(
        f"{struck.total()} faults in {runs} runs and {time.monotonic() - began:.0f} s: nothing lost, doubled or hung; "
        f"run folders: {home}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
