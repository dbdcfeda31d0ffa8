"""Faults in whole runs and in trainers; the programs in ``tests/chaos`` do more of it by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.host.isolation import NEEDED, install

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[3]
MISSING = install(NEEDED)


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


@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_whole_runs_survive_ten_faults() -> None:
    """Every kind of fault, also lost packets and a full disk where the machine permits namespaces."""
    command = [sys.executable, "-m", "tests.chaos.run", "--rounds", "10", "--steps", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 faults in" in done.stdout
