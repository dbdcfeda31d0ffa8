"""A run continues with the other backend: weights are equal bit by bit, AdamW's moments and the step come along."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.backends.models import make_model
from tests.support.forked import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="Megatron-Core is not here; install it with pip install 'rl-async[megatron]'",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {"tensor_parallel": 2}),
        ("qwen2-tied", {"pipeline_parallel": 2}),
        ("qwen3-moe", {"expert_parallel": 2}),
    ],
)
def test_each_backend_goes_on_from_the_others_checkpoint(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    make_model(family, tmp_path / "model")
    arguments = [json.dumps(sizes), str(tmp_path / "model"), str(tmp_path)]
    run_ranks("tests.contracts.backends.interchange_worker", *arguments, ranks=2)
