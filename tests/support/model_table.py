"""Writes the table of docs/reference/models.md: ``python -m tests.support.model_table REGISTRY``, with vLLM's
``model_executor/models/registry.py``.

All columns but vLLM's are what the code answers; a test compares the page with them.
"""

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.model_files import experts_of
from rl_async.rollout_server.embedded.core import SERVED
from rl_async.trainer.families import FAMILIES, MEGATRON_FAMILIES, why_not_shared, why_padded
from rl_async.trainer.model import REPLAYED, why_prefixes_apart
from rl_async.weight_sync.layout import STACKED_FOR_ENGINES, single
from tests.support.families import PADDED, config_of

PAGE = Path(__file__).parents[2] / "docs/reference/models.md"
HEAD = "| model type | rows | router replay | embedded | Megatron | vLLM |"
KINDS = sorted(FAMILIES.keys() | PADDED.keys())


def table(vllm: Mapping[str, str]) -> list[str]:
    """The lines of the table, with what is said of vLLM by model type."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for kind in KINDS:
        config = config_of(kind)
        replay = "-" if not experts_of(config) else _yes(kind in REPLAYED)
        shared = why_prefixes_apart(config, "cpu", torch.float32, TrainerConfig()) is None
        assert shared == (why_not_shared(config, 2) is None), "the page has one word for both"
        cells = [
            kind,
            "padded" if why_padded(config) is not None else "shared" if shared else "packed",
            replay,
            _yes(kind in SERVED),
            _yes(kind in MEGATRON_FAMILIES),
            vllm[kind],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def listed(page: str) -> list[str]:
    """The lines of the table that the page has."""
    return [line for line in page.splitlines() if line.startswith("|")]


def vllm_says(registry: str) -> dict[str, str]:
    """What to say of vLLM by model type: whether its registry has it, and under whose names its weights travel."""
    said = {}
    for kind in KINDS:
        known = re.search(rf'^\s*"{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]}":', registry, re.MULTILINE)
        said[kind] = "no" if known is None else "yes" if _names_are_published(kind) else "names differ"
    return said


def _names_are_published(kind: str) -> bool:
    model: Any = AutoModelForCausalLM.from_config(config_of(kind))
    named = model.named_parameters()
    ours = {name for name, _ in (named if kind in STACKED_FOR_ENGINES else single(named))}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            return ours <= set(file.keys())


if __name__ == "__main__":
    before, after = (part.strip("\n") for part in re.split(r"(?:^\|.*\n)+", PAGE.read_text(), flags=re.MULTILINE))
    lines = table(vllm_says(Path(sys.argv[1]).read_text()))
    PAGE.write_text("\n".join([before, "", *lines, "", after, ""]))
