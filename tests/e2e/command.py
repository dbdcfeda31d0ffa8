"""The installed command, and a warm start that hardly trains its model: for tests of whole runs."""

import subprocess
import sys
from pathlib import Path

RL_ASYNC = str(Path(sys.executable).with_name("rl-async"))
HARDLY_WARM = ["warm_start.min_steps=1", "warm_start.max_steps=2", "warm_start.check_every=1", "warm_start.gate=0"]


def succeed(cwd: Path, *arguments: str, timeout_s: float = 280) -> str:
    """Run the command, which must exit with 0; what it printed on standard output."""
    done = subprocess.run([RL_ASYNC, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
