"""Reads what a Dockerfile of FROM, WORKDIR, COPY and ENV puts into the folder /app; whatever else is refused."""

import posixpath
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rl_async.errors import DataError

ROOT = "/app"
_INSTRUCTION = re.compile(r"([A-Za-z]+)\s+(.+)", re.DOTALL)


class Image(NamedTuple):
    """``files``: sources by their paths in the workspace, which has /app as ``app``."""

    workdir: str
    env: dict[str, str]
    files: dict[str, Path]


class _Reader:
    """The state of the image after the instructions that were read."""

    def __init__(self, context: Path) -> None:
        self._context = context
        self.workdir, self.based = "", False
        self.env = dict[str, str]()
        self.files = dict[str, Path]()  # by absolute path

    def read(self, name: str, rest: str) -> None:
        """Apply an instruction. Raises ValueError saying what is not supported."""
        if name == "FROM":
            if self.based:
                raise ValueError("a second FROM is not supported")
            self.based = True
        elif name == "WORKDIR":
            self.workdir = self._below_root(_literal(rest))
        elif name == "ENV":
            self.env |= _variables(rest)
        elif name == "COPY":
            self._copy(shlex.split(_literal(rest)))
        else:
            raise ValueError(f"{name} is not supported, only FROM, WORKDIR, COPY and ENV: there is no image to build")

    def _below_root(self, path: str) -> str:
        """Return an absolute path, which is below ROOT."""
        if not path.startswith("/") and not self.workdir:
            raise ValueError(f"{path!r} is relative, and no WORKDIR was set before")
        joined = posixpath.normpath(posixpath.join(self.workdir, path))
        if joined != ROOT and not joined.startswith(f"{ROOT}/"):
            raise ValueError(f"{joined} is not in {ROOT}, which alone can be written")
        return joined

    def _copy(self, words: list[str]) -> None:
        if len(words) < 2 or words[0].startswith(("-", "[", "<<")) or any(set("*?[") & set(word) for word in words):
            raise ValueError("COPY takes sources and a destination; options, patterns and lists are not supported")
        *sources, given = words
        target = self._below_root(given)
        folders = {ROOT, self.workdir, *(posixpath.dirname(path) for path in self.files)}
        into = len(sources) > 1 or given.endswith(("/", "/.")) or given == "." or target in folders
        for source in sources:
            path = self._context / posixpath.normpath(f"/{source}").lstrip("/")
            if path.is_dir():
                below = [file for file in files_below(path) if file != self._context / "Dockerfile"]
                self.files |= {f"{target}/{file.relative_to(path)}": file for file in below}
            elif path.is_file() and not path.is_symlink():
                self.files[f"{target}/{path.name}" if into else target] = path
            else:
                raise ValueError(f"COPY: {path} is neither a file nor a folder")


def read_dockerfile(context: Path) -> Image:
    """Read the Dockerfile of a folder. Raises DataError naming it and the line of what is wrong or not supported."""
    file = context / "Dockerfile"
    if (ignoring := context / ".dockerignore").exists():
        raise DataError(f"{ignoring}: not supported; COPY what is wanted")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}; tasks with an image made elsewhere are not supported") from error
    reader = _Reader(context)
    for number, line in _logical_lines(text):
        if (found := _INSTRUCTION.fullmatch(line)) is None:
            raise DataError(f"{file}:{number}: {line!r} is no instruction")
        try:
            reader.read(found[1].upper(), found[2])
        except ValueError as error:
            raise DataError(f"{file}:{number}: {error}") from None
    if not reader.based or not reader.workdir:
        raise DataError(f"{file}: needs FROM and WORKDIR {ROOT}")
    return Image(reader.workdir, reader.env, {path.removeprefix("/"): source for path, source in reader.files.items()})


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder. Raises DataError for what is neither a file nor a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DataError(f"{path}: links and special files are not supported")
        if path.is_file():
            yield path


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield instructions with the number of their first line: comments and empty lines left out, continued lines
    joined."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if parts else number
        continued = line.rstrip().endswith("\\")
        parts.append(line.strip().removesuffix("\\"))
        if not continued:
            yield begun, "".join(parts).strip()
            parts = []
    if parts:
        yield begun, "".join(parts).strip()


def _literal(text: str) -> str:
    if "$" in text:
        raise ValueError(f"variables are not supported: {text}")
    return text.strip()


def _variables(rest: str) -> dict[str, str]:
    """Read ENV: KEY=VALUE ..., or the older KEY VALUE."""
    words = shlex.split(_literal(rest))
    if "=" in words[0]:
        pairs = [word.partition("=")[::2] for word in words]
    else:
        name, _, value = rest.strip().partition(" ")
        pairs = [(name, value.strip())]
    if wrong := [name for name, _ in pairs if not name.isidentifier()]:
        raise ValueError(f"ENV: {wrong[0]!r} is no name of a variable")
    return dict(pairs)
