"""The loss and the gradient that a real trainer process applies to a recorded batch, against a plain float64 reference.

The reference knows nothing of the trainer: row by row, token by token, from the recorded trajectories and the model.
"""

import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_async.configs.load import dump
from rl_async.configs.schema.algorithm import AlgorithmConfig, CorrectionOptions
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.messages import Sampling, Trajectory
from rl_async.recording import write_trajectories
from tests.conftest import make_rows
from tests.e2e.small_runs import APART, HARDLY_WARM, succeed
from tests.support.forked import run_ranks

pytestmark = pytest.mark.e2e

TEMPERATURE = 0.8
EPOCHS = 2  # in the second the policy has moved from pi_old, else no clip would act
LEARNING_RATE = 3e-3
TokenLoss = Callable[[Tensor, float, float, float], Tensor]  # log pi_theta, log pi_old, log mu, advantage


def trained(folder: Path, model: Path, rows: list[Trajectory], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Metrics of one step on the recorded rows, as the trainer wrote them."""
    write_trajectories(folder / "trajectories" / "step-000000-lineage0-rank0.jsonl.gz", rows)
    config = RunConfig(
        model=ModelConfig(path=str(model), dtype="float32"),
        data=DataConfig(path="none"),
        algorithm=algorithm,
        trainer=TrainerConfig(
            steps=1,
            minibatches=1,
            epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            max_tokens_per_microbatch=60,
            grad_clip=1e9,
        ),
    )
    (folder / "config.yaml").write_text(dump(config))
    run_ranks("rl_async.trainer", "--run", str(folder), "--replay", str(folder), ranks=1, timeout_s=120)
    metrics: dict[str, float] = json.loads((folder / "metrics.jsonl").read_text())
    return metrics


def recorded() -> list[Trajectory]:
    rows = make_rows(0)
    for row in rows:
        row.sampling = Sampling(temperature=TEMPERATURE)
    rows[3].reward = 0.25  # groups with a standard deviation that is not one half
    return rows


def advantages(rows: list[Trajectory]) -> list[float]:
    """GRPO: the reward in standard deviations of its group."""
    result = []
    for row in rows:
        group = [r.reward for r in rows if r.group_id == row.group_id]
        result.append((row.reward - statistics.mean(group)) / (statistics.stdev(group) + 1e-4))
    return result


def sampled_logprobs(model: torch.nn.Module, rows: list[Trajectory]) -> list[list[Tensor]]:
    """log pi of every sampled token, by row."""
    result = []
    for row in rows:
        ids = torch.tensor(row.token_ids.tolist())
        logits = model(ids[None]).logits[0] / TEMPERATURE
        result.append([logits[t - 1].log_softmax(0)[ids[t]] for t in range(1, len(ids)) if row.loss_mask[t]])
    return result


def reference(folder: Path, rows: list[Trajectory], per_token: TokenLoss, by_row: bool) -> tuple[float, float]:
    """Loss and gradient norm in float64, means over the epochs, each of which ends with a step of AdamW.

    A loss is a mean over tokens, or over rows of the mean over their tokens.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    with torch.no_grad():
        old = [[logprob.item() for logprob in row] for row in sampled_logprobs(model, rows)]
    found = []
    for _ in range(EPOCHS):
        means, tokens = list[Tensor](), list[Tensor]()
        for i, now in enumerate(sampled_logprobs(model, rows)):
            behaviour, advantage = rows[i].logprobs[rows[i].loss_mask].tolist(), advantages(rows)[i]
            losses = [per_token(*token, advantage) for token in zip(now, old[i], behaviour, strict=True)]
            means.append(torch.stack(losses).mean())
            tokens += losses
        optimizer.zero_grad()
        loss = torch.stack(means if by_row else tokens).mean()
        loss.backward()
        squares = sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None)
        found.append((loss.item(), math.sqrt(squares)))
        optimizer.step()
    return statistics.mean(loss for loss, _ in found), statistics.mean(norm for _, norm in found)


def decoupled(logprob: Tensor, old: float, behaviour: float, advantage: float) -> Tensor:
    """Around recomputed old log-probabilities, weighted by min(pi_old / mu, 1.05)."""
    weight = min(math.exp(old - behaviour), 1.05)
    ratio = (logprob - old).exp()
    return -weight * torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def bypassed(logprob: Tensor, old: float, behaviour: float, advantage: float) -> Tensor:
    """Clipped around the rollout's own log-probabilities."""
    ratio = (logprob - behaviour).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def plain(logprob: Tensor, old: float, behaviour: float, advantage: float) -> Tensor:
    return -advantage * logprob


CASES = {
    "decoupled": (
        AlgorithmConfig(correction="decoupled_token_is", correction_options=CorrectionOptions(cap=1.05)),
        decoupled,
        False,
    ),
    "bypassed": (AlgorithmConfig(correction="bypass_ppo_clip"), bypassed, False),
    "plain": (
        AlgorithmConfig(loss="reinforce", correction="disabled", aggregation="seq-mean-token-mean"),
        plain,
        True,
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "bypassed")) for case in CASES]
)
def test_the_trainer_applies_the_reference_loss(model_folder: Path, tmp_path: Path, case: str) -> None:
    algorithm, per_token, by_row = CASES[case]
    rows = recorded()
    metrics = trained(tmp_path, model_folder, rows, algorithm)
    loss, norm = reference(model_folder, rows, per_token, by_row)
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metrics["loss/grad_norm"] == pytest.approx(norm, rel=1e-4)
    if case != "plain":
        assert 0.02 < metrics["loss/clip_fraction"] < 0.9, "some tokens are clipped and some are not"


# Whole runs on trainer ranks that divide the model or the rows: each row is trained and recorded once, and engines get
# the weights.

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


@pytest.mark.slow
@pytest.mark.timeout(600)
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
        pytest.param("calculator-moe", "disaggregated", [], marks=pytest.mark.nightly),
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
