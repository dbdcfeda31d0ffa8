"""Runs whose output loses its reader, whose terminal is gone, whose folder has files named as modules are, and whose
machine is suspended.
"""

import gzip
import json
import os
import pty
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.small_runs import HARDLY_WARM, RL_ASYNC, SMALL, finish, metrics, start, succeed
from tests.support.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

CODE = "code"


def command(name: str, steps: int, *more: str) -> str:
    words = ["launch", "--config", "calculator", "--name", name, *SMALL, f"trainer.steps={steps}", *more]
    return shlex.join([RL_ASYNC, *words])


@pytest.mark.parametrize(
    "output",
    ["| head -1", *(pytest.param(output, marks=pytest.mark.nightly) for output in (">&- 2>&-", "> /dev/full 2>&1"))],
)
def test_a_run_goes_on_without_its_output(workplace: Path, output: str) -> None:
    script = f"{command('run', 2)} {output}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=workplace, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(workplace, "run")) == 2
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/run")


def test_modules_in_the_working_directory_shadow_nothing_and_are_found(workplace: Path) -> None:
    for name in ("random", "queue", "logging", "json", "numpy", "torch", "msgspec"):
        (workplace / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    (workplace / "code_of_mine").mkdir()
    (workplace / "code_of_mine/beside.py").write_text("VALUE = 1.0\n")
    (workplace / "neighbour.py").write_text("from queue import Queue\nVALUE = 1.0\n")
    (workplace / "code_of_mine/scores.py").write_text(
        "import random\nimport beside, neighbour\n"
        "def score(solution_str):\n    return random.random() * beside.VALUE * neighbour.VALUE\n"
    )
    words = shlex.split(command("run", 2, "reward.functions=[{name: code_of_mine/scores.py:score}]"))
    done = subprocess.run(words, cwd=workplace, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert metrics(workplace, "run")[-1]["reward/mean"] > 0


def test_ctrl_c_ends_tee_and_the_run_still_saves_its_step(workplace: Path) -> None:
    script = f"{command('run', 400, 'debug.min_train_s=5')} 2>&1 | tee log; echo ${{PIPESTATUS[0]}} > {CODE}"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workplace)
        os.execv("/bin/bash", ["bash", "-ic", f"trap : INT; {script}"])

    def drain() -> None:
        try:
            while os.read(terminal, 1 << 16):
                pass
        except OSError:  # the terminal is gone
            pass

    threading.Thread(target=drain, daemon=True).start()
    deadline = time.monotonic() + 200
    while len(metrics(workplace, "run")) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.write(terminal, b"\x03")
    os.waitpid(pid, 0)
    os.close(terminal)
    assert (workplace / CODE).read_text() == "130\n"
    saved = [int(folder.name.rpartition("-")[2]) for folder in (workplace / "runs/run/checkpoints").iterdir()]
    assert max(saved) == len(metrics(workplace, "run"))
    assert "ok so far" in succeed(workplace, "audit", "runs/run")


def test_a_run_that_ignores_hangups_survives_its_terminal(workplace: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workplace)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execv("/bin/bash", ["bash", "-c", f"{command('run', 3)}; echo $? > {CODE}"])
    deadline = time.monotonic() + 200
    while len(metrics(workplace, "run")) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.close(terminal)
    os.waitpid(pid, 0)
    assert (workplace / CODE).read_text() == "0\n"
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/run")


def test_a_pause_of_the_whole_machine_costs_no_lease_shard_sample_or_engine(workplace: Path) -> None:
    """It is longer than every timeout of the roles, none of which could work meanwhile."""
    words = "rollout.engines=2 agent.workers=2 queue.shards=2 rollout.request_timeout_s=5 debug.min_train_s=0.3"
    words += " weight_sync.timeout_s=5 weight_sync.sync_timeout_s=20"
    run = subprocess.Popen(shlex.split(command("run", 12, *words.split())), cwd=workplace)
    deadline = time.monotonic() + 300
    try:
        for step in (2, 5):
            while len(metrics(workplace, "run")) < step:
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            launcher = psutil.Process(run.pid)
            everyone = [launcher, *launcher.children(recursive=True)]
            for process in everyone:
                process.suspend()
            time.sleep(8)
            for process in everyone:
                process.resume()
        assert run.wait(deadline - time.monotonic()) == 0
    finally:
        run.kill()
        run.wait()
    folder = workplace / "runs/run"
    assert '"event":"lost"' not in (folder / "ledger.jsonl").read_text()
    rows = metrics(workplace, "run")
    assert all(row["rollout/failed_attempts"] == row["sync/failures"] == 0 for row in rows)
    # A counter is there once it has counted.
    assert not {"queue/leases_lost", "queue/fenced"} & rows[-1].keys() and rows[-1]["queue/held_up"] == 2
    assert all(process["restarts"] == 0 for process in json.loads((folder / "processes.json").read_text()))
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/run")


# A whole run whose environments start slowly in hosts of their own, one of which is killed.

CONTAINER = Path(__file__).parents[2] / "chaos" / "agents" / "user_code.py"
START_S = 3.0
STEPS = 4


SETTINGS = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "queue.lease_s=5", "eval.every=0", "eval.tasks=4"),
    *(f"trainer.steps={STEPS}", "agent.loop=single_turn", "agent.tools=[]", "agent.concurrency=4", *HARDLY_WARM),
    *(f"agent.environment={CONTAINER}:InContainer", "agent.environment_hosts={ready: 2, processes: 2}"),
    "reward.functions=[{name: environment}]",
]


@pytest.fixture
def run(workplace: Path) -> Iterator[Forked]:
    """A run in ``runs/slow`` whose environments name their processes in ``record``."""
    (record := workplace / "record").mkdir()
    command = ["launch", "--mode", "disaggregated", "--config", "calculator", "--name", "slow", *SETTINGS]
    launched = start(workplace, *command, f"agent.environment_options={{start_s: {START_S}, record: {record}}}")
    yield launched
    launched.kill()
    launched.wait(10)


def test_a_run_outlives_a_killed_host_of_environments_that_start_slowly(run: Forked, workplace: Path) -> None:
    until = time.monotonic() + 200
    while not (asked := [int(path.name) for path in (workplace / "record").iterdir()]):
        assert run.poll() is None, run.communicate()[0][-4000:]
        assert time.monotonic() < until, "no environment was asked"
        time.sleep(0.02)
    host = psutil.Process(asked[0])
    containers = host.children()
    assert containers, "it holds environments"
    host.kill()
    finish(run, timeout_s=300)
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/slow")
    folder = workplace / "runs" / "slow"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == STEPS
    rows = [
        json.loads(line)
        for path in folder.glob("trajectories/step-*")
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]
    assert {row["reward"] for row in rows} == {1.0} and any(row["attempt"] > 0 for row in rows)
    assert not any(container.is_running() for container in containers)
