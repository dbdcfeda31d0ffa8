"""One contract for all trainer backends, on real gloo ranks: the same answers as a plain Hugging Face model gives.

Each implementation runs once, over its models, and every test looks at what it wrote down.
"""

import importlib.util
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import VOCAB
from tests.contracts.backends.models import (
    FAMILIES,
    ROUNDED,
    STEPS,
    TERMS,
    Expected,
    assert_alike,
    expect,
    make_model,
    whole_batch,
)
from tests.support.forked import run_ranks
from tests.support.rounding import allowance, assert_near

pytestmark = pytest.mark.timeout(600)  # the whole of an implementation is in the first test's setup
DENSE = ("qwen3", "qwen2-tied", "llama")
TIED, DEEP = ("qwen2-tied",), ("qwen3-deep",)
MEGATRON = {"backend": "megatron"}
# A backend's layouts have every family among them, rather than each layout all families. One rank without options
# passes through a model as tests/unit/trainer/test_families.py does. Tied embeddings, which are in two places,
# meet every way in which a model or its rows are divided.
IMPLEMENTATIONS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "fsdp2 x2": (2, {"backend": "fsdp2"}, ("llama", "qwen3-moe", "qwen3-moe-odd")),
    "fsdp2 x1 checkpointed": (1, {"activation_checkpointing": True}, ("llama",)),
    "fsdp2 x1 compiled and checkpointed": (1, {"kernels": "compile", "activation_checkpointing": True}, ("qwen3",)),
    "fsdp2 x1 compiled, keeping products": (
        1,
        {"kernels": "compile", "activation_checkpointing": "selective"},
        ("qwen3",),
    ),
    "fsdp2 x2 offloaded": (2, {"cpu_offload": True}, ("qwen3",)),
    "fsdp2 x2 that share rows": (2, {"sequence_parallel": 2}, ("qwen3", "qwen2-tied")),
    "fsdp2 x2 compiled, that share rows": (2, {"sequence_parallel": 2, "kernels": "compile"}, ("qwen3",)),
    "fsdp2 x4, twos that share rows": (4, {"sequence_parallel": 2, "activation_checkpointing": True}, ("qwen3",)),
    "fsdp2 x4 of 2 replicas": (4, {"replicas": 2}, ("qwen3", "qwen3-moe-odd")),
    "megatron x1": (1, MEGATRON, (*DENSE, "qwen3-moe")),
    "megatron TP2": (2, MEGATRON | {"tensor_parallel": 2}, DENSE),
    "megatron PP2": (2, MEGATRON | {"pipeline_parallel": 2}, (*DENSE, "qwen3-moe")),
    "megatron DP2": (2, MEGATRON, ("llama",)),
    "megatron x2 that share rows": (2, MEGATRON | {"sequence_parallel": 2}, ("qwen2-tied", "qwen3-moe")),
    "megatron TP2, twos that share rows": (4, MEGATRON | {"sequence_parallel": 2, "tensor_parallel": 2}, TIED),
    "megatron PP3 of 2 virtual stages": (3, MEGATRON | {"pipeline_parallel": 3, "virtual_pipeline": 2}, DEEP),
    "megatron EP2": (2, MEGATRON | {"expert_parallel": 2}, ("qwen3-moe",)),
    "megatron TP2 EP2": (2, MEGATRON | {"tensor_parallel": 2, "expert_parallel": 2}, ("qwen3-moe",)),
    "megatron PP2, twos that share rows": (4, MEGATRON | {"sequence_parallel": 2, "pipeline_parallel": 2}, TIED),
    "megatron TP2 EP4, twos that share rows": (
        4,
        MEGATRON | {"sequence_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4},
        ("qwen3-moe",),
    ),
    "megatron TP2 DP2 EP2": (4, MEGATRON | {"tensor_parallel": 2, "expert_parallel": 2}, ("qwen3-moe",)),
    "megatron TP2 DP2 EP4": (4, MEGATRON | {"tensor_parallel": 2, "expert_parallel": 4}, ("qwen3-moe",)),
}
# The layouts that only combine options of others, or have one option that another layout here, test_layouts.py,
# tests/unit/trainer/test_model.py or tests/contracts/trainer/test_sharding.py tries as well.
TRIED_ELSEWHERE = {
    "fsdp2 x1 checkpointed",
    "fsdp2 x1 compiled and checkpointed",
    "fsdp2 x2 that share rows",
    "fsdp2 x2 compiled, that share rows",
    "megatron DP2",
    "megatron EP2",
    "megatron PP2, twos that share rows",
    "megatron TP2 EP4, twos that share rows",
    "megatron TP2 DP2 EP2",
}


def tried(name: str, ranks: int, sizes: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """Return the marks that say which target of the Makefile tries a layout."""
    if name in TRIED_ELSEWHERE:
        return [pytest.mark.nightly]
    return [pytest.mark.slow] if ranks > 2 or "kernels" in sizes else []


@dataclass(frozen=True)
class Told:
    """What one rank wrote down of one model, and what it should have."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    expected: Expected
    exact: Expected

    def stage(self, name: str) -> dict[str, Tensor]:
        """The weights that were exported then."""
        return {key.removeprefix(f"{name}."): t for key, t in self.tensors.items() if key.startswith(f"{name}.")}


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Expected, Expected]]:
    """Every family's folder, and the reference's answers in float32 and in float64."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(family, root / family)
    return {family: (root / family, *expect(root / family, root / f"{family}-trained")) for family in FAMILIES}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=tried(name, ranks, sizes)) for name, (ranks, sizes, _) in IMPLEMENTATIONS.items()],
)
def ran(
    request: pytest.FixtureRequest,
    expected: dict[str, tuple[Path, Expected, Expected]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Told]:
    """One entry per model and rank."""
    ranks, sizes, families = IMPLEMENTATIONS[request.param]
    if "kernels" in sizes and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    if sizes.get("backend") == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    out = tmp_path_factory.mktemp("ran")
    folders = [str(expected[family][0]) for family in families]
    arguments = [json.dumps(sizes), str(out), *folders]
    run_ranks("tests.contracts.backends.worker", *arguments, ranks=ranks, timeout_s=500)
    return [
        Told(
            load_file(out / f"{family}-{rank}.safetensors"),
            json.loads((out / f"{family}-{rank}.json").read_text()),
            *expected[family][1:],
        )
        for family in families
        for rank in range(ranks)
    ]


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any number."""
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


@pytest.mark.parametrize("name", ["logprobs", "entropy", "sum_squares"])
def test_outputs_are_those_of_the_model_at_the_temperature(ran: list[Told], name: str) -> None:
    for told in ran:
        mask = real_tokens()
        plain, exact = (getattr(reference, name)[mask] for reference in (told.expected, told.exact))
        assert_near(told.tensors[f"forward.{name}"][mask], exact, allowance(plain, exact, TERMS), name)


def real_tokens() -> Tensor:
    """Where tokens follow that are no padding, bool [B, T-1]."""
    (batch,) = whole_batch()
    return torch.arange(batch.mask.shape[1]) < batch.lengths[:, None] - 1


def test_what_was_imported_is_exported_bit_by_bit(ran: list[Told]) -> None:
    for told in ran:
        exported = told.stage("imported")
        assert exported.keys() == told.expected.imported.keys()
        assert all(exported[name].equal(tensor) for name, tensor in told.expected.imported.items())


def test_losses_and_norms_are_those_of_one_process(ran: list[Told]) -> None:
    for told in ran:
        losses, norms = zip(*told.numbers["steps"], strict=True)
        # A loss is a mean of log-probabilities of about log(VOCAB).
        assert losses == pytest.approx(told.exact.losses, abs=ROUNDED * math.log(VOCAB))
        assert norms == pytest.approx(told.exact.norms, rel=ROUNDED)


def test_steps_lead_to_the_weights_of_one_process(ran: list[Told]) -> None:
    for told in ran:
        trained = told.stage("trained")
        assert_alike(trained, told.exact.trained, steps=STEPS)
        assert furthest(trained, told.expected.imported) > 2e-4


def test_a_loss_that_is_not_finite_changes_no_weight_on_any_rank(ran: list[Told]) -> None:
    for told in ran:
        assert "must be finite" in told.numbers["diverged"]
        assert furthest(told.stage("diverged"), told.stage("trained")) == 0


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(ran: list[Told]) -> None:
    """The run that goes on slept and woke in between."""
    for told in ran:
        assert furthest(told.stage("loaded"), told.stage("trained")) == 0
        assert told.numbers["resumed"] == told.numbers["continued"]
        assert furthest(told.stage("resumed"), told.stage("continued")) == 0
        assert furthest(told.stage("continued"), told.stage("trained")) > 1e-4


def test_one_backend_goes_on_from_the_others_checkpoint(ran: list[Told]) -> None:
    if not ran[0].stage("adopted"):
        pytest.skip("asked of one layout")
    for told in ran:
        assert_alike(told.stage("adopted"), told.stage("continued"), steps=1)
