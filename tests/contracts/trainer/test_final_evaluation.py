"""The final evaluation, which rank 0 alone waits for, may take longer than a collective."""

from pathlib import Path

import pytest

from tests.contracts.trainer.workers.final_evaluation import COLLECTIVE_S
from tests.support.forked import run_ranks

pytestmark = pytest.mark.timeout(180)


def test_ranks_wait_for_a_final_evaluation_longer_than_a_collective_takes(tmp_path: Path) -> None:
    waited = run_ranks("tests.contracts.trainer.workers.final_evaluation", str(tmp_path), ranks=2, timeout_s=120)
    assert all(float(seconds) > COLLECTIVE_S for seconds in waited)
