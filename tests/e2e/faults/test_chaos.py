"""Engines that die or freeze in the middle of syncs and requests; ``scripts/chaos_engines`` does more of it by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[3]


def test_runs_survive_five_faults() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--rounds", "5", "--steps", "15"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 faults in" in done.stdout


def test_a_trainer_killed_three_times_ends_with_the_weights_of_an_undisturbed_one() -> None:
    command = [sys.executable, "-m", "tests.chaos.trainer", "--rounds", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills in" in done.stdout
