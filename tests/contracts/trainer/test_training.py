"""Training on real gloo ranks: results independent of ranks and micro-batches, precision, divergence, last steps."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import make_rows
from tests.contracts.backends.models import make_model
from tests.contracts.trainer.workers.final_evaluation import COLLECTIVE_S
from tests.contracts.trainer.workers.update import RATE, STEPS
from tests.support.forked import Forked, run_ranks
from tests.support.rounding import assert_trained_alike

# Of the model of ``model_folder``, whose longest sums are those of gradients over all tokens of a batch.
LAYERS, TERMS = 2, sum(len(row.token_ids) for row in make_rows(0))


def train(model: Path, out: Path, ranks: int, tokens: int, correction: str, sizes: str = "{}") -> str:
    """Run ``update_worker`` on ``ranks`` processes; returns the metrics, which all of them must agree on."""
    arguments = [str(model), str(out), str(tokens), correction, sizes]
    told = run_ranks("tests.contracts.trainer.workers.update", *arguments, ranks=ranks, timeout_s=120)
    assert len(set(told)) == 1, "ranks disagree about the metrics"
    return told[0]


@pytest.mark.parametrize("correction", ["decoupled_token_is", pytest.param("bypass_ppo_clip", marks=pytest.mark.slow)])
def test_ranks_and_micro_batches_do_not_change_what_is_learned(
    model_folder: Path, tmp_path: Path, correction: str
) -> None:
    metrics = {}
    for name, ranks, tokens in (("one", 1, 10_000), ("small", 1, 40), ("two", 2, 60)):
        metrics[name] = train(model_folder, tmp_path / f"{name}.safetensors", ranks, tokens, correction)
    if correction.startswith("decoupled"):
        assert all("'correction/weight_mean': 1.0," in told for told in metrics.values()), "not normalised"
    whole = load_file(tmp_path / "one.safetensors")
    before = load_file(model_folder / "model.safetensors")
    assert any((whole[k] - before[k]).abs().max() > 1e-4 for k in whole)
    for other in ("small", "two"):
        weights = load_file(tmp_path / f"{other}.safetensors")
        assert_trained_alike(weights, whole, rate=RATE, steps=STEPS, layers=LAYERS, terms=TERMS)


@pytest.mark.timeout(600)
def test_masters_gradients_and_moments_are_float32(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    run_ranks("tests.contracts.trainer.workers.precision", str(tmp_path), ranks=2)


def test_an_infinite_reward_names_step_and_groups(model_folder: Path) -> None:
    worker = Forked("tests.contracts.trainer.workers.diverge", str(model_folder))
    out, errors = worker.communicate(timeout=120)
    assert worker.returncode == 3, errors[-2000:]
    assert "step 7, mini-batch 0 of 1, groups [28, 29, 30, 31]" in out
    assert "must be finite" in out


@pytest.mark.timeout(180)
def test_ranks_wait_for_a_final_evaluation_longer_than_a_collective_takes(tmp_path: Path) -> None:
    waited = run_ranks("tests.contracts.trainer.workers.final_evaluation", str(tmp_path), ranks=2, timeout_s=120)
    assert all(float(seconds) > COLLECTIVE_S for seconds in waited)
