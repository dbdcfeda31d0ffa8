"""Selective checkpointing multiplies nothing again, keeps what the memory plan counts, and changes no gradient."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.launcher.plan.memory import size_of
from rl_async.trainer.fsdp2 import KEPT, Fsdp2Backend
from rl_async.trainer.packing import Tensors
from tests.conftest import VOCAB
from tests.support.batches import loss_of, shared_rows
from tests.support.families import saved

pytestmark = pytest.mark.usefixtures("one_rank")


def backends(folder: Path) -> list[Fsdp2Backend]:
    """One that keeps everything, one that checkpoints selectively, and one that keeps its layers' input alone."""
    return [
        Fsdp2Backend(str(folder), "float32", "cpu", TrainerConfig(activation_checkpointing=how))
        for how in (False, "selective", True)
    ]


def gradients(backend: Fsdp2Backend, batch: Tensors) -> dict[str, Tensor]:
    loss_of(backend.model.outputs(batch, frozenset()), batch.lengths).backward()
    named = backend.model.named_parameters()
    found = {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}  # type: ignore[operator]
    backend.model.zero_grad()
    return found


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    "kind",
    # Plain attention, products of experts, soft caps and windows, layers with a state.
    [
        "qwen3",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_moe", "gemma2", "qwen3_next")),
    ],
)
def test_gradients_are_those_of_layers_that_keep_everything(kind: str, shares: bool, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    batch = shared_rows(VOCAB)
    if not shares:
        batch = msgspec.structs.replace(batch, tree=None)
    everything, selective, _ = (gradients(backend, batch) for backend in backends(tmp_path))
    assert everything.keys() == selective.keys()
    assert max(gradient.abs().max().item() for gradient in everything.values()) > 1e-6
    for name, gradient in everything.items():
        assert gradient.equal(selective[name]), name


@pytest.mark.parametrize("kind", ["gpt_oss", "olmo"])
def test_a_model_that_changes_what_is_kept_is_refused(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    _, selective, whole = backends(tmp_path)
    gradients(whole, shared_rows(VOCAB))
    with pytest.raises(UserError, match=r"trainer\.activation_checkpointing=selective"):
        gradients(selective, shared_rows(VOCAB))


@pytest.mark.parametrize("shares", [True, False])
def test_no_product_is_computed_again(shares: bool, tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    batch = shared_rows(VOCAB)
    if not shares:
        batch = msgspec.structs.replace(batch, tree=None)
    counts = []
    for backend in backends(tmp_path):
        with FlopCounterMode(display=False) as counter:
            gradients(backend, batch)
        counts.append(counter.get_total_flops())
    everything, selective, whole = counts
    assert selective == everything < whole


class Kept(TorchDispatchMode):
    """Adds up the numbers in what the kept operations return, without attention's sums."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.numbers += (out[0] if isinstance(out, tuple) else out).numel()
        return out


def test_the_plan_counts_what_layers_keep(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path)
    config = TrainerConfig(activation_checkpointing="selective")
    # A value head's product is not among them, logits would be.
    backend = Fsdp2Backend(str(tmp_path), "float32", "cpu", config, "value")
    batch = msgspec.structs.replace(shared_rows(VOCAB), tree=None)
    with Kept() as kept:
        backend.model.outputs(batch, frozenset())
    size = size_of(model.config.to_dict())
    assert size is not None
    assert (size.selected - size.checkpointed) * int(batch.lengths.sum()) == kept.numbers > 0
