"""Compiled layers: one graph each, for rows of any lengths, with the gradients of layers that are not."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer import attention, packing
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors
from tests.conftest import VOCAB
from tests.support.rounding import assert_near, rounding
from tests.support.varlen import by_borders

DIFFERENT = 20
# Tracing with symbolic sizes takes half a minute. Dynamo itself looks at gradients of tensors that have none.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute")]


def batch_of(lengths: Sequence[int]) -> Tensors:
    draw, shape = np.random.default_rng(list(lengths)), (len(lengths), max(lengths))
    return Tensors(
        tokens=torch.from_numpy(draw.integers(0, VOCAB, shape)),
        lengths=torch.tensor(lengths),
        mask=torch.arange(1, shape[1]) < torch.tensor(lengths)[:, None],
        temperature=torch.ones(len(lengths), 1, 1),
    )


def likelihood(batch: Tensors, _: int, outputs: Outputs) -> Tensor:
    assert outputs.logprobs is not None
    return -torch.where(batch.mask, outputs.logprobs, 0.0).sum()


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace and differentiate graphs as any compiler gets them, without the minutes of one."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch.compiler.reset()


def gradients(backend: Fsdp2Backend, batch: Tensors) -> dict[str, Tensor]:
    backend.add_gradients([batch], functools.partial(likelihood, batch))
    found = {n: p.grad.to_local().clone() for n, p in backend.model.named_parameters()}  # type: ignore[union-attr]
    backend.model.zero_grad()
    return found


def assert_one_graph_for_all_lengths(model_folder: Path, selective: bool = False) -> None:
    options = TrainerConfig(kernels="compile", activation_checkpointing="selective" if selective else False)
    compiled, plain = (
        Fsdp2Backend(str(model_folder), "float32", "cpu", config) for config in (options, TrainerConfig())
    )
    draw = np.random.default_rng(0)
    # One row and many, short and beyond the least length that kernels are told.
    rows = [[9, 7, 7], [5], [1500, 3], *(draw.integers(2, 60, draw.integers(1, 12)).tolist() for _ in range(DIFFERENT))]
    graphs = set()
    for lengths in rows:
        batch = batch_of(lengths)
        found, expected = gradients(compiled, batch), gradients(plain, batch)
        graphs.add(counters["stats"]["unique_graphs"])
        for name, gradient in expected.items():
            size = gradient.abs().max().item()
            assert_near(found[name], gradient, rounding(max(1.0, size), terms=sum(lengths)), name)
    assert not counters["graph_break"], counters["graph_break"]
    # Layers share a graph.
    assert graphs == {1}


@pytest.mark.parametrize("selective", [False, True])
def test_layers_compile_once_on_a_cpu(model_folder: Path, one_rank: None, tracing: None, selective: bool) -> None:
    assert_one_graph_for_all_lengths(model_folder, selective)


def test_layers_compile_once_with_a_kernel_for_rows(
    model_folder: Path, one_rank: None, tracing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "has_flash_attention", lambda device: True)
    monkeypatch.setattr(attention, "_kernel_takes", lambda query, value: True)
    monkeypatch.setattr(attention, "_kernel", by_borders)
    assert_one_graph_for_all_lengths(model_folder)
