"""Faults in whole runs, in trainers and at the queue; the programs in ``tests/chaos`` do more of it by hand.

Every kind of fault strikes in ``.ci/run``; the nightly tests strike engines and trainers again, each on its own.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.host.isolation import NEEDED, install
from tests.chaos.host.whole_run import KINDS

ROOT = Path(__file__).parents[3]
MISSING = install(NEEDED)


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_runs_survive_five_faults() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--rounds", "5", "--steps", "15"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 faults in" in done.stdout


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_trainer_killed_three_times_ends_with_the_weights_of_an_undisturbed_one() -> None:
    command = [sys.executable, "-m", "tests.chaos.trainer", "--rounds", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills in" in done.stdout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_whole_runs_survive_every_kind_of_fault() -> None:
    """Also lost packets and a full disk where the machine permits namespaces. All strike one run, which has a gateway:
    starting another would take as long as a third of the faults. ``test_killed_runs.py`` kills a worker.
    """
    command = [sys.executable, "-m", "tests.chaos.run", "--rounds", str(len(KINDS)), "--steps", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(KINDS)} faults in" in done.stdout


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_rule_holds_in_a_thousand_schedules() -> None:
    """Other ones in every session, which follow from its seed."""
    first = random.randrange(1 << 30)
    assert "1000 schedules" in run("tests.simulation", "--schedules", "1000", "--first", str(first), "--processes", "2")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mutated_messages_harm_nobody() -> None:
    assert "the healthy client was served" in run("tests.fuzz.queue", "--minutes", "0.3")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_in_10_kills() -> None:
    assert "10 rounds" in run("tests.chaos.queue", "--rounds", "10")
