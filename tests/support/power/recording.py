"""Runs a program and records what it changes below a folder: ``record``. ``disk.py`` cuts the power at any point of it.

The program is preloaded with ``recorder.c``. With ``mark`` it says what it has acknowledged, and so promised to keep.
"""

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("recorder.c")
REPOSITORY = Path(__file__).parents[3]
WAIT_S = 120.0
_HEADER = struct.Struct("<BQQQII")  # struct record


class Change(NamedTuple):
    """One record. ``kind`` is a letter, which ``disk.py`` interprets; a mark is of kind ``m``, its text is the path."""

    kind: str
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


def build_recorder(folder: Path) -> Path:
    """Compile the library. Raises FileNotFoundError without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("cc")
    library = folder / "recorder.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True, timeout=WAIT_S)
    return library


def environment(library: Path, root: Path, log: Path) -> dict[str, str]:
    """The variables with which a program records what it does below ``root``, which exists and is empty."""
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "POWER_ROOT": str(root),
        "POWER_LOG": str(log),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }


def record(library: Path, module: str, arguments: Sequence[str], root: Path, log: Path) -> list[Change]:
    """Run ``module`` with ``root`` as its first argument; return what it changed there and marked, in order."""
    root.mkdir()
    command = [sys.executable, "-m", module, str(root), *arguments]
    subprocess.run(command, cwd=REPOSITORY, env=environment(library, root, log), check=True, timeout=WAIT_S)
    return read_log(log)


def read_log(log: Path) -> list[Change]:
    """Read the records of a log."""
    content, changes, at = memoryview(log.read_bytes()), [], 0
    while at < len(content):
        kind, inode, offset, data, path, other = _HEADER.unpack_from(content, at)
        parts = []
        at += _HEADER.size
        for length in (path, other, data):
            parts.append(bytes(content[at : at + length]))
            at += length
        changes.append(Change(chr(kind), inode, offset, parts[0].decode(), parts[1].decode(), parts[2]))
    return changes


def marks_of(changes: Sequence[Change]) -> list[str]:
    """Everything that was acknowledged."""
    return [change.path for change in changes if change.kind == "m"]


def mark(text: str) -> None:
    """Record that ``text`` was acknowledged: what it stands for has to survive a power cut from here on."""
    path = text.encode()
    with open(os.environ["POWER_LOG"], "ab", buffering=0) as log:
        log.write(_HEADER.pack(ord("m"), 0, 0, 0, len(path), 0) + path)
