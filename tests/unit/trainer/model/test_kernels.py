"""Kernels that only a GPU has are refused where there is none, and said how to get where they are missing."""

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import UserError
from rl_async.trainer.model import attention as packed_attention
from rl_async.trainer.model import kernels
from rl_async.trainer.model.kernels import apply_liger, attention
from tests.unit.trainer.model.test_families import COMMON

FLASH = TrainerConfig(attention="flash")
QWEN3 = AutoConfig.for_model("qwen3", **COMMON)


@pytest.mark.parametrize(
    ("here", "options", "device", "dtype", "chosen"),
    [
        (True, TrainerConfig(), "cuda:0", torch.bfloat16, "flash_attention_2"),
        (True, FLASH, "cuda:0", torch.bfloat16, "flash_attention_2"),
        (True, TrainerConfig(), "cuda:0", torch.float32, packed_attention.NAME),
        (True, TrainerConfig(), "cpu", torch.bfloat16, packed_attention.NAME),
        (False, TrainerConfig(), "cuda:0", torch.bfloat16, packed_attention.NAME),
        (True, TrainerConfig(attention="packed"), "cuda:0", torch.bfloat16, packed_attention.NAME),
        (True, TrainerConfig(sequence_parallel=2), "cuda:0", torch.bfloat16, packed_attention.NAME),
    ],
)
def test_attention_is_chosen(
    here: bool, options: TrainerConfig, device: str, dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: here)
    assert attention(QWEN3, device, dtype, options) == chosen
    padded: Any = AutoConfig.for_model("stablelm", **COMMON)
    if options != FLASH:
        assert attention(padded, device, dtype, options) == "sdpa"


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "why"),
    [
        ("qwen3", "cpu", torch.bfloat16, "bfloat16 on a GPU"),
        ("qwen3", "cuda:0", torch.float32, "bfloat16 on a GPU"),
        ("stablelm", "cuda:0", torch.bfloat16, "stablelm"),
        ("qwen3", "cuda:0", torch.bfloat16, r"pip install --no-build-isolation 'rl-async\[flash-attn\]'"),
    ],
)
def test_flash_attention_is_refused_where_it_cannot_be(
    kind: str, device: str, dtype: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(UserError, match=f"trainer.attention=flash.*{why}"):
        attention(AutoConfig.for_model(kind, **COMMON), device, dtype, FLASH)


def test_liger_is_refused_on_a_cpu_and_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"trainer\.kernels=liger"):
        apply_liger(None, "cpu")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(UserError, match=r"trainer\.kernels=liger.*pip install 'rl-async\[liger\]'"):
        apply_liger(None, "cuda:0")
