"""Environments of other projects, played by tests in a virtual environment that has these projects."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VARIABLE = "RL_ASYNC_ENVIRONMENTS_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, ROOT / ".venv-environments/bin/python"))


@pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"no environments to play; install some with scripts/install environments ({VARIABLE})"
)
@pytest.mark.parametrize(
    "project", ["gymnasium", "textarena", "verifiers", "openenv", "verl", "pettingzoo", "reasoning_gym"]
)
def test_environments_of(project: str) -> None:
    file = Path(__file__).with_name(f"of_{project}.py")
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
