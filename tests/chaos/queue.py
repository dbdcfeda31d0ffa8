"""Kills the queue's process, a worker or the trainer at random moments, round after round.

Real processes over real sockets, without a model. Each writes down what it was told before it goes on; after every
round these files must agree: nothing acknowledged lost, nothing trained twice, no token older than the bound.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rl_async.configs.load import dump
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.rollout import RolloutConfig
from rl_async.configs.schema.run import QueueConfig, RedisConfig, RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.process.private_folder import make_private
from tests.support.queue import Sample, lost, make_run_keys, stale, twice, whole_lines

ROOT = Path(__file__).resolve().parents[2]
BATCH, GROUP, STALENESS, STEPS = 2, 2, 1, 1_000_000
ROUND_S = 1.0  # at most, until the next kill
PROGRESS_S = 60.0  # within which a round must train a step
ROLES = ("queue", "trainer", "worker-0", "worker-1")


class Processes:
    """The queue, its payload shards, the trainer and two workers in one run folder."""

    def __init__(self, run: Path) -> None:
        self._addresses: dict[str, str] = {}
        self._run = run
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        """Another process in this role."""
        queue, own = self._address("queue"), self._address(role)
        if role == "queue":
            arguments = ["rl_async.transfer_queue", "--run", str(self._run), "--address", own]
        elif role.startswith("shard"):
            flags = ["--run", str(self._run), "--queue", queue, "--address", own, "--name", role]
            arguments = ["rl_async.transfer_queue.shard", *flags]
        else:
            arguments = ["tests.chaos.queue_clients", role, str(self._run), queue]
        with (self._run / f"{role}.log").open("ab") as log:
            self._running[role] = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, stderr=log)

    def _address(self, role: str) -> str:
        """Where a role listens, the same each time it is started."""
        if role not in self._addresses:
            self._addresses[role] = f"ipc://{self._run}/sockets/{role}"
        return self._addresses[role]

    def kill(self, role: str) -> None:
        """With SIGKILL."""
        process = self._running[role]
        process.kill()
        process.wait()

    def ended(self) -> list[str]:
        """Roles whose process has ended by itself."""
        return [role for role, process in self._running.items() if process.poll() is not None]

    def stop(self) -> None:
        """All of them."""
        for role in self._running:
            self.kill(role)


def surviving(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Rows by step as the newest lineage of each step trained them, without what a resume went back behind."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in whole_lines(run / "trained.jsonl"):
        if "resumed" in line:
            steps = {step: rows for step, rows in steps.items() if step < line["resumed"]}
        else:
            steps[line["step"]] = line["rows"]
    return steps


def check(run: Path, *, journal_lost: bool) -> tuple[int, int]:
    """Ends the program if the files disagree; returns steps trained and samples acknowledged so far."""
    steps = surviving(run)
    groups = {step: {row["group"] for row in rows} for step, rows in steps.items()}
    found = twice(groups)
    trained: dict[Sample, str] = {}
    for step, rows in steps.items():
        for row in rows:
            key = (row["group"], row["sample"])
            if key in trained:
                found.append(f"sample {key} was trained twice")
            trained[key] = row["tokens"]
            if stale(step, row["oldest"], STALENESS):
                found.append(f"step {step} trained tokens of version {row['oldest']}")
    if sorted(steps) != list(range(len(steps))):
        found.append(f"the steps {sorted(steps)} were trained")
    acknowledged = [line for worker in run.glob("worker-*.jsonl") for line in whole_lines(worker)]
    ledger = whole_lines(run / "ledger.jsonl")
    given_up = {e["group"] for e in ledger if e["event"] in ("drop", "dead_letter")}
    with_shards = {tuple(row) for e in ledger if e["event"] == "lost" for row in e["rows"]}  # and generated again
    newest = max((group for members in groups.values() for group in members), default=-1)
    oldest_open = newest - 3 * (STALENESS + 1) * BATCH  # older groups were trained or given up
    if not journal_lost:
        kept = [((line["group"], line["sample"]), line["tokens"]) for line in acknowledged]
        kept = [(key, tokens) for key, tokens in kept if key not in with_shards]
        found += lost(kept, trained, lambda group: group in given_up or group > oldest_open)
    if found:
        sys.exit("\n".join([*found[:20], f"see {run}"]))
    return len(steps), len(acknowledged)


def wait_for_step(run: Path, processes: Processes, after: int) -> None:
    """Until another step was trained. Ends the program if none is, or if a process ended by itself."""
    deadline = time.monotonic() + PROGRESS_S
    while max(surviving(run), default=-1) <= after:
        if time.monotonic() > deadline:
            sys.exit(f"no step after {after} was trained within {PROGRESS_S:.0f} s; see {run}")
        for role in processes.ended():
            processes.start(role)  # as a launcher does, after QueueLost
        time.sleep(0.1)


def prepare(run: Path, queue: QueueConfig) -> None:
    """A run folder with a config and tasks."""
    row = {"data_source": "chaos", "prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": "1"}}
    (run / "tasks.jsonl").write_text("".join(json.dumps(row | {"extra_info": {}}) + "\n" for _ in range(8)))
    config = RunConfig(
        model=ModelConfig(path="no-model-needed"),
        data=DataConfig(path=str(run / "tasks.jsonl"), train_batch_groups=BATCH),
        rollout=RolloutConfig(group_size=GROUP),
        trainer=TrainerConfig(steps=STEPS),
        queue=queue,
        name="chaos",
    )
    (run / "config.yaml").write_text(dump(config))
    make_run_keys(run)
    make_private(run / "sockets")


def main() -> int:
    """Round after round; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.queue", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="kills in all (default: 10)")
    parser.add_argument("--journal", choices=("sqlite", "redis", "memory"), default="sqlite")
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0")
    parser.add_argument("--shards", type=int, default=0, help="payload shards, which are killed too (default: 0)")
    parser.add_argument("--replicas", type=int, default=1, help="shards that keep each payload (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    run = Path(tempfile.mkdtemp(prefix="chaos-queue-"))
    prepare(
        run,
        QueueConfig(
            journal=arguments.journal,
            redis=RedisConfig(url=arguments.redis_url),
            max_staleness=STALENESS,
            lease_s=2.0,
            max_attempts=1000,
            shards=arguments.shards,
            replicas=arguments.replicas,
        ),
    )
    processes = Processes(run)
    roles = [*ROLES, *(f"shard-{n}" for n in range(arguments.shards))]
    killed = dict.fromkeys(roles, 0)
    began = time.monotonic()
    journal_lost = False
    try:
        for role in roles:
            processes.start(role)
        wait_for_step(run, processes, 0)
        for _ in range(arguments.rounds):
            time.sleep(rng.random() * ROUND_S)
            role = rng.choice(roles)
            journal_lost = journal_lost or (role == "queue" and arguments.journal == "memory")
            processes.kill(role)
            killed[role] += 1
            trained, _ = check(run, journal_lost=journal_lost)
            processes.start(role)
            wait_for_step(run, processes, trained - 1)
        trained, acknowledged = check(run, journal_lost=journal_lost)
    finally:
        processes.stop()
    but = " but with its journal" if journal_lost else ""
    print(
        f"{arguments.rounds} rounds in {time.monotonic() - began:.0f} s, killed {killed}: {trained} steps trained, "
        f"{acknowledged} samples acknowledged; nothing acknowledged was lost{but}, "
        f"nothing was trained twice, no token was older than {STALENESS} steps; files: {run}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
