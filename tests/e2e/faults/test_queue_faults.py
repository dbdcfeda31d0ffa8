"""The long tests of the queue: a thousand simulated schedules, and mutated messages beside a healthy client."""

import random
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [ROOT / "scripts" / script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_rule_holds_in_a_thousand_schedules() -> None:
    """Other ones in every session, which follow from its seed."""
    first = random.randrange(1 << 30)
    assert "1000 schedules" in run("simulate_queue", "--schedules", "1000", "--first", str(first), "--processes", "2")


def test_mutated_messages_harm_nobody() -> None:
    assert "the healthy client was served" in run("fuzz_queue", "--minutes", "0.3")


def test_nothing_is_lost_in_10_kills() -> None:
    assert "10 rounds" in run("chaos_queue", "--rounds", "10")
