"""The wheel and the source distribution hold every module, and every module imports outside the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = {path.name for path in (ROOT / "rl_async").iterdir() if path.is_symlink()}
EXTRAS = {  # modules that only an extra's package lets one import, by that package
    "rl_async.agent_loop.environments.player.verifiers": "verifiers",
    "rl_async.launcher.ray_nodes": "ray",
    "rl_async.rollout_server.vllm.int8": "vllm",
    "rl_async.rollout_server.vllm.slices": "vllm",
    **{f"rl_async.trainer.megatron.{part}": "megatron" for part in ("backend", "model", "weights")},
}


def modules() -> set[str]:
    """Every module of the project under its import name; the documentation, shipped as data, has none."""
    found = set()
    for folder, folders, files in os.walk(ROOT / "rl_async", followlinks=True):
        folders[:] = sorted(set(folders) - {"docs"})
        package = ".".join(Path(folder).relative_to(ROOT).parts)
        names = (Path(file) for file in files)
        found |= {package if n.stem == "__init__" else f"{package}.{n.stem}" for n in names if n.suffix == ".py"}
    return found


def test_every_root_folder_is_linked() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"rl_async"}
    # The documentation is linked, too, to be shipped as data.
    assert folders | {"docs"} == LINKS
    assert all(os.readlink(ROOT / "rl_async" / name) == f"../{name}" for name in LINKS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a source distribution of a copy of the packages, unpacked."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("rl_async", *LINKS):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(out),
        str(source),
    ]  # sdist, then its wheel
    done = subprocess.run(build, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    unpacked = out / "site"
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        wheel.extractall(unpacked)
    return unpacked


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_preset(site: Path) -> None:
    names = {p.relative_to(site).as_posix() for p in (site / "rl_async").rglob("*") if p.is_file()}
    for module in modules():
        path = module.replace(".", "/")
        assert f"{path}.py" in names or f"{path}/__init__.py" in names
    assert {f"rl_async/insight/view/static/{name}" for name in ("index.html", "app.js", "app.css")} <= names
    assert not any("view/web" in name for name in names), "the page's sources are not shipped"
    assert {f"rl_async/configs/presets/{p.name}" for p in (ROOT / "configs" / "presets").glob("*.yaml")} <= names
    assert {f"rl_async/docs/{p.relative_to(ROOT / 'docs').as_posix()}" for p in (ROOT / "docs").rglob("*.md")} <= names
    assert "rl_async/py.typed" in names


@pytest.mark.slow
def test_every_module_imports_from_the_wheel(site: Path, tmp_path: Path) -> None:
    """Modules that need no extra, and those whose extra is installed; vLLM and verifiers 0.4 have environments of
    their own."""
    installed = {extra for extra in EXTRAS.values() if find_spec(extra)}
    names = sorted(name for name in modules() if name not in EXTRAS or EXTRAS[name] in installed)
    assert len(names) >= len(modules()) - len(EXTRAS)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import importlib, rl_async\n"
        f"assert rl_async.__file__.startswith({str(site)!r}), rl_async.__file__\n"
        f"for name in {names!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
