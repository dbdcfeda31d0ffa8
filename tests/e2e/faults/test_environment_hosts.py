"""A whole run whose environments start slowly in hosts of their own, one of which is killed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import RL_ASYNC, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
CONTAINER = Path(__file__).parents[2] / "chaos" / "agents" / "container.py"
START_S = 3.0
STEPS = 4


def test_a_run_outlives_a_killed_host_of_environments_that_start_slowly(workplace: Path) -> None:
    record = workplace / "record"
    record.mkdir()
    command = [
        *(RL_ASYNC, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", "slow"),
        *("data.train_batch_groups=2", "rollout.group_size=2", f"trainer.steps={STEPS}", "eval.every=0", "eval.tasks=4"),
        *("agent.loop=single_turn", "agent.tools=[]", "agent.concurrency=4", "queue.lease_s=5"),
        *(f"agent.environment={CONTAINER}:InContainer", "agent.environment_hosts={ready: 2, processes: 2}"),
        f"agent.environment_options={{start_s: {START_S}, record: {record}}}",
        "reward.functions=[{name: environment}]",
    ]
    with subprocess.Popen(command, cwd=workplace, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        until = time.monotonic() + 200
        while not (struck := [int(path.name) for path in record.iterdir()]):
            assert run.poll() is None and time.monotonic() < until, "no environment was asked"
            time.sleep(0.02)
        host = psutil.Process(struck[0])
        containers = host.children()
        assert containers, "it holds environments"
        os.kill(host.pid, signal.SIGKILL)
        output = run.communicate(timeout=300)[0]
    assert run.returncode == 0, output[-4000:]
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/slow")
    folder = workplace / "runs" / "slow"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == STEPS
    assert f"agent.environment_hosts" and "was killed" in (folder / "logs" / "worker-0.log").read_text()
    print(json.loads((folder / "trained.jsonl").read_text().splitlines()[0]).keys())
    assert not any(container.is_running() for container in containers)
