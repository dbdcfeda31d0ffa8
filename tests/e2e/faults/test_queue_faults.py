"""The long tests of the queue: a thousand simulated schedules, and mutated messages beside a healthy client."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_rule_holds_in_a_thousand_schedules() -> None:
    """Other ones in every session, which follow from its seed."""
    first = random.randrange(1 << 30)
    assert "1000 schedules" in run("tests.simulation", "--schedules", "1000", "--first", str(first), "--processes", "2")


def test_mutated_messages_harm_nobody() -> None:
    assert "the healthy client was served" in run("tests.fuzz.queue", "--minutes", "0.3")


def test_nothing_is_lost_in_10_kills() -> None:
    assert "10 rounds" in run("tests.chaos.queue", "--rounds", "10")
