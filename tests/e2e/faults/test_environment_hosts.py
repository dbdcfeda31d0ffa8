"""A whole run whose environments start slowly in hosts of their own, one of which is killed."""

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import HARDLY_WARM, start, succeed
from tests.e2e.small_runs import finish
from tests.support.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
CONTAINER = Path(__file__).parents[2] / "chaos" / "agents" / "container.py"
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
