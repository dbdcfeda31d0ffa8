"""A number that is not finite stops training before any weight changes, and names the step and the batch."""

from pathlib import Path

from tests.support.forked import Forked


def test_an_infinite_reward_names_step_and_groups(model_folder: Path) -> None:
    worker = Forked("tests.contracts.trainer.workers.diverge", str(model_folder))
    out, errors = worker.communicate(timeout=120)
    assert worker.returncode == 3, errors[-2000:]
    assert "step 7, mini-batch 0 of 1, groups [28, 29, 30, 31]" in out
    assert "must be finite" in out
