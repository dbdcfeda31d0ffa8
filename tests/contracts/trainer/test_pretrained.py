"""Ranks that read only their own slices have, together, the weights that Transformers loads, bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_async.trainer.families import FAMILIES
from tests.support.families import COMMON, DISTINCT, SPECIAL
from tests.support.forked import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "tied": {"kind": "qwen3", "tie_word_embeddings": True},
    "in several files": {"kind": "qwen3_moe", "files": "60KB"},
    "in bfloat16": {"kind": "deepseek_v3", "stored": torch.bfloat16},
    "padded": {"kind": "stablelm"},
    "a critic's decoder": {"kind": "mixtral", "head": "value"},
}


def saved(folder: Path, kind: str, files: str = "1GB", stored: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | SPECIAL.get(kind, {}) | options))
    model = AutoModelForCausalLM.from_config(config).to(stored)
    with torch.no_grad():  # the first values of some are all zeros or ones
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(folder, max_shard_size=files)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kinds", "cases"),
    [
        pytest.param(DISTINCT, CASES, id="distinct"),
        pytest.param(FAMILIES.keys() - DISTINCT, {}, id="others", marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_its_part_of_what_transformers_loads(
    kinds: set[str], cases: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Of three ranks, since three divides none of the sizes."""
    arguments: list[str] = []
    for kind in sorted(kinds):
        arguments += [str(saved(tmp_path / kind, kind)), "policy"]
    for number, (case, options) in enumerate(cases.items()):
        head = options.get("head", "policy")
        folder = saved(tmp_path / f"{number} {case}", **{key: value for key, value in options.items() if key != "head"})
        arguments += [str(folder), head]
        assert (len(list(folder.glob("*.safetensors"))) > 2) == ("files" in options), case
    run_ranks("tests.contracts.trainer.workers.pretrained", *arguments, ranks=3)
