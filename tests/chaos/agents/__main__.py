"""Kills what agents are made of at random moments of real runs: see ``python -m tests.chaos.agents -h``.

A round is one SIGKILL: of an agent worker, an MCP server, an environment host or the guard of either, what a host had
started, a sandbox or a program in it, an agent program or its keeper, ``rl-async play``, or a gateway. The kinds of
runs (``kinds.py``) take turns, until all rounds have struck. Each run must train all its steps, ``rl-async audit`` must
pass, and then nothing of it may be left: no process, no mount, no Unix socket, no file in /tmp and no shared memory.
For that, everything runs in namespaces of its own.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rl_async.errors import EXIT_USER
from rl_async.transfer_queue.ledger import OR_GIVEN_UP, TRAINED_ONCE
from tests.chaos.agents.kinds import (
    KINDS,
    PROGRAM,
    ROOT,
    TASKS,
    Kind,
    Seen,
    kill,
    left_behind,
    own_temporary_folders,
    processes,
    victims,
)
from tests.chaos.agents.user_code import write_tasks
from tests.chaos.host.isolation import install, is_isolated, run_isolated, why_not_isolated

START_S = 600.0  # until the first step, with data and model to make, on a busy machine
PROGRESS_S = 300.0  # within which a step must be trained, whatever happens
BETWEEN_S = 1.5  # at most, from one kill to the next
STORM = 8  # kills at most between two steps, so that most strike a run that works
MOST = 40  # kills at most in one run
AT_ONCE = 4  # agent programs
NEEDED = {"bwrap": "bubblewrap"}
OK = tuple(f"{TRAINED_ONCE}{end}\n" for end in ("", OR_GIVEN_UP))
HOME = "CHAOS_AGENTS_HOME"
CLI = [sys.executable, "-m", "rl_async.launcher.cli"]
SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "rollout.max_tokens=12", "eval.every=0", "eval.tasks=4"),
    *("trainer.checkpoint_every=5", "trainer.batch_timeout_s=250", "debug.min_train_s=1"),
    *("queue.lease_s=5", "queue.max_attempts=1000", "launcher.max_restarts=10000", "launcher.stop_timeout_s=5"),
    *("warm_start.min_steps=1", "warm_start.max_steps=2", "warm_start.check_every=1", "warm_start.gate=0"),
]


class Run:
    """A run in ``home/runs``, with ``rl-async play`` beside it if its episodes are played by programs."""

    def __init__(self, home: Path, name: str, kind: Kind, steps: int) -> None:
        self.name, self.folder, self.log = name, home / "runs" / name, home / f"{name}.log"
        self._home, self._kind, self._steps = home, kind, steps
        self._player: subprocess.Popen[bytes] | None = None
        words = ["--mode", "disaggregated", "--config", "calculator", "--name", name, *SMALL, *kind.settings]
        self._launcher = self._start(["launch", *words, f"trainer.steps={steps}"], self.log)

    def _start(self, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with log.open("ab") as output:
            return subprocess.Popen([*CLI, *words], cwd=self._home, env=environment, stdout=output, stderr=output)

    def tend(self) -> None:
        """Start ``rl-async play``, again if it was killed or missed its gateway. Ends the program if it failed."""
        if not self._kind.played or self.exit() is not None or not (self.folder / "endpoints.json").exists():
            return
        if self._player is not None:
            if (code := self._player.poll()) is None:
                return
            if code not in (0, -9):  # 0: the gateway was away for too long
                sys.exit(f"{self.name}: rl-async play ended with {code}; see {self.log}")
        words = ["play", "-n", str(AT_ONCE), f"runs/{self.name}", "--", sys.executable, str(PROGRAM), "{prompt}"]
        self._player = self._start(words, self.log.with_suffix(".play.log"))

    def exit(self) -> int | None:
        """Return the launcher's exit code, or None while it runs."""
        return self._launcher.poll()

    def steps(self) -> int:
        """Return how many steps were trained."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def check(self) -> None:
        """End the program unless the run trained all its steps and every group once."""
        if self._player is not None and self._player.wait(PROGRESS_S) not in (0, -9, EXIT_USER):  # started too late
            sys.exit(f"{self.name}: rl-async play ended with {self._player.returncode}; see {self.log}")
        if self.exit() != 0 or self.steps() != self._steps:
            sys.exit(f"{self.name} ended with {self.exit()} after {self.steps()} steps; see {self.log}")
        audit = [*CLI, "audit", str(self.folder)]
        done = subprocess.run(audit, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        if done.returncode != 0 or not any(ok in done.stdout for ok in OK):
            sys.exit(f"{self.name}: {done.stdout}{done.stderr}")

    def stop(self) -> None:
        """Kill the launcher and the player; what they started ends with them."""
        for process in filter(None, (self._launcher, self._player)):
            process.kill()
            process.wait()


def one_run(run: Run, roles: list[str], rng: random.Random) -> list[str]:
    """Run to the end, killing a process of one role after the other, if it has one; return the roles struck."""
    struck, left = list[str](), list(roles)
    before, since, next_kill, in_a_row = 0, time.monotonic(), 0.0, 0
    while run.exit() is None:
        run.tend()
        time.sleep(0.05)
        if (steps := run.steps()) > before:
            before, since, in_a_row = steps, time.monotonic(), 0
        if time.monotonic() - since > (limit := PROGRESS_S if steps else START_S):
            sys.exit(f"{run.name}: no step was trained within {limit:.0f} s, after {struck[-3:]}; see {run.log}")
        if not left or in_a_row == STORM or time.monotonic() < next_kill or not steps:
            continue
        running = processes()
        role, found = next(
            ((role, found) for role in rng.sample(left, len(left)) if (found := victims(role, running))), ("", [])
        )
        if found and kill(rng.choice(found)):
            left.remove(role)
            struck.append(role)
            in_a_row += 1
            print(f"{run.name}, step {steps}: killed {role}", flush=True)
            next_kill = time.monotonic() + rng.random() * BETWEEN_S
    run.check()
    return struck


def all_rounds(rounds: int, names: list[str], rng: random.Random) -> dict[str, list[str]]:
    """Return the roles to strike by kind of run: the kinds as often, and in each its roles as often, shuffled."""
    shares = {name: rounds // len(names) + (place < rounds % len(names)) for place, name in enumerate(names)}
    return {
        name: rng.sample(roles := [KINDS[name].victims[i % len(KINDS[name].victims)] for i in range(share)], len(roles))
        for name, share in shares.items()
    }


def all_runs(home: Path, to_strike: dict[str, list[str]], steps: int, rng: random.Random) -> None:
    """Run after run until all rounds have struck; ends the program on the first problem."""
    struck, runs, began = Counter[str](), 0, time.monotonic()
    while any(to_strike.values()):
        name = max(to_strike, key=lambda kind: len(to_strike[kind]))
        before = Seen.now()
        run = Run(home, f"{name}-{runs}", KINDS[name], steps)
        try:
            done = one_run(run, to_strike[name][:MOST], rng)
        finally:
            run.stop()
        if found := left_behind(before):
            sys.exit(f"{run.name} left behind, after {done}:\n" + "\n".join(found))
        if not done:
            sys.exit(f"{run.name} ended before anything was struck; give it more steps")
        for role in done:
            to_strike[name].remove(role)
        struck.update(done)
        runs += 1
        print(f"run {runs} ({name}): ended well after {len(done)} kills", flush=True)
    for role, count in sorted(struck.items()):
        print(f"{role:30}{count:5}")
    print(
        f"{struck.total()} kills in {runs} runs and {time.monotonic() - began:.0f} s: every group trained once, no "
        f"process, mount, socket or temporary file left; run folders: {home}"
    )


def main() -> int:
    """Run until all rounds have struck; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.agents", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="kills in all (default: 12)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="trainer steps of each run (default: 60)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of runs; may be repeated (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if problem := install(NEEDED) or ("" if is_isolated() else why_not_isolated()):
        sys.exit(problem)
    if HOME not in os.environ:
        os.environ[HOME] = tempfile.mkdtemp(prefix="chaos-agents-", dir="/var/tmp")
        run_isolated("tests.chaos.agents", sys.argv[1:])
    home, rng = Path(os.environ[HOME]), random.Random(arguments.seed)
    (home / "aside").mkdir()
    write_tasks(home / TASKS)
    own_temporary_folders([ROOT, Path(sys.prefix)], home / "aside")
    all_runs(home, all_rounds(arguments.rounds, arguments.kind or list(KINDS), rng), arguments.steps, rng)
    return 0


if __name__ == "__main__":
    sys.exit(main())
