"""The Pythons of engines are checked for the engine's package, and for this rl-async beside it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_async
from rl_async.errors import UserError
from rl_async.launcher.plan.machine import check_engine_python, gpu_bytes


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder


@pytest.fixture(autouse=True)
def no_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_sglang_needs_its_package_and_ours(bare: Path) -> None:
    [site] = bare.glob("lib/python*/site-packages")
    python = f"{bare}/bin/python"
    with pytest.raises(UserError, match=r"rollout\.engine=sglang.*rl-async\[sglang\].*rollout\.python"):
        check_engine_python("sglang", python)
    (site / "sglang.py").touch()
    with pytest.raises(UserError, match=r"rollout\.python.*SGLang.*rl-async"):
        check_engine_python("sglang", python)
    (site / "rl_async.py").touch()
    with pytest.raises(UserError, match=r"rollout\.python.*xxhash"):
        check_engine_python("sglang", python)
    (site / "xxhash.py").touch()
    check_engine_python("sglang", python)


def test_vllm_needs_its_package_and_our_plugin_of_this_version(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True, timeout=60)
    [site] = tmp_path.glob("lib/python*/site-packages")
    python = f"{tmp_path}/bin/python"
    with pytest.raises(UserError, match=r"rollout\.engine=vllm.*install vllm.*rollout\.python"):
        check_engine_python("vllm", python)
    (site / "vllm.py").touch()
    with pytest.raises(UserError, match=r"rollout\.python.*vLLM.*rl-async"):
        check_engine_python("vllm", python)
    installed = site / "rl_async-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrl_async = rl_async.rollout_server.vllm.plugin:register\n"
    )
    (site / "rl_async.py").touch()
    (site / "xxhash.py").touch()
    with pytest.raises(UserError, match=rf"rollout\.python.*1.*{re.escape(rl_async.__version__)}"):
        check_engine_python("vllm", python)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rl-async\nVersion: {rl_async.__version__}\n")
    check_engine_python("vllm", python)
    # An editable installation of this checkout may have been made when the checkout had another version.
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-async\nVersion: 1\n")
    (site / "rl_async.py").unlink()
    (site / "here.pth").write_text(f"{Path(rl_async.__file__).parents[1]}\n")
    check_engine_python("vllm", python)


def test_the_embedded_engine_needs_nothing_and_a_python_must_be_there(tmp_path: Path) -> None:
    check_engine_python("embedded", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"rollout\.python.*none"):
        check_engine_python("vllm", str(tmp_path / "none"))


def test_the_python_that_runs_this_is_no_key_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(UserError) as caught:
        gpu_bytes()
    assert str(tmp_path / "none") in str(caught.value) and "rollout.python" not in str(caught.value)
