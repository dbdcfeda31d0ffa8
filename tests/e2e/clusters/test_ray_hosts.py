"""A run on a Ray cluster of two hosts with an address each, which asks for a token: ranks of the trainer on both."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.small_runs import HARDLY_WARM, RL_ASYNC

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not here; install it with pip install 'rl-async[ray]'"),
]
RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379  # of a network namespace of its own
STEPS = 3
# A node has room for two processes of three CPUs, so that three ranks and an engine need both nodes.
SMALL = [
    "trainer.ranks=3",
    "launcher.threads=3",
    "rollout.engines=1",
    "agent.workers=2",
    f"trainer.steps={STEPS}",
    "data.train_batch_groups=3",
    "rollout.group_size=4",
    "eval.tasks=4",
    *HARDLY_WARM,
]


@dataclass(frozen=True)
class RayHosts:
    """A cluster: the namespace and address of its head, and the variables by which a client presents the token."""

    head: str
    address: str
    token: dict[str, str]


def within(host: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host, *command]


@pytest.fixture
def cluster(hosts: dict[str, str]) -> Iterator[RayHosts]:
    (head, address), (other, other_address) = hosts.items()
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(16)}
    ours = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    environment = {**os.environ, **token, **ours}

    def start(host: str, own_address: str, *options: str) -> None:
        common = [f"--node-ip-address={own_address}", "--num-cpus=7", f"--object-store-memory={80 * 2**20}"]
        command = within(host, RAY, "start", *common, *options)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # pytest's is too long for the sockets in it
        try:
            start(head, address, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}")
            start(other, other_address, f"--address={address}:{PORT}")
            yield RayHosts(head, f"{address}:{PORT}", token)
        finally:
            end_processes(head)
            end_processes(other)


def end_processes(host: str) -> None:
    """Kill all that runs in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True, timeout=20)
    for pid in map(int, listed.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def launch(cluster: RayHosts, folder: Path, name: str, token: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    options = ["--launcher", "ray", "--address", cluster.address, "--mode", "disaggregated", "--name", name]
    command = within(cluster.head, RL_ASYNC, "launch", "--config", "calculator", *options, *SMALL)
    environment = os.environ | {"HOME": str(folder)} | token  # a home without a token of the user's own
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


def test_ranks_on_two_hosts_train_together(cluster: RayHosts, workplace: Path) -> None:
    done = launch(cluster, workplace, "x", cluster.token)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    run = workplace / "runs" / "x"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == list(range(STEPS))
    places = (run / "logs" / "launcher.log").read_text()
    of_ranks = {line.rpartition(" ")[2] for line in places.splitlines() if ": on " in line and "trainer-" in line}
    assert of_ranks == {"10.77.0.1", "10.77.0.2"}
    audit = subprocess.run([RL_ASYNC, "audit", str(run)], capture_output=True, text=True, timeout=100)
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.nightly
def test_a_wrong_token_and_none_are_explained_by_what_ray_says(cluster: RayHosts, workplace: Path) -> None:
    for token in ({"RAY_AUTH_TOKEN": "wrong"}, {}):
        refused = launch(cluster, workplace, "y", token)
        assert refused.returncode == 2 and "uthentication token" in refused.stderr, "Ray's words, not our hint's"
        assert not (workplace / "runs" / "y").exists()
