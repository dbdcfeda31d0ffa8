"""The folder list, the package list and the built wheel agree, and every module imports outside the checkout."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file())
NEED_MORE = {  # vLLM, Megatron-Core or Ray, which the base installation does without
    "rl_async.launcher.on_ray",
    "rl_async.rollout_server.in_vllm.transfer",
    "rl_async.trainer.megatron",
    *(f"rl_async.trainer.megatron_{part}" for part in ("model", "optimizer", "outputs", "parallel", "weights")),
}


def packages() -> dict[str, str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]


def modules() -> set[str]:
    """Every module of the project under its import name."""
    found = set()
    for package, folder in packages().items():
        for path in (ROOT / folder).glob("*.py"):
            found.add(package if path.stem == "__init__" else f"{package}.{path.stem}")
    return found


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages())
    folders = {p.parent.relative_to(ROOT).as_posix() for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")}
    assert folders == set(packages().values())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the packages and unpacked."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    unpacked = out / "site"
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        wheel.extractall(unpacked)
    return unpacked


def test_the_wheel_holds_every_module_and_preset(site: Path) -> None:
    names = {p.relative_to(site).as_posix() for p in (site / "rl_async").rglob("*") if p.is_file()}
    for module in modules():
        path = module.replace(".", "/")
        assert f"{path}.py" in names or f"{path}/__init__.py" in names
    assert {f"rl_async/configs/{p.name}" for p in (ROOT / "configs").glob("*.yaml")} <= names
    assert "rl_async/py.typed" in names


def test_every_module_imports_from_the_wheel(site: Path, tmp_path: Path) -> None:
    names = sorted(modules() - NEED_MORE)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import importlib, rl_async\n"
        f"assert rl_async.__file__.startswith({str(site)!r}), rl_async.__file__\n"
        f"for name in {names!r}: importlib.import_module(name)"
    )
    # -S-like isolation is not possible (dependencies live in site-packages), so the editable finder is switched off.
    code = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Editable' not in repr(f)]\n" + code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
