"""Every extra of pyproject.toml resolves, and an engine's environment gets what the engine would get without us.

uv resolves from the metadata of the package index and downloads no packages.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.engines import ENGINES

ROOT = Path(__file__).parents[3]
EXTRAS = sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
WANTED = {traits.package: traits.versions for traits in ENGINES.values() if traits.package}
TRAINER = [extra for extra in EXTRAS if extra not in WANTED]
PINNED = ["--constraint", str(ROOT / "constraints.txt")]


@pytest.fixture(scope="module")
def uv() -> str:
    """The resolver; skips without it, and where no package index answers."""
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}") or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not here; install it with pip install 'rl-async[test]'")
    if _resolve(found, "xxhash").returncode != 0:
        pytest.skip("no package index answers uv: the test needs one to install packages from")
    return found


def resolve(uv: str, *extras: str, python: str = "3.11", options: Sequence[str] = ()) -> set[str]:
    """The packages, as ``name==version``, that an empty environment would get; fails if versions conflict."""
    chosen = [word for extra in extras for word in ("--extra", extra)]
    done = _resolve(uv, "", str(ROOT / "pyproject.toml"), "--python-version", python, *chosen, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    return set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_the_trainers_extras_resolve_together(uv: str, python: str) -> None:
    """An extra that did not resolve alone would not resolve beside the others either."""
    assert resolve(uv, *TRAINER, python=python)
    pins = (ROOT / "constraints.txt").read_text().lower().split()
    pinned = resolve(uv, *TRAINER, python=python, options=PINNED)
    assert pinned.intersection(pins) >= {pin for pin in pins if pin.partition("==")[0] in ("torch", "transformers")}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", WANTED)
def test_an_engine_resolves_beside_what_tests_need(uv: str, engine: str) -> None:
    assert resolve(uv, engine, "dev")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", WANTED)
def test_an_engine_gets_the_same_packages_as_without_rl_async(uv: str, engine: str) -> None:
    alone = _resolve(uv, f"{engine}{WANTED[engine]}", "--python-version", "3.11")
    assert alone.returncode == 0, alone.stderr[-4000:]
    assert set(alone.stdout.split()) <= resolve(uv, engine)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_conflict_is_found(uv: str) -> None:
    """The two engines pin different versions of torch: the resolver that the other tests ask says so."""
    done = _resolve(uv, "", str(ROOT / "pyproject.toml"), *[word for name in WANTED for word in ("--extra", name)])
    assert done.returncode != 0 and all(re.search(rf"\b{name}\b", done.stderr) for name in WANTED)


def _resolve(uv: str, requirements: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Resolve ``requirements``, or the files that ``words`` name, for Linux on x86-64, as engines need it."""
    platform = ("--python-platform", "x86_64-manylinux_2_34")
    command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", *platform, *words]
    command += ["-"] if requirements else []
    return subprocess.run(command, input=requirements, cwd=ROOT, capture_output=True, text=True, timeout=300)


# The examples for SkyPilot and dstack, parsed by these tools in a virtual environment that has them.

VARIABLE = "RL_ASYNC_CLOUDS_PYTHON"
PYTHON = Path(os.environ.get(VARIABLE, ROOT / ".venv-clouds/bin/python"))
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


@pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"no SkyPilot and dstack; install them with scripts/install clouds ({VARIABLE})"
)
@pytest.mark.parametrize(("script", "file"), CASES)
def test_its_own_tool_reads_the_example(script: str, file: str, tmp_path: Path) -> None:
    done = parse(script, file, tmp_path)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert (read["nodes"], read["gpus"]) == (2, {"H100": 8})
    assert "ray symmetric-run" in read["run"] and "rl-async launch --launcher ray" in read["run"]


@pytest.mark.skipif(
    not PYTHON.is_file(), reason=f"no SkyPilot and dstack; install them with scripts/install clouds ({VARIABLE})"
)
@pytest.mark.parametrize(("script", "file"), CASES)
def test_its_own_tool_would_refuse_what_it_does_not_know(script: str, file: str, tmp_path: Path) -> None:
    assert parse(script, file, tmp_path, nonsense=1).returncode != 0
