"""A number that is not finite stops training before any weight changes, and names the step and the batch."""

import subprocess
import sys
from pathlib import Path


def test_an_infinite_reward_names_step_and_groups(model_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.trainer.diverge_worker", str(model_folder)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr[-2000:]
    assert "step 7, mini-batch 0 of 1, groups [28, 29, 30, 31]" in done.stdout
    assert "must be finite" in done.stdout
