"""Every item of the first hour on GPUs, tiny or as a dry run on the CPU: no command of the runbook is broken."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.runbook import ITEMS

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1500)]


def test_every_item_runs_on_the_cpu(tmp_path: Path) -> None:
    if not (ROOT / ".venv-vllm" / "bin" / "python").is_file():
        pytest.skip("vLLM is not here; install it with scripts/install vllm")
    if find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not here; install it with pip install 'rl-async[megatron]'")
    command = [sys.executable, "-m", "benchmarks.runbook", "--rehearse", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {name: result["exit_code"] for name, result in found.items()} == dict.fromkeys(ITEMS, 0)
