"""The recipe of a search agent, whole: data, warm start, training and audit."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from rl_async.recording import read_trajectories
from tests.e2e.command import succeed

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_search_agent_learns_to_search(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    # Paths in recipes are relative to the repository's root.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run([sys.executable, "examples/recipes/search/search.py"], cwd=tmp_path, check=True, timeout=120)
    config = ["--config", "examples/recipes/search/config.yaml", "--name", "search", "trainer.steps=14", "eval.every=0"]
    succeed(tmp_path, "launch", "--mode", "disaggregated", *config, timeout_s=800)
    run = tmp_path / "runs" / "search"
    assert "ok" in succeed(tmp_path, "audit", str(run))
    rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    # It rose from 0.28 to 0.65 and more; 432 episodes are behind each of these means.
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.15, rewards
    searches = [
        mean(sum(turn.role == "tool" for turn in row.turns) for row in read_trajectories(file))
        for file in sorted((run / "trajectories").glob("step-*"))
    ]
    assert searches[-1] > searches[0], searches
