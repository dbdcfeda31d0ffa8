"""Both backends in bfloat16: float32 masters and gradients, and numbers as near to each other as bfloat16 allows."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.contracts.backends.bfloat16_worker import RATE, STEPS
from tests.contracts.backends.models import make_model, whole_batch
from tests.support.forked import run_ranks

pytestmark = pytest.mark.timeout(600)
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
MEGATRON = {"backend": "megatron"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"backend": "fsdp2"}),
    "megatron TP2": (2, MEGATRON | {"tensor_parallel": 2}),
    "megatron PP2": (2, MEGATRON | {"pipeline_parallel": 2}),
    "megatron DP2": (2, MEGATRON),
}
Ran = tuple[dict[str, Tensor], list[tuple[float, float]]]


def run(root: Path, model: Path, layout: str) -> Ran:
    ranks, sizes = LAYOUTS[layout]
    out = root / layout.replace(" ", "-")
    out.mkdir()
    run_ranks("tests.contracts.backends.bfloat16_worker", json.dumps(sizes), str(model), str(out), ranks=ranks)
    return load_file(out / "found.safetensors"), json.loads((out / "steps.json").read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    root = tmp_path_factory.mktemp("bfloat16")
    make_model("qwen3", root / "model")
    return root / "model", run(root, root / "model", "fsdp2")


def stage(found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.partition(".")[2]: tensor for key, tensor in found.items() if key.startswith(f"{name}.")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_float32_masters(reference: tuple[Path, Ran], tmp_path: Path, layout: str) -> None:
    if layout.startswith("megatron") and not HAS_MEGATRON:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    model, other = reference
    found, steps = other if layout == "fsdp2" else run(tmp_path, model, layout)
    stored, masters = load_file(model / "model.safetensors"), stage(found, "masters")
    imported, trained = stage(found, "imported"), stage(found, "trained")
    assert imported.keys() == stored.keys() == masters.keys()
    for name, tensor in stored.items():
        assert imported[name].equal(tensor.to(torch.bfloat16)), f"{name} is read in float32 and rounded once"
        assert masters[name].dtype == torch.float32
        assert (masters[name] - tensor).abs().max() < 2 * STEPS * RATE, f"{name} begins unrounded"
        assert trained[name].equal(masters[name].to(torch.bfloat16)), name
        assert stage(found, "loaded")[name].equal(trained[name]), name
    moved = sum(int((masters[name] != stored[name]).sum()) for name in stored)
    same = sum(int((trained[name] == imported[name]).sum()) for name in stored)
    total = sum(tensor.numel() for tensor in stored.values())
    assert moved > 0.9 * total and same > 0.9 * total, f"{moved} masters moved, {same} rounded weights did not"

    (batch,) = whole_batch()
    real = torch.arange(batch.mask.shape[1]) < batch.lengths[:, None] - 1
    apart = (found["logprobs"] - other[0]["logprobs"])[real].abs()
    assert apart.mean() < 0.02, "the mean difference of log-probabilities that two orders of bfloat16 sums have"
    for (loss, norm), (loss_too, norm_too) in zip(steps, other[1], strict=True):
        assert loss == pytest.approx(loss_too, abs=0.02)
        assert norm == pytest.approx(norm_too, rel=0.03)
