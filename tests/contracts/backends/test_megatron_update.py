"""Whole trainer steps on Megatron-Core's ranks: the same weights and metrics as FSDP2 on one, however they are laid
out."""

import ast
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.contracts.backends.models import LAYERS, TERMS, make_model
from tests.contracts.trainer.test_ranks import train as critic_train
from tests.contracts.trainer.test_training import train
from tests.support.rounding import assert_trained_alike

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


# Critics on Megatron-Core's ranks: both models learn what they learn with FSDP2 on one rank, however ranks are laid
# out, and either backend continues from the checkpoint.

FSDP2: dict[str, Any] = {}
MEGATRON = {"backend": "megatron", "ranks": 2}
SIZES = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel")
TP2, PP2, EP2, SHARING = ({key: 2} for key in SIZES)
CORRECTIONS = {"own": "bypass_ppo_clip", "shared": "decoupled_token_is"}
Trained = tuple[dict[str, Tensor], list[dict[str, float]]]


@pytest.fixture(scope="module")
def critic_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Trained]]:
    """A model by its family, and by the kind of critic the weights and metrics of FSDP2 on one rank."""
    folder = tmp_path_factory.mktemp("critic_alone")

    @functools.cache
    def trained(family: str, kind: str) -> tuple[Path, Trained]:
        make_model(family, folder / family)
        return folder / family, critic_train(
            folder / family, folder / f"{family}-{kind}", 1, "60", kind, CORRECTIONS[kind]
        )

    return trained


@pytest.mark.parametrize(
    ("family", "kind", "sizes", "resumed"),
    [
        pytest.param("qwen2-tied", "own", MEGATRON | TP2, MEGATRON | TP2, id="own on TP2"),
        pytest.param("qwen2-tied", "shared", MEGATRON | TP2, FSDP2, id="shared on TP2, then FSDP2"),
        pytest.param("qwen2-tied", "own", MEGATRON | PP2, FSDP2, id="own on PP2, then FSDP2"),
        pytest.param("qwen2-tied", "shared", FSDP2, MEGATRON | PP2, id="shared on FSDP2, then PP2"),
        pytest.param("qwen2-tied", "own", FSDP2, MEGATRON, id="own on FSDP2, then DP2"),
        pytest.param("qwen2-tied", "own", MEGATRON | SHARING, MEGATRON, id="own on shared rows, then DP2"),
        pytest.param("qwen3-moe", "own", FSDP2, MEGATRON | TP2 | EP2, id="own on FSDP2, then TP2 EP2"),
        pytest.param("qwen3-moe", "shared", MEGATRON | TP2 | EP2, MEGATRON | EP2, id="shared on TP2 EP2, then EP2"),
    ],
)
def test_both_models_learn_the_same_as_with_fsdp2(
    critic_alone: Callable[[str, str], tuple[Path, Trained]],
    tmp_path: Path,
    family: str,
    kind: str,
    sizes: dict[str, Any],
    resumed: dict[str, Any],
) -> None:
    model, (expected, metrics) = critic_alone(family, kind)
    options = [json.dumps(sizes), json.dumps(resumed)]
    found, metrics_too = critic_train(model, tmp_path / "out", 2, "60", kind, CORRECTIONS[kind], *options)
    for one, two in zip(metrics, metrics_too, strict=True):
        told = {name: value for name, value in one.items() if not name.endswith("_imbalance")}
        assert {name: two[name] for name in told} == pytest.approx(told, rel=1e-3, abs=1e-4)
    # Four steps of two mini-batches each.
    assert_trained_alike(found, expected, rate=1e-3, steps=8, layers=LAYERS, terms=TERMS)
