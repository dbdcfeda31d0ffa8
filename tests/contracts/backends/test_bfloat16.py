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
from tests.contracts.backends.models import LAYERS, TERMS, assert_alike, make_model, whole_batch
from tests.support.forked import run_ranks, start_ranks
from tests.support.rounding import assert_near, pass_rounding

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


@pytest.mark.timeout(600)
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


# Router replay on every backend and layout: the same numbers and gradients as FSDP2 on one rank.

REPLAY_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2 x2": (2, {"activation_checkpointing": True}),
    "megatron x1": (1, MEGATRON),
    "megatron EP2": (2, MEGATRON | {"expert_parallel": 2}),
    "megatron x2 that share rows": (2, MEGATRON | {"sequence_parallel": 2}),
    "megatron PP2": (2, MEGATRON | {"pipeline_parallel": 2}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", sorted(REPLAY_LAYOUTS))
def test_records_lead_to_the_same_numbers_and_weights(layout: str, tmp_path: Path) -> None:
    ranks, sizes = REPLAY_LAYOUTS[layout]
    if sizes.get("backend") == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    make_model("qwen3-moe", tmp_path / "model")
    told = []
    for number, (size, options) in enumerate([(1, {}), (ranks, sizes)]):
        out = tmp_path / f"{number}.safetensors"
        arguments = [json.dumps(options), str(tmp_path / "model"), str(out)]
        run_ranks("tests.contracts.backends.replay", *arguments, ranks=size, timeout_s=280)
        told.append(load_file(out))
    wanted, found = told
    assert (wanted["logprobs"] - wanted["logprobs without"]).abs().max() > 1e-2, "the record changes nothing"
    assert wanted.keys() - {"agreement"} == found.keys() - {"agreement"}
    outputs = {"logprobs", "logprobs without", "agreement"}
    for name in outputs & found.keys():
        size = wanted[name].abs().max().item()
        assert_near(found[name], wanted[name], pass_rounding(size, LAYERS, TERMS), name)
    of_step, expected = ({name: told[name] for name in told.keys() - outputs} for told in (found, wanted))
    assert_alike(of_step, expected, steps=1)
    assert ("agreement" in found) == ("pipeline_parallel" not in sizes)


def test_tensor_parallel_ranks_that_must_replay_do_not_start(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    make_model("qwen3-moe", tmp_path / "model")
    options = MEGATRON | {"tensor_parallel": 2, "expert_parallel": 2, "router_replay": "always"}
    arguments = [json.dumps(options), str(tmp_path / "model"), str(tmp_path / "out")]
    processes = start_ranks("tests.contracts.backends.replay", *arguments, ranks=2)
    errors = [process.communicate(280)[1] for process in processes]
    assert all("UserError: trainer.router_replay=always" in error for error in errors), errors
