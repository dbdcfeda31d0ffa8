"""Rows that share prefixes: every kind of model computes them as rows of their own, forward and backward."""

import logging
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import OutputName
from rl_async.trainer.families import FAMILIES
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.model import Head, why_prefixes_apart
from rl_async.trainer.packing import Tensors
from tests.support.prefixes import loss_of, shared_rows
from tests.support.rounding import (
    LARGEST,
    allowances,
    assert_as_close,
    assert_near,
    in_float64,
    to_float64,
    unit_roundoff,
)
from tests.unit.trainer.model.test_families import COMMON, VOCAB, saved

pytestmark = pytest.mark.usefixtures("one_rank")

EVERYTHING: frozenset[OutputName] = frozenset({"entropy", "sum_squares", "distribution"})
HEADS: dict[Head, frozenset[OutputName]] = {
    "policy": EVERYTHING,
    "value": frozenset(),
    "both": EVERYTHING | {"values"},
}
# The longest sums: of all tokens, in the gradients, of which there are more than logits.
TERMS = int(shared_rows(VOCAB).lengths.sum())
CASES: list[tuple[str, Head, bool]] = [
    *((kind, "policy", kind in ("gemma2", "deepseek_v3")) for kind in sorted(FAMILIES)),
    ("qwen3", "value", False),
    ("llama", "both", True),
]


def built(folder: Path, dtype: str, head: Head, config: TrainerConfig) -> Fsdp2Backend:
    """A backend in this type, whose value head does not say zero."""
    backend = Fsdp2Backend(str(folder), "bfloat16" if dtype == "bfloat16" else "float32", "cpu", config, head)
    if backend.model.value_head is not None:
        torch.nn.init.constant_(backend.model.value_head.weight, 0.1)
    if dtype == "float64":
        to_float64(backend.model.lm)
        backend.model.double()
    return backend


def computed(backend: Fsdp2Backend, batch: Tensors, requested: frozenset[OutputName]) -> dict[str, Tensor]:
    """The loss, the outputs and the gradients, by name."""
    outputs = backend.model.outputs(batch, requested)
    loss = loss_of(outputs, batch.lengths)
    loss.backward()
    found = {name: part.detach() for name in outputs.__struct_fields__ if (part := getattr(outputs, name)) is not None}
    named = backend.model.named_parameters()
    found |= {f"gradient of {name}": p.grad.full_tensor() for name, p in named if p.grad is not None}
    backend.model.zero_grad()
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize(("kind", "head", "checkpointed"), CASES)
def test_shared_prefixes_change_neither_outputs_nor_gradients(
    kind: str, head: Head, checkpointed: bool, tmp_path: Path
) -> None:
    saved(kind, tmp_path)
    config = TrainerConfig(activation_checkpointing=checkpointed)
    batch = shared_rows(VOCAB)
    assert batch.tree is not None
    apart = msgspec.structs.replace(batch, tree=None)
    # Without checkpointing, which would compute again outside the mode.
    exactly = built(tmp_path, "float64", head, TrainerConfig())
    with in_float64():
        together_exact, exact = (computed(exactly, x, HEADS[head]) for x in (batch, apart))
    backend = built(tmp_path, "float32", head, config)
    seen: list[int] = []
    backend.model.lm.get_input_embeddings().register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    together, alone = (computed(backend, x, HEADS[head]) for x in (batch, apart))
    assert seen == [batch.computed, int(batch.lengths.sum())]
    assert batch.computed < 0.6 * int(batch.lengths.sum())
    assert_as_close(together, alone, exact, terms=TERMS)
    assert max(tensor.abs().max().item() for name, tensor in exact.items() if name.startswith("gradient")) > 1e-4
    # The same sums in float64 are as much closer as its roundings are smaller than those of float32.
    finer = unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
    for name, bound in allowances(alone, exact, TERMS).items():
        assert_near(together_exact[name], exact[name], finer * bound, name)


def test_shared_prefixes_in_bfloat16_differ_by_its_rounding(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    batch = shared_rows(VOCAB)
    apart = msgspec.structs.replace(batch, tree=None)
    exactly = built(tmp_path, "float64", "policy", TrainerConfig())
    with in_float64():
        exact = computed(exactly, apart, EVERYTHING)
    backend = built(tmp_path, "bfloat16", "policy", TrainerConfig())
    together, alone = (computed(backend, x, EVERYTHING) for x in (batch, apart))
    errors = [(found["logprobs"].double() - exact["logprobs"]) for found in (together, alone)]
    # Both round the same values to bfloat16 and sum in float32, so their errors are draws from one distribution.
    off, usual = (error.square().mean().sqrt().item() for error in errors)
    assert off <= 2 * usual, f"off by {off:.3g}, where separate rows are off by {usual:.3g}"
    assert errors[0].abs().max() <= LARGEST * errors[1].abs().max()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("stablelm", TrainerConfig(), "stablelm"),
        ("qwen3", TrainerConfig(), None),
    ],
)
def test_what_cannot_share_says_why(
    kind: str, options: TrainerConfig, reason: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(kind, tmp_path)
    with caplog.at_level(logging.INFO, "rl_async.trainer"):
        backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", options)
    told = [record.getMessage() for record in caplog.records if "begin with" in record.getMessage()]
    assert backend.row_cost.shares_prefixes == (reason is None)
    assert bool(told) == (reason is not None)
    assert reason is None or reason in told[0]


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cuda", TrainerConfig()),
        ("cpu", TrainerConfig(sequence_parallel=2)),
        ("cpu", TrainerConfig(compile=True)),
    ],
)
def test_where_prefixes_stay_apart(device: str, options: TrainerConfig) -> None:
    config = AutoConfig.for_model("qwen3", **COMMON)
    assert why_prefixes_apart(config, "cpu", TrainerConfig()) is None
    assert why_prefixes_apart(config, device, options)
