"""A run whose episodes are played by agent programs alone, through its own gateway and through one that joins it."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_async.process.http_auth import TOKEN_FILE, token_file
from tests.e2e.small_runs import APART, HARDLY_WARM, RL_ASYNC

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("openai", reason="install the openai client: pip install openai")
ROOT = Path(__file__).parents[3]
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    "trainer.steps=4",
    "trainer.checkpoint_every=2",
    "eval.every=4",
    "eval.tasks=4",
    "queue.lease_s=5",
    *HARDLY_WARM,
    "launcher.stop_timeout_s=5",
    "agent.gateway={}",
]


@pytest.fixture
def start(workplace: Path) -> Iterator[Any]:
    """Starts a process in ``workplace``; what is left of it is killed by pid."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, **environment: str) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=workplace, env=os.environ | environment, **pipes)  # type: ignore[call-overload]
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(path: Path, process: "subprocess.Popen[str]") -> Path:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.1)
    return path


def test_agent_programs_train_a_run_through_two_gateways(workplace: Path, start: Any) -> None:
    run = workplace / "runs" / "open"
    launch = start(RL_ASYNC, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", "open", *SMALL)
    url = json.loads(wait_for(run / "endpoints.json", launch).read_text())["gateway"]
    second = start(RL_ASYNC, "gateway", str(run))
    while not (line := second.stdout.readline()).startswith("gateway: "):
        assert line, "the second gateway ended"
    token = {TOKEN_FILE: str(token_file(run, "gateway"))}
    programs = [
        start(sys.executable, str(ROOT / "tests" / "e2e" / "gateway" / "program.py"), line.split()[1], **token),
        start(sys.executable, str(ROOT / "examples" / "gateway_agent.py"), url, "4", **token),
    ]
    wait_for(run / "metrics.jsonl", launch)
    process_of(run, "rl_async.agent_loop.gateway").kill()  # its episodes are lost, and handed out again
    output, _ = launch.communicate(timeout=240)
    assert launch.returncode == 0, output[-4000:]
    assert f"gateway: {url}" in output
    assert second.wait(60) == 0, "the gateway that joined did not hear that the run is over"
    played = [process.communicate(timeout=60)[0] for process in programs]
    assert [process.returncode for process in programs] == [0, 0], played
    assert all(int(text.split()[-3]) > 0 for text in played), played
    audit = subprocess.run([RL_ASYNC, "audit", str(run)], cwd=workplace, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    check_rows(run)


def process_of(run: Path, module: str) -> psutil.Process:
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if module in (process.info["cmdline"] or []) and process.info["cwd"] == str(run.parents[1]):
            return process
    raise AssertionError(f"no process {module}")


def check_rows(run: Path) -> None:
    """Every sample of every step is there; those of the second gateway's program have several rows with one reward.

    Three rows, or two if its two conversations begin with the same words.
    """
    lines = [json.loads(line) for line in (run / "trained.jsonl").read_text().splitlines()]
    rows = Counter((line["group"], line["sample"]) for line in lines)
    assert len(rows) == 4 * 4 * 4 and {1, 3} <= set(rows.values()) <= {1, 2, 3}
    recorded = []
    for path in (run / "trajectories").glob("step-*"):
        with gzip.open(path, "rt") as file:
            recorded += [json.loads(line) for line in file]
    assert len(recorded) == len(lines)
    rewards: dict[str, set[float]] = {}
    for row in recorded:
        rewards.setdefault(row["episode_id"], set()).add(row["reward"])
        assert len(row["correction"]["weights"]) == sum(row["loss_mask"])
        assert sum(end - start for _, start, end in row["versions"]) == sum(row["loss_mask"]) > 0
    assert all(len(values) == 1 for values in rewards.values())
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["batch/episodes"] for step in steps] == [16] * 4
    assert sum(step["batch/trajectories"] for step in steps) == len(lines)
    assert max(step["staleness/max"] for step in steps) <= 1
    assert steps[0]["correction/logprob_diff_max"] <= APART
