"""What FSDP2's options do to the memory of a CUDA device, and that they change no gradient there."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import Tensors, collate
from tests.conftest import make_rows
from tests.support.weights import whole_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """Collectives among this process alone."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(folder: Path, **options: bool) -> Fsdp2Backend:
    return Fsdp2Backend(str(folder), "float32", "cuda:0", TrainerConfig(learning_rate=1e-3, minibatches=1, **options))


def batch() -> list[Tensors]:
    return [collate(make_rows(0)[:8], device="cuda:0")]


def likelihood(batches: list[Tensors], number: int, outputs: Outputs) -> torch.Tensor:
    assert outputs.logprobs is not None
    return -torch.where(batches[number].mask, outputs.logprobs, 0.0).mean()


def train(backend: Fsdp2Backend) -> dict[str, torch.Tensor]:
    """Two steps; the weights after them, on the host."""
    for _ in range(2):
        batches = batch()
        backend.step(batches, functools.partial(likelihood, batches))
    return {name: tensor.cpu() for name, tensor in whole_weights(backend).items()}


@pytest.mark.parametrize("option", ["activation_checkpointing", "cpu_offload"])
def test_an_option_changes_nothing_that_is_learned(model_folder: Path, option: str) -> None:
    plain, other = train(make(model_folder)), train(make(model_folder, **{option: True}))
    assert max((plain[name] - other[name]).abs().max().item() for name in plain) < 1e-4


def test_offloaded_weights_and_moments_are_in_host_memory(model_folder: Path) -> None:
    backend = make(model_folder, cpu_offload=True)
    train(backend)
    assert backend.optimizer is not None
    assert all(parameter.device.type == "cpu" for parameter in backend.model.parameters())
    states = backend.optimizer.state.values()
    assert all(tensor.device.type == "cpu" for state in states for tensor in state.values())


def test_asleep_the_device_is_empty_and_awake_it_goes_on(model_folder: Path) -> None:
    before = torch.cuda.memory_allocated()
    backend = make(model_folder)
    learned = train(backend)
    awake = torch.cuda.memory_allocated() - before
    backend.sleep()
    torch.cuda.synchronize()
    asleep = torch.cuda.memory_allocated() - before
    assert asleep < awake / 10
    assert all(parameter.to_local().is_pinned() for parameter in backend.model.parameters())
    backend.sleep()  # twice is once
    exported = {name: tensor.cpu() for name, tensor in whole_weights(backend).items()}
    assert all(exported[name].equal(tensor) for name, tensor in learned.items())
    backend.wake()
    again = train(backend)
    assert any(not again[name].equal(learned[name]) for name in learned)
