"""Files that other processes read while they are written: replaced whole, or appended to line by line."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 16  # bytes


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a file or folder its name only when it is complete: the block writes to the path that it is given.

    That path is beside ``path`` and differs between processes. If the block raises, what it wrote is deleted.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    _delete(temporary)  # a killed process had the same id: in a container every main process is 1
    try:
        yield temporary
        temporary.replace(path)
    finally:
        _delete(temporary)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees all of the old file or all of the new one."""
    with written_whole(path) as temporary:
        temporary.write_bytes(content)


def force_to_disk(path: Path) -> None:
    """Return when the file, or the folder's list of names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a file for appending whole lines, after cutting off the partial line of a process that was killed."""
    drop_torn_line(path)
    return path.open("ab", buffering)


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that has no newline. No process may be writing the file."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
