"""`rl-async eval`: a whole run without a trainer, whose launcher publishes with a trainer's key."""

from pathlib import Path

import pytest

from tests.e2e.command import HARDLY_WARM, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def test_an_evaluation_ends_with_a_mean_reward_and_its_trajectories(workplace: Path) -> None:
    said = succeed(workplace, "eval", "--config", "calculator", *HARDLY_WARM, "eval.tasks=4", "rollout.max_tokens=8")
    assert "over 4 trajectories" in said
    (run,) = (workplace / "runs").glob("eval-*")
    assert (run / "trajectories" / "eval-000000.jsonl.gz").exists()
