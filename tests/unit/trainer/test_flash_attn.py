"""FlashAttention's packages are called as their sources document it (tests/support/flash_attn.py stands in)."""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl_async.configs.schema.data import FLASH_ATTN, OverrideConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.launcher.sources import overridden_folder
from rl_async.trainer import attention, model, packing
from rl_async.trainer.attention import PACKAGES, VARLEN, package_kernel, packed_attention
from rl_async.trainer.fsdp2 import KEPT_OF_PACKAGES, Fsdp2Backend, keeping
from rl_async.trainer.packing import collate, row_calls
from tests.conftest import make_rows
from tests.support.flash_attn import varlen_2, varlen_3
from tests.support.rounding import assert_near, pass_rounding, rounding

NEEDS = r"model\.override\.attention=flash_attn"
LENGTHS = ((5, 2), (2, 1))


@functools.wraps(varlen_3)
def with_sums(*given: Any, **named: Any) -> tuple[Tensor, None]:
    """Return what some builds of version 3 do: the result, and behind it the sums of the softmax."""
    return varlen_3(*given, **named), None


def install(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Have these packages, by name, with this varlen function each, and of ``PACKAGES`` no other."""
    found = {name: ModuleType(name) for name in functions}
    for name, function in functions.items():
        setattr(found[name], VARLEN, function)
        monkeypatch.setitem(sys.modules, name, found[name])
    monkeypatch.setattr(attention, "find_spec", found.get)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("version", [varlen_2, varlen_3, with_sums])
def test_one_call_for_the_row_computes_what_one_for_each_sequence_does(
    version: Callable[..., Any], window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"flash_attn": varlen_2} | ({} if version is varlen_2 else {"flash_attn_interface": version})
    install(monkeypatch, **both)
    assert package_kernel() is version
    # The stand-in computes in any type, a kernel only in bfloat16.
    monkeypatch.setattr(attention, "_kernel_takes", lambda query, value: True)
    row, draw = row_calls(LENGTHS, torch.device("cpu")), torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = (torch.randn(1, heads, 12, 8, generator=draw).requires_grad_() for heads in (4, 2, 2))
    seen = torch.randn(1, 12, 4, 8, generator=draw)
    calls: list[dict[str, Any]] = []

    def counted(*given: Tensor, **named: Any) -> Tensor:
        calls.append(named)
        return package_kernel()(*given, **named)

    def attend(has_kernel: bool) -> list[Tensor]:
        given = {"packed_row": replace(row, has_kernel=has_kernel), "sliding_window": window, "softcap": softcap}
        out, _ = packed_attention(module, q, k, v, None, scaling=0.3, by_package=counted, **given)  # type: ignore[arg-type]
        return [out, *torch.autograd.grad(out, (q, k, v), seen)]

    expected = attend(False)
    assert not calls
    found = attend(True)
    assert len(calls) == 1
    # Outputs are averages of values; the scores, sums of 8 products, change their weights. A gradient sums up to 12
    # tokens' parts, each a product of three such numbers.
    size = max(x.detach().abs().max().item() for x in (q, k, v, seen))
    scores = 0.3 * 8 * size**2
    assert_near(found[0], expected[0], 2 * rounding(size * max(1.0, 2 * scores), terms=8))
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert_near(one, other, 2 * rounding(size**3 * max(1.0, 2 * scores), terms=8 * 12))


@pytest.mark.parametrize("name", KEPT_OF_PACKAGES)
def test_selective_checkpointing_attends_once(name: str) -> None:
    """An operation of that name stands in for the package's, called as there from a function with its own gradient."""
    space, operation = name.split("::")
    calls: list[Tensor] = []

    def attend(q: Tensor) -> Tensor:
        calls.append(q)
        return 2 * q

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor) -> Tensor:
            out: Tensor = getattr(getattr(torch.ops, space), operation)(q)
            ctx.save_for_backward(q, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            q, out = ctx.saved_tensors
            return gradient * out / q

    def layer(x: Tensor) -> Tensor:
        kept: Tensor = Attention.apply((x + 1).exp()).log()  # type: ignore[no-untyped-call]
        return kept

    with torch.library._scoped_library(space, "FRAGMENT") as library:
        library.define(f"{operation}(Tensor q) -> Tensor")
        library.impl(operation, attend, "CPU")
        for options, times in (({"context_fn": keeping}, 1), ({}, 2)):
            calls.clear()
            x = torch.ones(3, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False, **options).sum().backward()
            assert len(calls) == times and x.grad is not None
            assert_near(x.grad, torch.ones(3), rounding(1.0, terms=8))


def test_a_package_that_is_missing_broken_or_of_another_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(UserError, match=rf"{NEEDS}.*rl-async\[flash-attn\]"):
        package_kernel()
    install(monkeypatch, flash_attn=varlen_2)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match=f"{NEEDS}.*flash_attn"):
        package_kernel()
    install(monkeypatch, flash_attn_interface=lambda q, k, v, cu_seqlens_q, causal: q)
    with pytest.raises(UserError, match=f"{NEEDS}.*{PACKAGES[0]}.*max_seqlen_q.*softcap"):
        package_kernel()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_gpu_it_is_refused(dtype: str, model_folder: Path, tmp_path: Path, one_rank: None) -> None:
    folder = overridden_folder(model_folder, OverrideConfig(attention=FLASH_ATTN), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{NEEDS}.*bfloat16"):
        Fsdp2Backend(str(folder), dtype, "cpu", TrainerConfig())


def test_a_model_attends_by_the_package_and_its_rows_stay_packed(
    model_folder: Path, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 on a CPU that is taken for a GPU, where the stand-in has the row as a kernel would have it."""
    folder = overridden_folder(model_folder, OverrideConfig(attention=FLASH_ATTN), tmp_path)  # type: ignore[arg-type]
    calls: list[int] = []

    def counted(*given: Tensor, cu_seqlens_q: Tensor, **named: Any) -> Tensor:
        calls.append(len(cu_seqlens_q) - 1)
        return varlen_2(*given, cu_seqlens_q=cu_seqlens_q, **named)

    monkeypatch.setattr(model, "package_kernel", lambda: counted)
    tensors = collate(make_rows(0)[:3], device="cpu")
    plain = Fsdp2Backend(str(model_folder), "bfloat16", "cpu", TrainerConfig())
    expected = plain.forward(tensors).logprobs
    for module in (model, packing):
        monkeypatch.setattr(module, "has_flash_attention", lambda device: True)
    backend = Fsdp2Backend(str(folder), "bfloat16", "cpu", TrainerConfig())
    assert backend.model.packs
    found = backend.forward(tensors).logprobs
    layers, rows = 2, 3
    assert calls == [rows] * layers
    assert found is not None and expected is not None
    size = float(expected[tensors.mask].abs().max())
    bound = pass_rounding(size, layers, terms=64, dtype=torch.bfloat16)
    assert_near(found[tensors.mask], expected[tensors.mask], bound)
