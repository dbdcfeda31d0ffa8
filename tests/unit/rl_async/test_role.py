"""The exit codes of a role's errors, also of those that come in groups, and how its threads wait."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_async.errors import EXIT_RESTART, EXIT_USER, ConfigError, QueueLost, RlAsyncError
from rl_async.process.role import run_role


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a key"), EXIT_USER),
        (ExceptionGroup("", [ExceptionGroup("", [ConfigError("a key")])]), EXIT_USER),
        (ExceptionGroup("", [QueueLost("gone")]), EXIT_RESTART),
    ],
)
def test_a_mistake_of_the_user_is_told_as_one(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise error

    assert run_role("agent", work, {RlAsyncError: EXIT_RESTART}) == code
    assert ("error: a key\n" in capsys.readouterr().err) is (code == EXIT_USER)


ENGINE, TRAINER = ["rollout_server", "--port", "0"], ["trainer", "--queue", "ipc:///nowhere"]


@pytest.mark.parametrize(
    ("role", "asked"),
    [
        (ENGINE, ""),
        (TRAINER, "active"),
        pytest.param(ENGINE, "active", marks=pytest.mark.slow),
        pytest.param(TRAINER, "", marks=pytest.mark.slow),
    ],
)
def test_threads_of_a_role_started_by_hand_sleep_at_barriers(role: list[str], asked: str, tmp_path: Path) -> None:
    """As OpenMP itself tells, once torch has loaded it; the roles then end for want of a config."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": asked} if asked else {})
    command = [sys.executable, "-m", f"rl_async.{role[0]}", *role[1:], "--run", str(tmp_path)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert ended.returncode == EXIT_USER
    policies = re.findall(r"OMP_WAIT_POLICY ?= ?'(\w+)'", ended.stderr)
    assert policies
    assert set(policies) == {asked.upper() or "PASSIVE"}
