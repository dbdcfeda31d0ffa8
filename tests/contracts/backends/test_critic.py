"""Critics on Megatron-Core's ranks: both models learn what they learn with FSDP2 on one rank, however ranks are laid
out, and either backend continues from the checkpoint."""

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.contracts.backends.models import LAYERS, TERMS, make_model
from tests.contracts.trainer.test_critic_ranks import train
from tests.support.rounding import assert_trained_alike

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None,
        reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
    ),
]
FSDP2: dict[str, Any] = {}
MEGATRON = {"backend": "megatron", "ranks": 2}
SIZES = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel")
TP2, PP2, EP2, SHARING = ({key: 2} for key in SIZES)
CORRECTIONS = {"own": "bypass_ppo_clip", "shared": "decoupled_token_is"}
Trained = tuple[dict[str, Tensor], list[dict[str, float]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Trained]]:
    """A model by its family, and by the kind of critic the weights and metrics of FSDP2 on one rank."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def trained(family: str, kind: str) -> tuple[Path, Trained]:
        make_model(family, folder / family)
        return folder / family, train(folder / family, folder / f"{family}-{kind}", 1, "60", kind, CORRECTIONS[kind])

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
    alone: Callable[[str, str], tuple[Path, Trained]],
    tmp_path: Path,
    family: str,
    kind: str,
    sizes: dict[str, Any],
    resumed: dict[str, Any],
) -> None:
    model, (expected, metrics) = alone(family, kind)
    options = [json.dumps(sizes), json.dumps(resumed)]
    found, metrics_too = train(model, tmp_path / "out", 2, "60", kind, CORRECTIONS[kind], *options)
    for one, two in zip(metrics, metrics_too, strict=True):
        told = {name: value for name, value in one.items() if not name.endswith("_imbalance")}
        assert {name: two[name] for name in told} == pytest.approx(told, rel=1e-3, abs=1e-4)
    # Four steps of two mini-batches each.
    assert_trained_alike(found, expected, rate=1e-3, steps=8, layers=LAYERS, terms=TERMS)
