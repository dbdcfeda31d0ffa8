"""Whole runs on trainer ranks that divide the model or the rows: each row is trained and recorded once, and engines get
the weights."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import HARDLY_WARM, succeed
from tests.e2e.small_runs import APART

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3
SMALL = [
    "data.train_batch_groups=4",
    "rollout.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.ranks=2",
    "trainer.checkpoint_every=2",
    # So that there is a gradient, whatever the rewards.
    "algorithm.entropy_coef=0.01",
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]
MEGATRON = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)


def megatron(preset: str, mode: str, *sizes: str, more: Sequence[pytest.MarkDecorator] = ()) -> Any:
    return pytest.param(preset, mode, ["trainer.backend=megatron", *sizes], marks=[MEGATRON, *more])


@pytest.mark.parametrize(
    ("preset", "mode", "sizes"),
    [
        megatron("calculator", "disaggregated", "trainer.tensor_parallel=2"),
        megatron("calculator", "colocated", "trainer.pipeline_parallel=2"),
        megatron("calculator", "colocated", "algorithm.kl.coef=0.01", more=[pytest.mark.nightly]),
        megatron("calculator-gae", "colocated", "trainer.tensor_parallel=2", "critic.warmup_steps=0"),
        ("calculator", "disaggregated", ["trainer.sequence_parallel=2", "algorithm.kl.coef=0.01"]),
        pytest.param(
            *("calculator", "colocated", ["trainer.sequence_parallel=2", "algorithm.kl.coef=0.01"]),
            marks=pytest.mark.nightly,
        ),
        ("calculator-moe", "disaggregated", []),
        ("calculator-moe", "colocated", ["trainer.activation_checkpointing=true"]),
        megatron("calculator-moe", "disaggregated", "trainer.expert_parallel=2"),
    ],
)
def test_a_run_trains_every_row_once(workplace: Path, preset: str, mode: str, sizes: list[str]) -> None:
    succeed(workplace, "launch", "--mode", mode, "--config", preset, "--name", "run", *SMALL, *sizes)
    run = workplace / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(row["loss/grad_norm"] > 0 for row in rows)
    assert all(("critic/grad_norm" in row) == (preset == "calculator-gae") for row in rows)
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) <= APART, "engines got other weights"
    trained = (run / "trained.jsonl").read_text().splitlines()
    assert len(trained) == len(set(trained)) == STEPS * 4 * 4
    assert "ok: every admitted group" in succeed(workplace, "audit", "runs/run")
    if preset == "calculator-moe":
        agreements = [row["router/agreement"] for row in rows]
        assert agreements[0] > 0.999, "the engine sampled with the same weights"
        assert all(0.0 < agreement <= 1.0 for agreement in agreements)
    if "trainer.sequence_parallel=2" in sizes:
        assert rows[0]["correction/logprob_diff_max"] <= APART, "ranks read the rows otherwise"
        recorded = [path.name for path in (run / "trajectories").glob("step-*.jsonl.gz")]
        assert sorted(recorded) == [f"step-{step:06d}-lineage0-rank0.jsonl.gz" for step in range(STEPS)]
