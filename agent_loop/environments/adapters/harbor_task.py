"""Reads and checks the folder of a Harbor task; nothing of it runs here.

What a sandbox without images, network and further services cannot give is refused by name: keys of `task.toml` as
unknown ones, instructions of the Dockerfile beyond FROM, WORKDIR, COPY and ENV with their line.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from rl_async.agent_loop.environments.adapters.dockerfile import files_below, read_dockerfile
from rl_async.errors import DataError
from rl_async.files import UNDECODABLE

_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)[ \t]*\n)+\s*", re.IGNORECASE)  # hides no task
_None = Annotated[list[Any], msgspec.Meta(max_length=0)]


class _Section(msgspec.Struct, forbid_unknown_fields=True):
    network_mode: Literal["public", "no-network"] = "public"  # the sandbox has none either way


class _Agent(_Section):
    timeout_sec: float | None = None


class _Verifier(_Section):
    timeout_sec: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    env: dict[str, str] = {}


class _Environment(_Section):
    build_timeout_sec: float = 600.0
    cpus: int | None = None
    memory: str | None = None
    memory_mb: int | None = None
    storage: str | None = None
    storage_mb: int | None = None
    gpus: Literal[0] | None = None
    os: Literal["linux"] = "linux"
    allow_internet: bool | None = None
    env: dict[str, str] = {}
    mcp_servers: _None = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: str = ""
    schema_version: str = ""
    source: str | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    verifier: _Verifier = msgspec.field(default_factory=_Verifier)
    agent: _Agent = msgspec.field(default_factory=_Agent)
    environment: _Environment = msgspec.field(default_factory=_Environment)
    solution: dict[str, Any] = {}
    artifacts: list[Any] = []


class Placed(NamedTuple):
    """A file to be put into the workspace, at a path relative to it."""

    path: str
    data: bytes
    executable: bool


class HarborTask(NamedTuple):
    """What a task's folder says. ``env`` of programs, ``verifier_env`` of the tests besides."""

    name: str
    instruction: str
    workdir: str
    env: dict[str, str]
    verifier_env: dict[str, str]
    verifier_s: float
    files: list[Placed]
    tests: list[Placed]


def task_folders(folder: Path) -> list[Path]:
    """Return the folders of tasks in ``folder``. Raises DataError if there is none."""
    if found := sorted(file.parent for file in folder.glob("*/task.toml")):
        return found
    raise DataError(f"{folder}: no folder in it has a task.toml, so it holds no tasks of Harbor")


def read_task(folder: Path) -> HarborTask:
    """Read a task. Raises DataError naming the file that is missing, wrong or not supported."""
    list(files_below(folder))  # no link leads out of it
    config = _config(folder / "task.toml")
    image = read_dockerfile(folder / "environment")
    for of_compose in ("docker-compose.yaml", "docker-compose.yml"):
        if (file := folder / "environment" / of_compose).exists():
            raise DataError(f"{file}: a task of several containers is not supported")
    if not (test := folder / "tests" / "test.sh").is_file():
        raise DataError(f"{test}: no such file; it judges what was done")
    instruction = _CANARY.sub("", _text(folder / "instruction.md"))
    if not instruction.strip():
        raise DataError(f"{folder / 'instruction.md'} is empty")
    return HarborTask(
        folder.name,
        instruction,
        image.workdir,
        image.env | config.environment.env,
        config.verifier.env,
        config.verifier.timeout_sec,
        [_placed(path, source) for path, source in image.files.items()],
        [_placed(f"tests/{file.relative_to(folder / 'tests')}", file) for file in files_below(folder / "tests")],
    )


def _config(file: Path) -> _File:
    try:
        config = msgspec.toml.decode(_text(file), type=_File)
    except UNDECODABLE as error:
        raise DataError(f"{file}: {error}; other keys and values are not supported") from error
    for section in ("environment", "verifier"):
        for name, value in getattr(config, section).env.items():
            if not name.isidentifier() or "$" in value:
                raise DataError(f"{file}: {section}.env.{name}: variables of this machine are not handed to tasks")
    return config


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}") from error


def _placed(path: str, source: Path) -> Placed:
    return Placed(path, source.read_bytes(), bool(source.stat().st_mode & 0o100))
