"""A whole run whose trainer ranks share every row: each is trained and recorded once, and engines get its weights."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import HARDLY_WARM, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.ranks=2",
    "trainer.sequence_parallel=2",
    "algorithm.kl.coef=0.01",
    "algorithm.entropy_coef=0.01",  # so that there is a gradient, whatever the rewards
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_a_run_trains_every_row_once(workplace: Path, mode: str) -> None:
    succeed(workplace, "launch", "--mode", mode, "--config", "calculator", "--name", "run", *SMALL)
    run = workplace / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) < 1e-4, "engines got other weights"
    assert max(row["correction/logprob_diff_max"] for row in rows[:1]) < 1e-3, "ranks read the rows otherwise"
    trained = (run / "trained.jsonl").read_text().splitlines()
    assert len(trained) == len(set(trained)) == STEPS * 4 * 4
    recorded = [path.name for path in (run / "trajectories").glob("step-*.jsonl.gz")]
    assert sorted(recorded) == [f"step-{step:06d}-lineage0-rank0.jsonl.gz" for step in range(STEPS)]
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/run")
