"""The names that our plugin touches inside vLLM, looked up in the sources of versions that are not run here."""

import ast
import os
import subprocess
from pathlib import Path

import pytest

from rl_async.configs.engines import VLLM, in_range
from rl_async.rollout_server.vllm import versions
from rl_async.rollout_server.vllm.versions import (
    COUNTED_VERSIONS,
    DIVIDED_EXPERTS_ON_CPU,
    EXPERTS_ON_CPU,
    FURTHER_NODES,
    SCALE_OUT,
    TOKEN_VERSIONS,
    TOUCHED,
    TOUCHED_ON_CPU,
    Names,
)
from tests.conftest import vllm_python

FOLDER = "RL_ASYNC_VLLM_SOURCES"
SOURCES = Path(os.environ.get(FOLDER, Path(__file__).parents[3] / ".vllm-sources"))
VERSIONS = sorted(path.name for path in SOURCES.glob("*") if (path / "vllm").is_dir())
ALL: Names = {**TOUCHED, **TOUCHED_ON_CPU}
# The versions that have the names of a feature: from the first to before the second.
SINCE = [
    (FURTHER_NODES, ">=0.26"),
    (TOKEN_VERSIONS, ">=0.32"),
    (EXPERTS_ON_CPU, ">=0.28"),
    (DIVIDED_EXPERTS_ON_CPU, ">=0.30"),
    (SCALE_OUT[0], ">=0.30,<0.33"),
    (SCALE_OUT[1], ">=0.33"),
]
BASE = "vllm/distributed/weight_transfer/base.py"


def missing(root: Path, wanted: Names = ALL) -> list[str]:
    """The names that the package in ``root`` lacks, or that lack a parameter that we pass."""
    found = []
    for module, names in wanted.items():
        path = root / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        here = defined(ast.parse(file.read_text()).body) if file.is_file() else {}
        for name, parameters in names.items():
            if not any(one in here and not set(parameters) - here[one] for one in name.split("|")):
                found.append(name)
    return found


def methods(file: Path, owner: str, *, abstract: bool = False) -> set[str]:
    """The methods that a class in ``file`` defines, or those of them that it leaves to others."""
    (found,) = (n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == owner)
    return {
        node.name
        for node in found.body
        if isinstance(node, ast.FunctionDef)
        and (not abstract or any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in node.decorator_list))
    }


def defined(body: list[ast.stmt], prefix: str = "") -> dict[str, set[str]]:
    """The names that statements define or import, of classes also their members, with the parameters of functions."""
    found: dict[str, set[str]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            found[prefix + node.name] = {argument.arg for argument in taken}
        elif isinstance(node, ast.ClassDef):
            found |= {prefix + node.name: set()} | defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {prefix + target.id: set() for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {prefix + (alias.asname or alias.name): set() for alias in node.names}
    return found


# The wheels are 1.1 GB to download.
@pytest.mark.nightly
@pytest.mark.skipif(not VERSIONS, reason=f"install them with scripts/install vllm-sources, or set {FOLDER}")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_the_names_that_it_needs(version: str) -> None:
    root = SOURCES / version
    assert in_range(version, VLLM.versions) and not missing(root) and not missing(root, COUNTED_VERSIONS)
    assert [not missing(root, names) for names, _ in SINCE] == [in_range(version, range_) for _, range_ in SINCE]
    ours = methods(Path(versions.__file__).with_name("slices.py"), "WeightTransfer")
    assert methods(root / BASE, "WeightTransferEngine", abstract=True) <= ours


def test_a_name_that_is_missing_or_takes_other_parameters_is_noticed(tmp_path: Path) -> None:
    for module in ALL:
        file = (tmp_path / module.replace(".", "/")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("class RequestState:\n    def _new_completion_output(self): ...\n")
    everything = [name for names in ALL.values() for name in names]
    assert missing(tmp_path) == [name for name in everything if name != "RequestState._new_completion_output"]
    fp8 = tmp_path / "vllm/model_executor/layers/quantization/online/fp8.py"
    fp8.write_text("class _Fp8OnlineLinearBase: ...\n")
    assert not any("OnlineLinearBase" in name for name in missing(tmp_path)), "an alternative is not enough"
    core = tmp_path / "vllm/v1/engine/core.py"
    core.write_text("class EngineCore:\n    def preprocess_add_request(self, other): ...\n")
    assert "EngineCore.preprocess_add_request" in missing(tmp_path)
    core.write_text("class EngineCore:\n    def preprocess_add_request(self, request): ...\n")
    assert "EngineCore.preprocess_add_request" not in missing(tmp_path)


@pytest.mark.slow
def test_the_installed_vllm_lacks_none_and_another_is_refused_by_name() -> None:
    program = """
import logging
from rl_async.rollout_server.vllm import private_names as p
p.require_all("0.32.0", cpu=True)
p.TOUCHED["vllm.platforms"] = {"no_such_name": ()}
try:
    p.require_all("0.99.0", cpu=True)
except RuntimeError as error:
    assert "vLLM 0.99.0 has no vllm.platforms.no_such_name" in str(error), error
del p.TOUCHED["vllm.platforms"]
p.require_all("0.99.0", cpu=True)
"""
    done = subprocess.run([vllm_python(), "-P", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vLLM 0.99.0 has not been tried" in done.stderr
