"""Short runs of the demonstration: how they are started and killed, and what must hold of each that has ended."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from rl_async.configs.schema.data import WarmStartConfig
from rl_async.process.run_files import ENDED, read_stat
from tests.support.forked import Forked
from tests.support.rounding import pass_rounding

# The command ``rl-async``, installed or with forked roles, and a warm start that hardly trains its model.


RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))
HARDLY_WARM = ["warm_start.min_steps=1", "warm_start.max_steps=2", "warm_start.check_every=1", "warm_start.gate=0"]


def start(cwd: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Forked:
    """Start the command with forked roles; the caller must see that it ends."""
    return Forked("tests.support.forked_launcher", *arguments, environment=environment, cwd=cwd, parent=True)


def call(cwd: Path, *arguments: str, timeout_s: float = 280) -> "subprocess.CompletedProcess[str]":
    """Run the command with forked roles to its end."""
    command = start(cwd, *arguments)
    try:
        output, errors = command.communicate(timeout_s)
    finally:
        command.kill()
    return subprocess.CompletedProcess(arguments, command.returncode or 0, output, errors)


def succeed(cwd: Path, *arguments: str, timeout_s: float = 280) -> str:
    """Run the command as ``call`` does; it must exit with 0. Its standard output."""
    done = call(cwd, *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


STEPS = 8
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "eval.every=4",
    "eval.tasks=4",
    "queue.lease_s=3",
    *HARDLY_WARM,
    "launcher.stop_timeout_s=5",
]
# How far engine and trainer may be apart in a log-probability of the tiny model. A token less likely than exp(-16) is
# practically never sampled, and the longest sums are over a row or over the MLP, of at most four times the width.
TINY = WarmStartConfig(demos_path="")
APART = pass_rounding(16.0, TINY.layers, terms=4 * TINY.hidden_size)
Run = Forked


def finish(process: Run, code: int = 0, timeout_s: float = 200) -> str:
    output = "".join(part or "" for part in process.communicate(timeout=timeout_s))
    assert process.returncode == code, output[-4000:]
    return output


def metrics(home: Path, name: str) -> list[dict[str, float]]:
    path = home / "runs" / name / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last line may be half written
    return [json.loads(line) for line in whole]


def pids(home: Path, name: str) -> dict[str, int]:
    """The process of each role of a run, by the role's name; the latest where it was started again."""
    listed = json.loads((home / "runs" / name / "processes.json").read_text())
    return {process["name"]: process["pid"] for process in listed}


def roles_left(home: Path, name: str) -> list[str]:
    """The roles whose processes have not ended; a pid with another start time is another process."""
    listed = json.loads((home / "runs" / name / "processes.json").read_text())
    stats = {process["name"]: (read_stat(process["pid"]), process["started"]) for process in listed}
    return [role for role, (stat, started) in stats.items() if stat.state not in ENDED and stat.started == started]


def processes_in(home: Path, argument: str) -> list[int]:
    """Processes with this argument that work in ``home``, which no other test does."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if argument in process.cmdline() and Path(process.cwd()) == home:
                found.append(process.pid)
    return found


def kill(home: Path, name: str, role: str) -> None:
    psutil.Process(pids(home, name)[role]).kill()


def wait_for_steps(home: Path, name: str, count: int, process: Run) -> None:
    deadline = time.monotonic() + 120
    while len(metrics(home, name)) < count:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"run {name} did not reach step {count}"
        time.sleep(0.05)


def log_of(home: Path, name: str, process: str) -> str:
    return (home / "runs" / name / "logs" / f"{process}.log").read_text()


def assert_complete(home: Path, name: str, bound: int) -> list[dict[str, float]]:
    """Every step once (counting the last lineage to train it), the bound held, and the outside audit agrees."""
    rows = metrics(home, name)
    assert sorted({m["step"] for m in rows}) == list(range(STEPS))
    assert max(m["staleness/max"] for m in rows) <= bound
    assert "ok: every admitted group" in succeed(home, "audit", f"runs/{name}")  # "ok so far" exits with 0 as well
    assert processes_in(home, f"runs/{name}") == [], "processes outlived the run"
    assert roles_left(home, name) == [], "roles outlived the run"
    return rows
