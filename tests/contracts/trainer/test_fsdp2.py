"""The FSDP2 backend on real gloo ranks: what is learned does not depend on ranks or micro-batches."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import make_rows
from tests.contracts.trainer.workers.update import RATE, STEPS
from tests.support.forked import run_ranks
from tests.support.rounding import assert_trained_alike

# Of the model of ``model_folder``, whose longest sums are those of gradients over all tokens of a batch.
LAYERS, TERMS = 2, sum(len(row.token_ids) for row in make_rows(0))


def train(model: Path, out: Path, ranks: int, tokens: int, correction: str, sizes: str = "{}") -> str:
    """Run ``update_worker`` on ``ranks`` processes; returns the metrics, which all of them must agree on."""
    arguments = [str(model), str(out), str(tokens), correction, sizes]
    told = run_ranks("tests.contracts.trainer.workers.update", *arguments, ranks=ranks, timeout_s=120)
    assert len(set(told)) == 1, "ranks disagree about the metrics"
    return told[0]


@pytest.mark.parametrize("correction", ["decoupled_token_is", "bypass_ppo_clip"])
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
