"""Whole trainer steps on Megatron-Core's ranks: the same weights and metrics as FSDP2 on one, however they are laid
out."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.contracts.backends.models import make_model
from tests.contracts.trainer.test_training import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
    ),
]
LAYOUTS = {
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "DP2": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 whose vocabulary does not divide."""
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen2-tied", folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], str]:
    """Weights and metrics of FSDP2 on one rank."""
    out = tmp_path_factory.mktemp("alone") / "weights.safetensors"
    metrics = train(model, out, 1, 60, "decoupled_seq_is")
    return load_file(out), metrics


def numbers(told: str) -> dict[str, float]:
    """The metrics that were printed, but for how equal the ranks' work is."""
    metrics: dict[str, float] = ast.literal_eval(told)
    return {name: value for name, value in metrics.items() if not name.endswith("_imbalance")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_what_is_learned(
    model: Path, tmp_path: Path, alone: tuple[dict[str, Tensor], str], layout: str
) -> None:
    """With a reference, and micro-batches that the layout of ranks decides on."""
    sizes = json.dumps({"backend": "megatron", "ranks": 2} | LAYOUTS[layout])
    out = tmp_path / "weights.safetensors"
    metrics = numbers(train(model, out, 2, 60, "decoupled_seq_is", sizes))
    weights, (expected, told) = load_file(out), alone
    assert metrics == pytest.approx(numbers(told), rel=1e-3, abs=1e-4)
    before = load_file(model / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert max((weights[name] - before[name]).abs().max().item() for name in before) > 1e-4
    # AdamW divides by the root of the squared gradient, which magnifies the last bits of tiny gradients
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) < 2e-5
