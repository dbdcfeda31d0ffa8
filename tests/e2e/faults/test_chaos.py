"""Faults in whole runs and in trainers; ``scripts/chaos_*`` do more of it by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.host.isolation import FOR_NAMESPACES, NEEDED, install

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[3]
MISSING = install(NEEDED)
MISSING_FOR_AGENTS = install({"bwrap": "bubblewrap", **FOR_NAMESPACES})


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
def test_whole_runs_survive_twenty_faults() -> None:
    """Every kind of fault, also lost packets and a full disk where the machine permits namespaces."""
    command = [sys.executable, "-m", "tests.chaos.run", "--rounds", "20", "--steps", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 faults in" in done.stdout


@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(MISSING_FOR_AGENTS), reason=MISSING_FOR_AGENTS)
def test_agents_leave_nothing_behind_after_twelve_kills() -> None:
    pytest.importorskip("mcp", reason="python -m pip install 'rl-async[mcp]' installs the SDK for MCP servers")
    command = [sys.executable, "-m", "tests.chaos.agents", "--rounds", "12", "--steps", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1180)
    if "not permitted here" in done.stderr:
        pytest.skip(f"the kernel refuses namespaces: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 kills in" in done.stdout
