"""A stuck rank is diagnosed by name: by somebody who asks, by the other rank, and by the run itself."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import HARDLY_WARM, RL_ASYNC, start
from tests.e2e.small_runs import finish
from tests.support.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=2", "trainer.steps=12", "trainer.checkpoint_every=2"),
    *("trainer.ranks=2", "trainer.collective_timeout_s=20", "debug.min_train_s=0.5", "eval.every=0", "eval.tasks=2"),
    *HARDLY_WARM,
    "launcher.stop_timeout_s=5",
]


@pytest.fixture
def launched(workplace: Path) -> Iterator[Forked]:
    process = start(workplace, "launch", "--config", "calculator", "--name", "stuck", *SMALL)
    yield process
    process.kill()  # its children end with it
    process.wait(10)


def pid_of(run: Path, name: str) -> int:
    return next(p["pid"] for p in json.loads((run / "processes.json").read_text()) if p["name"] == name)


def test_a_stopped_rank_is_named_and_the_run_ends_well(workplace: Path, launched: Forked) -> None:
    run, deadline = workplace / "runs" / "stuck", time.monotonic() + 180
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    pid = pid_of(run, "trainer-1")
    os.kill(pid, signal.SIGSTOP)

    asked = subprocess.run([RL_ASYNC, "doctor", str(run)], capture_output=True, text=True, timeout=60)
    named = f"trainer rank 1 (pid {pid}) is stopped (SIGSTOP)"
    assert asked.returncode == 1, asked.stdout + asked.stderr
    assert f"verdict: {named}" in asked.stdout and f"kill -CONT {pid}" in asked.stdout

    output = finish(launched)
    assert named in output, "the run names it by itself, once its deadline has passed"
    assert output.count("the whole diagnosis: ") == 1
    assert f"verdict: {named}: rank 0 waited for it" in (run / "doctor.txt").read_text()
    assert f"rank 1 (pid {pid}) did not arrive: it is stopped (SIGSTOP)" in (run / "logs" / "trainer-0.log").read_text()
    after = subprocess.run([RL_ASYNC, "doctor", str(run)], capture_output=True, text=True, timeout=60)
    assert after.returncode == 0 and "verdict: the run ended well: all 12 steps are trained" in after.stdout
