"""Whole runs of a mixture of experts: each backend trains one, and the engines have its weights."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.command import HARDLY_WARM, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 3
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.ranks=2",
    "trainer.checkpoint_every=2",
    "algorithm.entropy_coef=0.01",  # so that there is a gradient, whatever the rewards
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]
MEGATRON = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        ("disaggregated", ["trainer.backend=fsdp2"]),
        ("colocated", ["trainer.backend=fsdp2", "trainer.activation_checkpointing=true"]),
        pytest.param("disaggregated", ["trainer.backend=megatron", "trainer.expert_parallel=2"], marks=MEGATRON),
    ],
)
def test_engines_have_the_experts_that_were_trained(workplace: Path, mode: str, sizes: list[str]) -> None:
    succeed(workplace, "launch", "--mode", mode, "--config", "calculator-moe", "--name", "run", *SMALL, *sizes)
    run = workplace / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    agreements = [row["router/agreement"] for row in rows]
    assert agreements[0] > 0.999, "the engine sampled with the same weights"
    assert all(0.0 < agreement <= 1.0 for agreement in agreements)
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) < 1e-4, "engines got other weights"
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/run")
