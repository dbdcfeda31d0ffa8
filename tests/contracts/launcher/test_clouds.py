"""The examples for SkyPilot and dstack, parsed by these tools in a virtual environment that has them."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
VARIABLE = "RL_ASYNC_CLOUDS_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, ROOT / ".venv-clouds/bin/python"))
pytestmark = pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"no SkyPilot and dstack; install them with scripts/install clouds ({VARIABLE})"
)
SKYPILOT = """
import json, sys, sky, yaml
content = yaml.safe_load(open(sys.argv[1]))
content |= yaml.safe_load(sys.argv[2])
task = sky.Task.from_yaml_config(content)
(resources,) = task.resources
print(json.dumps({"nodes": task.num_nodes, "gpus": resources.accelerators, "run": task.run}))
"""
DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
content = yaml.safe_load(open(sys.argv[1]))
content |= yaml.safe_load(sys.argv[2])
task = parse_run_configuration(content)
gpu = task.resources.gpu
print(json.dumps({"nodes": task.nodes, "gpus": {gpu.name[0]: gpu.count.max}, "run": task.commands[-1]}))
"""
CASES = [(SKYPILOT, "skypilot.yaml"), (DSTACK, "task.dstack.yml")]


def parse(script: str, file: str, home: Path, **changed: Any) -> "subprocess.CompletedProcess[str]":
    command = [str(PYTHON), "-c", script, str(ROOT / "examples" / "clouds" / file), json.dumps(changed)]
    environment = os.environ | {"HOME": str(home)}  # both keep files of their own there
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("script", "file"), CASES)
def test_its_own_tool_reads_the_example(script: str, file: str, tmp_path: Path) -> None:
    done = parse(script, file, tmp_path)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert (read["nodes"], read["gpus"]) == (2, {"H100": 8})
    assert "ray symmetric-run" in read["run"] and "rl-async launch --launcher ray" in read["run"]


@pytest.mark.parametrize(("script", "file"), CASES)
def test_its_own_tool_would_refuse_what_it_does_not_know(script: str, file: str, tmp_path: Path) -> None:
    assert parse(script, file, tmp_path, nonsense=1).returncode != 0
