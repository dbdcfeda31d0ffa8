"""The command ``rl-async``, installed or with forked roles, and a warm start that hardly trains its model."""

import subprocess
import sys
from pathlib import Path

from tests.support.forked import Forked

RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))
HARDLY_WARM = ["warm_start.min_steps=1", "warm_start.max_steps=2", "warm_start.check_every=1", "warm_start.gate=0"]


def start(cwd: Path, *arguments: str) -> Forked:
    """Start the command with forked roles; the caller must see that it ends."""
    return Forked("tests.support.forked_launcher", *arguments, cwd=cwd, parent=True)


def call(cwd: Path, *arguments: str, timeout_s: float = 280) -> "subprocess.CompletedProcess[str]":
    """Run the command with forked roles to its end."""
    command = start(cwd, *arguments)
    try:
        output, errors = command.communicate(timeout_s)
    finally:
        command.kill()
    return subprocess.CompletedProcess(arguments, command.returncode or 0, output, errors)


def succeed(cwd: Path, *arguments: str, timeout_s: float = 280) -> str:
    """Run the command as ``call`` does; it must exit with 0. Its standard output."""
    done = call(cwd, *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
