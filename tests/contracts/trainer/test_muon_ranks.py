"""Muon on gloo ranks does what torch's own does with whole matrices in one process, and continues bit by bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.contracts.backends.models import make_model
from tests.contracts.trainer.test_saver import go_on, same
from tests.contracts.trainer.workers.muon import STEPS, TRAINING, gradient_of
from tests.support.forked import run_ranks

RATE, DECAY = TRAINING["learning_rate"], TRAINING["weight_decay"]


def expected(first: dict[str, Tensor]) -> dict[str, Tensor]:
    """What torch's Muon and AdamW make of whole weights; every expert is a matrix of its own."""
    whole = {name: tensor.clone() for name, tensor in first.items()}
    is_matrix = {name: ".layers." in name and tensor.dim() > 1 for name, tensor in whole.items()}
    parts = {
        name: [part.requires_grad_() for part in (tensor.unbind() if tensor.dim() == 3 else [tensor])]
        for name, tensor in whole.items()
    }
    muon = torch.optim.Muon(
        [part for name in whole if is_matrix[name] for part in parts[name]],
        lr=RATE,
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [part for name in whole if not is_matrix[name] for part in parts[name]]
    adamw = torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.95), fused=True)
    for step in range(STEPS):
        for name, tensor in whole.items():
            gradient = gradient_of(step, name, tensor.shape)
            for part, of in zip(parts[name], gradient.unbind() if tensor.dim() == 3 else [gradient], strict=True):
                part.grad = of
        muon.step()
        adamw.step()
    return {name: torch.stack(those) if len(those) > 1 else those[0].detach() for name, those in parts.items()}


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        # Two ranks have whole experts of the one, and rows of each expert of the other.
        pytest.param("qwen3-moe", 2, {}, marks=pytest.mark.slow),
        ("qwen3-moe-odd", 2, {}),
        pytest.param("qwen3-moe-odd", 4, {"replicas": 2}, marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_whole_matrices(
    tmp_path: Path, family: str, ranks: int, options: dict[str, Any]
) -> None:
    make_model(family, tmp_path / "model")
    out = tmp_path / "found.safetensors"
    arguments = [str(tmp_path / "model"), str(out), json.dumps(options)]
    run_ranks("tests.contracts.trainer.workers.muon", *arguments, ranks=ranks)
    found = load_file(out)

    def kind(of: str) -> dict[str, Tensor]:
        return {key.partition("|")[2]: tensor for key, tensor in found.items() if key.startswith(f"{of}|")}

    right = expected(kind("first"))
    moments = kind("momentum_buffer")
    assert moments.keys() == {name for name, tensor in right.items() if ".layers." in name and tensor.dim() > 1}
    assert moments.keys().isdisjoint(kind("exp_avg")) and (moments | kind("exp_avg")).keys() == right.keys()
    for name, tensor in kind("last").items():
        assert tensor.equal(right[name]), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_continues_bit_by_bit_on_any_ranks(model_folder: Path, tmp_path: Path) -> None:
    through, halves = tmp_path / "through", tmp_path / "halves"
    for root in (through, halves):
        root.mkdir()
    go_on(model_folder, through, 2, 0, 2, optimizer="muon")
    go_on(model_folder, halves, 2, 0, 1, optimizer="muon")
    saved = load_file(halves / "saved-2.safetensors")
    go_on(model_folder, halves, 1, 1, 1, optimizer="muon")
    assert same(saved, load_file(halves / "loaded-1.safetensors"))
    assert any(name.endswith("|momentum_buffer") and tensor.any() for name, tensor in saved.items())
    go_on(model_folder, halves, 2, 1, 2, optimizer="muon")
    assert same(load_file(through / "saved-2.safetensors"), load_file(halves / "saved-2.safetensors"))
