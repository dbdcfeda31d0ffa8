"""Every item of the first hour and of the quarter of an hour on GPUs, tiny or as a dry run on the CPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.runbook import ITEMS, QUARTER

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
    assert {name: result["exit_code"] for name, result in found["items"].items()} == dict.fromkeys(ITEMS, 0)


def rehearse(file: Path, names: list[str], *options: str) -> tuple[int, dict[str, Any]]:
    """Rehearse items of the quarter of an hour; the exit code, and the results, which ``file`` has."""
    command = [str(ROOT / "scripts" / "gpu_quarter"), "--rehearse", "--json", str(file), "--only", *names, *options]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400, check=False)
    return done.returncode, json.loads(file.read_text())


@pytest.mark.nightly
def test_the_colocated_run_of_the_quarter_of_an_hour_is_rehearsed(tmp_path: Path) -> None:
    code, found = rehearse(tmp_path / "quarter.json", ["colocated"])
    assert code == 0 and found["items"]["colocated"]["figures"]["steps"] == 2


@pytest.mark.slow
def test_the_quarter_of_an_hour_is_rehearsed_and_keeps_what_it_has_when_its_time_is_over(tmp_path: Path) -> None:
    file = tmp_path / "quarter.json"
    names = [name for name in QUARTER if name != "colocated"]
    if not (ROOT / ".venv-vllm" / "bin" / "python").is_file():
        names = [name for name in names if not QUARTER[name].needs]
    code, found = rehearse(file, names)
    assert {name: result["exit_code"] for name, result in found["items"].items()} == dict.fromkeys(names, 0)
    assert code == 0 and found["rehearsed"] and {"card", "torch"} <= found["machine"].keys()
    figures = {name: result["figures"] for name, result in found["items"].items()}
    assert figures["trainer"]["step_tokens_per_s"] > 0 and figures["publication"]["publication_s"] > 0
    assert figures["decode"]["decode_eager_tokens_per_s"] > 0 < figures["decode"]["decode_static_tokens_per_s"]
    assert figures["disaggregated"]["steps"] == 2
    code, found = rehearse(file, ["decode", "tests"], "--minutes", "0.001")
    assert code == 1 and [result["exit_code"] for result in found["items"].values()] == [None, None]
