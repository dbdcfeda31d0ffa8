"""Whole runs whose trainer is Megatron-Core on CPU ranks: every row is trained and recorded once."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.command import HARDLY_WARM, succeed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
    ),
]
STEPS = 3
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    "trainer.backend=megatron",
    "algorithm.entropy_coef=0.01",  # so that there is a gradient, whatever the rewards
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]


@pytest.mark.parametrize(
    ("preset", "mode", "sizes"),
    [
        ("calculator", "disaggregated", ["trainer.ranks=2", "trainer.tensor_parallel=2"]),
        ("calculator", "colocated", ["trainer.ranks=2", "trainer.pipeline_parallel=2"]),
        ("calculator", "colocated", ["trainer.ranks=2", "algorithm.kl.coef=0.01"]),
        ("calculator-gae", "colocated", ["trainer.ranks=2", "trainer.tensor_parallel=2", "critic.warmup_steps=0"]),
    ],
)
def test_a_run_trains_every_row_once(workplace: Path, preset: str, mode: str, sizes: list[str]) -> None:
    succeed(workplace, "launch", "--mode", mode, "--config", preset, "--name", "run", *SMALL, *sizes)
    run = workplace / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    assert all(("critic/grad_norm" in row) == (preset == "calculator-gae") for row in rows)
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) < 1e-4, "engines got other weights"
    trained = (run / "trained.jsonl").read_text().splitlines()
    assert len(trained) == len(set(trained)) == STEPS * 4 * 4
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/run")
