"""`rl-async eval`: a whole run without a trainer, whose launcher publishes with a trainer's key; then `compare`."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import HARDLY_WARM, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def test_an_evaluation_ends_with_a_table_and_its_episodes(workplace: Path) -> None:
    wanted = ("eval.tasks=4", "eval.samples=2", "rollout.max_tokens=8", "--jsonl", "episodes.jsonl")
    said = succeed(workplace, "eval", "--config", "calculator", *HARDLY_WARM, *wanted)
    assert "avg@k" in said and "pass@k" in said
    episodes = [json.loads(line) for line in (workplace / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 8 and len({(each["task"], each["sample"]) for each in episodes}) == 8
    assert all(each["scored"] and each["answer"] for each in episodes)
    (run,) = (workplace / "runs").glob("eval-*")
    compared = json.loads(succeed(workplace, "compare", f"{run}@0", str(run), "--json"))
    assert (compared["sources"][0]["tasks"], compared["sources"][0]["p"], compared["left_out"]) == (4, 1.0, 0)
