"""Files of one JSON object per line that several processes of a run append to, one after the other."""

from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 16  # bytes


def append_lines(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a file for appending whole lines, after cutting off what a killed process left of one."""
    drop_torn_line(path)
    return path.open("ab", buffering)


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without its newline, so that the next line stands alone. Nobody may be writing the file."""
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
