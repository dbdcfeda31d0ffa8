"""Liger's kernels, FlashAttention and shared rows compute on GPUs what plain operations do there, up to rounding."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes.ranks import run_ranks
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer import attention
from rl_async.trainer.attention import packed_attention
from rl_async.trainer.backend import Outputs
from rl_async.trainer.fsdp2 import Fsdp2Backend
from rl_async.trainer.packing import collate, row_calls
from tests.conftest import make_rows

NO_GPU = None if torch.cuda.is_available() else "no CUDA device on this machine"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU is not None, reason=str(NO_GPU))]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Collectives among this process alone."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def logprobs(folder: Path, dtype: str, config: TrainerConfig) -> tuple[Tensor, float]:
    """Of the sampled tokens, before a step that makes them likelier, and the norm of its gradient."""
    batch = collate(make_rows(0)[:8], device="cuda:0")
    backend = Fsdp2Backend(str(folder), dtype, "cuda:0", config)
    found = backend.forward(batch).logprobs
    assert found is not None

    def loss_fn(_: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return -torch.where(batch.mask, outputs.logprobs, 0.0).mean()

    _, norm = backend.step([batch], loss_fn)
    return found[batch.mask].float(), norm


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None,
    reason=NO_GPU or "Liger is not here; install it with pip install 'rl-async[liger]'",
)
def test_ligers_kernels_compute_the_same(model_folder: Path, one_rank: None) -> None:
    expected, norm = logprobs(model_folder, "float32", TrainerConfig())  # first: Liger stays for the whole process
    found, other = logprobs(model_folder, "float32", TrainerConfig(kernels="liger"))
    assert (found - expected).abs().max() < 1e-3
    assert other == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_one_call_for_a_packed_row_computes_what_one_for_each_sequence_does(
    heads: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, generator = ((40, 2), (7, 1), (1, 3)), torch.Generator("cuda").manual_seed(0)
    lengths = [length for length, sequences in groups for _ in range(sequences)]
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]

    def attend(dtype: torch.dtype) -> list[Tensor]:
        query, key, value = parts = [part.to(dtype).requires_grad_() for part in given]
        out, _ = packed_attention(
            module,
            query,
            key,
            value,
            None,
            packed_row=row_calls(groups, torch.device("cuda")),
            sliding_window=window,
            scaling=0.2,
        )
        return [out, *torch.autograd.grad(out, parts, seen.to(dtype))]

    shapes = [(1, count, sum(lengths), 64) for count in (heads[0], heads[1], heads[1])]
    given = [torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for shape in shapes]
    seen = torch.randn(1, sum(lengths), heads[0], 64, device="cuda", generator=generator, dtype=torch.bfloat16)
    calls, kernel = [], attention._kernel

    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(given)
        return kernel(*given, **named)

    monkeypatch.setattr(attention, "_kernel", counted)
    by_groups = attend(torch.float32)
    assert not calls
    by_row = attend(torch.bfloat16)
    assert len(calls) == 1
    for found, expected in zip(by_row, by_groups, strict=True):
        assert (found.float() - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_shared_rows_are_computed_as_own_ones(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "differences.json"
    worker = [
        sys.executable,
        "-m",
        "tests.contracts.trainer.workers.ulysses",
        "cuda",
        str(model_folder.parent),
        str(out),
    ]
    run_ranks([*worker, model_folder.name], 2, timeout_s=300)
    (found,) = json.loads(out.read_text()).values()
    assert found["outputs"] < 1e-3
    assert found["gradients"] < 1e-3 * max(1.0, found["size"])
