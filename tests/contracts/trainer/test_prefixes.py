"""Shared prefixes on two FSDP2 ranks: the gradients of separate rows, however the model is spread and computed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import run_ranks
from tests.unit.trainer.test_families import saved

HAS_PEFT = importlib.util.find_spec("peft") is not None
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"activation_checkpointing": True},
    "replicas": {"replicas": 2},
    **({"adapters": {"lora": {"rank": 4}}} if HAS_PEFT else {}),
}


@pytest.mark.timeout(600)
def test_gradients_are_those_of_separate_rows(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    out = tmp_path / "found.json"
    arguments = [str(tmp_path / "model"), str(out), json.dumps(OPTIONS)]
    run_ranks("tests.contracts.trainer.workers.prefixes", *arguments, ranks=2, timeout_s=500)
    found = json.loads(out.read_text())
    assert found.keys() == OPTIONS.keys()
    for case, told in found.items():
        assert told["size"] > 1e-2, case
        assert told["excess"] <= 1, case
