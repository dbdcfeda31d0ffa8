"""A run whose agent program asks for JSON formats: what was sampled under a mask is trained with its own weight."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rl_async.process.http_auth import TOKEN_FILE, token_file
from tests.e2e.small_runs import APART, HARDLY_WARM, RL_ASYNC

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("openai", reason="install the openai client: pip install openai")
pytest.importorskip("llguidance", reason="no masks of tokens here; install them: pip install 'rl-async[json]'")
PROGRAM = Path(__file__).parent / "formats_program.py"
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    "trainer.steps=3",
    "eval.every=0",
    *HARDLY_WARM,
    "launcher.stop_timeout_s=5",
    "agent.gateway={unsupported: refuse}",
]


def test_answers_in_a_json_format_are_trained(workplace: Path) -> None:
    run = workplace / "runs" / "formats"
    launch = subprocess.Popen(
        [RL_ASYNC, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", "formats", *SMALL],
        cwd=workplace,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        url = gateway_of(run, launch)
        program = subprocess.run(
            [sys.executable, str(PROGRAM), url],
            env=os.environ | {TOKEN_FILE: str(token_file(run, "gateway"))},
            capture_output=True,
            text=True,
            timeout=240,
        )
        output, _ = launch.communicate(timeout=120)
    finally:
        if launch.poll() is None:
            launch.kill()
            launch.communicate()
    assert launch.returncode == 0, output[-4000:]
    assert program.returncode == 0 and int(program.stdout.split()[0]) >= 48, program.stdout + program.stderr
    audit = subprocess.run([RL_ASYNC, "audit", str(run)], cwd=workplace, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert 0 < step["constrained/share"] < 1 and 0 < step["constrained/weight_mean"] < 1
    assert steps[0]["correction/logprob_diff_max"] <= APART, "tokens without a mask come from the trainer's policy"
    rows = [row for path in (run / "trajectories").glob("step-*") for row in recorded(path)]
    assert len(rows) == 48
    for row in rows:
        check(row, fresh=all(version == [0, 0] for version, _, _ in row["versions"]))


def gateway_of(run: Path, launch: "subprocess.Popen[str]") -> str:
    deadline = time.monotonic() + 120
    while not (run / "endpoints.json").exists():
        assert launch.poll() is None, launch.communicate()[0][-4000:]
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)
    return str(json.loads((run / "endpoints.json").read_text())["gateway"])


def recorded(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def check(row: dict[str, Any], *, fresh: bool) -> None:
    """The second answer was sampled under a mask, which leaves at most all of the policy's probability."""
    sampled = [place for place, mine in enumerate(row["loss_mask"]) if mine]
    ((start, end),) = row["constrained"]
    assert 0 < start < end == len(sampled)
    weights, ours = row["correction"]["weights"], row["correction"]["logprobs"]
    theirs = [row["logprobs"][place] for place in sampled]
    assert all(weight <= 1.0 for weight in weights[start:end])
    if fresh:
        assert all(mine <= engine + 1e-3 for mine, engine in zip(ours[start:end], theirs[start:end], strict=True))
        assert min(weights[start:end]) < 0.9, "the mask left nearly all everywhere"
