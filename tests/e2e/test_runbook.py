"""Every item of the first hour and of the quarter of an hour on GPUs, tiny or as a dry run on the CPU."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import quarter
from benchmarks.gpu import LADDER
from benchmarks.runbook import ITEMS

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


@pytest.mark.nightly
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


@pytest.mark.slow
def test_the_quarter_of_an_hour_writes_its_figures(tmp_path: Path) -> None:
    items = [name for name in quarter.ITEMS if name != "checks"]
    command = [sys.executable, "-m", "benchmarks.quarter", "--rehearse", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [*command, "--only", *items], cwd=ROOT, capture_output=True, text=True, timeout=1400, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == {"machine", *items}
    assert found["ladder"]["ladder"].keys() == LADDER.keys() and found["decode"]["decode_tokens_per_s"] > 0
    assert found["largest model"]["step_tokens_per_s"] > 0
    assert found["publication"]["publication_s"].keys() == {"1", "4"}
    for mode in ("colocated", "disaggregated"):
        # The engines that were compared had what the trainer published.
        assert found[mode]["steps"] == 2 and found[mode]["mismatch/mean, largest"] < 1e-4
