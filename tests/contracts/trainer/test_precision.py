"""``model.dtype=bfloat16`` computes in bfloat16, and holds and sums in float32 whatever a step adds to."""

from pathlib import Path

import pytest

from tests.contracts.backends.models import make_model
from tests.support.forked import run_ranks


@pytest.mark.timeout(600)
def test_masters_gradients_and_moments_are_float32(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path)
    run_ranks("tests.contracts.trainer.workers.precision", str(tmp_path), ranks=2)
