"""A run on two Ray nodes, one of which dies in its middle. Both are raylets of this machine, at its one address."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.small_runs import HARDLY_WARM, RL_ASYNC

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not here; install it with pip install 'rl-async[ray]'"),
    # of Ray's own processes and sockets, which it leaves to the interpreter
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
STEPS = 8
NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    "rollout.engines=2",
    "agent.workers=2",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "debug.min_train_s=1",
    "eval.tasks=4",
    "queue.lease_s=3",
    *HARDLY_WARM,
]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head, on which the launcher is, and one more node, ``cluster.other``."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.other = cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def metrics(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last line may be half written
    return [json.loads(line) for line in whole]


def wait_for_steps(run: Path, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 240
    while len(metrics(run)) < count:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"the run did not reach step {count}"
        time.sleep(0.1)


def of_node(node: Any, run: str) -> list[int]:
    """Roles of the run that descend from a node's raylet."""
    raylet = node.all_processes["raylet"][0].process.pid
    return [process.pid for process in psutil.Process(raylet).children(recursive=True) if run in process.cmdline()]


def test_a_run_outlives_the_death_of_a_node(cluster: Any, workplace: Path) -> None:
    command = [RL_ASYNC, "launch", "--launcher", "ray", "--address", cluster.address, "--mode", "disaggregated"]
    command += ["--config", "calculator", "--name", "x", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch: subprocess.Popen[str] = subprocess.Popen(
        command, cwd=workplace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run = workplace / "runs" / "x"
    try:
        wait_for_steps(run, 2, launch)
        lost = of_node(cluster.other, "runs/x")
        assert lost and of_node(cluster.head_node, "runs/x"), "the roles are spread over both nodes"
        cluster.remove_node(cluster.other, allow_graceful=False)
        output, _ = launch.communicate(timeout=400)
        assert launch.returncode == 0, output[-4000:]
    finally:
        launch.kill()
        launch.wait(10)
    assert not [pid for pid in lost if psutil.pid_exists(pid)], "a lost node's roles end with it"
    rows = metrics(run)
    assert sorted({int(row["step"]) for row in rows}) == list(range(STEPS))
    assert max(row["staleness/max"] for row in rows) <= 1
    audit = subprocess.run([RL_ASYNC, "audit", "runs/x"], cwd=workplace, capture_output=True, text=True, timeout=100)
    assert audit.returncode == 0 and "ok: every admitted group" in audit.stdout, audit.stdout + audit.stderr
    processes = {one["name"]: one for one in json.loads((run / "processes.json").read_text())}
    assert {"queue", "engine-0", "engine-1", "worker-0", "worker-1", "trainer-0"} <= set(processes)
    assert sum(one["restarts"] for one in processes.values()) >= len(lost) and processes["queue"]["restarts"] == 0
    logs = {name: (run / "logs" / f"{name}.log").read_text() for name in processes}
    assert all(logs.values()), "every role's lines came back"
    assert sum("was lost with its node" in text for text in logs.values()) == len(lost)
    assert not list(run.glob(".nodes-*")), "nothing of the launcher's is left"


def test_an_interrupted_run_leaves_nothing_behind(cluster: Any, workplace: Path) -> None:
    command = [RL_ASYNC, "launch", "--launcher", "ray", "--address", cluster.address, "--config", "calculator"]
    command += ["--mode", "disaggregated", "--name", "y", *SMALL]
    environment = {**os.environ, "RAY_AUTH_TOKEN": "0" * 32}  # of another cluster of this user's: this one wants none
    launch: subprocess.Popen[str] = subprocess.Popen(
        command, cwd=workplace, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for_steps(workplace / "runs" / "y", 1, launch)
        roles = of_node(cluster.other, "runs/y") + of_node(cluster.head_node, "runs/y")
        launch.terminate()
        output, _ = launch.communicate(timeout=100)
        assert launch.returncode == 128 + 15 and "every process has ended" in output, output[-4000:]
    finally:
        launch.kill()
        launch.wait(10)
    assert len(roles) >= 4 and not [pid for pid in roles if psutil.pid_exists(pid)]
