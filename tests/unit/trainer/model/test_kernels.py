"""Kernels that only a GPU has are refused where there is none, and said how to get where they are missing."""

import sys

import pytest

from rl_async.errors import UserError
from rl_async.trainer.model import apply_liger


def test_liger_is_refused_on_a_cpu_and_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"trainer\.kernels=liger"):
        apply_liger(None, "cpu")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(UserError, match=r"trainer\.kernels=liger.*pip install 'rl-async\[liger\]'"):
        apply_liger(None, "cuda:0")
