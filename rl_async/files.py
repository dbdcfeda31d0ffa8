"""Files that other processes read while they are written, and bounds of JSON before it is parsed.

Files are replaced whole, or appended to line by line. A parser of JSON holds Python's lock until it is done, in a
thread as well, so what a stranger sends is bounded by its values as by its bytes: 8 MiB of empty lists take a second.
"""

import contextlib
import difflib
import fcntl
import functools
import glob
import gzip
import json
import logging
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rl_async.errors import UserError

# MsgspecError alone is too narrow: bytes that are not UTF-8, and text with half a surrogate pair, raise a UnicodeError,
# and values nested too deeply a RecursionError. ``msgspec.convert``, of values that are decoded already, raises
# ValidationError alone. This is apart from ``errors``, which runs where msgspec is not installed.
UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)


log = logging.getLogger("rl_async.files")

# The errors of reading JSON, perhaps compressed, where a bit was flipped or an end was lost.
DAMAGE = (*UNDECODABLE, EOFError, zlib.error, gzip.BadGzipFile)
# In the folder of a Hugging Face model.
GENERATION_CONFIG = "generation_config.json"


def nearest_file(missing: Path) -> str:
    """Return a question for the file beside a missing one that its name was meant for, or an empty text."""
    beside = [file.name for file in missing.parent.glob("*") if file.is_file()]
    close = difflib.get_close_matches(missing.name, beside, n=1)
    return f"did you mean {missing.parent / close[0]}?" if close else ""


def nearest_run(missing: Path) -> str:
    """Return a question for the run folder that a missing one was meant for, beside it or in runs, or an empty text."""
    places = [missing.parent, Path("runs")] if len(missing.parts) == 1 else [missing.parent]
    runs = [file.parent for place in places for file in place.glob("*/config.yaml")]
    names = difflib.get_close_matches(missing.name, [run.name for run in runs], n=1)
    return next((f"did you mean {run}?" for run in runs if names == [run.name]), "")


_BLOCK = 1 << 16
# Every line of our files has fewer bytes.
_LONGEST_LINE = 1 << 20
# Locks of lineages are on bytes at this offset, which is beyond the end of any file.
_LOCKS = 1 << 60
_LOCK_POLL_S = 0.005
# No file is being written for so long.
_LEFTOVER_S = 86_400.0
_PROCESS = secrets.token_hex(4)


@contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a file or folder its name only when it is complete: the block writes to the path that it is given.

    That path is beside ``path`` and differs between processes, also between containers, whose main process is always 1.
    If the block raises, the file is deleted. After the block, a ``durable`` file survives a power cut; without
    that, one may leave it empty. An OSError names ``path``, also one of a write, which by itself names no file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{_PROCESS}")
    _delete_leftovers(path)
    _delete(temporary)
    try:
        yield temporary
        if durable:
            force_to_disk(temporary)
        temporary.replace(path)
        if durable:
            force_to_disk(path.parent)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
        _delete(temporary)


# A process looks once for each path.
@functools.cache
def _delete_leftovers(path: Path) -> None:
    """Delete what processes that were killed have left of earlier attempts to write ``path``."""
    temporary = re.compile(rf"\.{re.escape(path.name)}\.\d+-[0-9a-f]{{8}}")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(FileNotFoundError):
            if temporary.fullmatch(left.name) and time.time() - left.stat().st_mtime > _LEFTOVER_S:
                _delete(left)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write ``content`` to ``path`` so that a reader sees all of the old file or all of the new one.

    A ``durable`` write holds after a power cut, too, and is on the disk when this returns.
    """
    with written_whole(path, durable=durable) as temporary:
        temporary.write_bytes(content)


def make_durable_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its missing parents, unless it exists; it survives a power cut from here on.

    Raises FileExistsError if it is a file.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(made or [path]):
        folder.mkdir(mode if folder == path else 0o777, exist_ok=True)
    for folder in made or [path]:
        force_to_disk(folder.parent)


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Raise UserError, naming ``path``, if what the block reads of it is damaged."""
    try:
        yield
    except DAMAGE as error:
        raise UserError(f"{path} is damaged: {error}") from error


def last_line(path: Path) -> bytes:
    """Return the last complete line of a file, or an empty one. Takes as long for a file of any length."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
        whole = file.read().rpartition(b"\n")[0]
    return whole.rpartition(b"\n")[2]


def force_to_disk(path: Path) -> None:
    """Return when the file, or the folder's list of names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path) -> BinaryIO:
    """Open a file of text for appending whole lines, after ``drop_torn_lines``."""
    drop_torn_lines(path)
    return path.open("ab")


def append_durably(path: Path, lines: bytes, lineage: int, wait_s: float = 60.0) -> None:
    """Append whole lines to a file that several processes append to, and force them to disk.

    Either all of ``lines`` are appended, or none if that fails, as when the disk is full. What a killed process left of
    a line is cut off first, before another line would be glued to it. Processes of one lineage write one after the
    other, and each raises TimeoutError if another is not done within ``wait_s``. They do not wait for those of another
    lineage: an older one may be frozen while it writes.
    """
    with path.open("a+b", buffering=0) as file:
        _lock(file, _LOCKS + lineage, wait_s)
        end, written = _drop_torn_line(file), 0
        try:
            while written < len(lines):
                written += file.write(lines[written:])
            os.fsync(file.fileno())
            # A new file's name must be on the disk, too.
            if not end:
                force_to_disk(path.parent)
        except OSError:
            # No other lineage has appended lines meanwhile.
            if os.fstat(file.fileno()).st_size == end + written:
                file.truncate(end)
            raise


def _lock(file: FileIO, byte: int, wait_s: float) -> None:
    """Lock one byte of a file, which need not exist, until the file is closed."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        # EAGAIN or EACCES: another process has the lock.
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file.name}: another process has been writing for {wait_s:g} s") from None
            time.sleep(_LOCK_POLL_S)


def drop_torn_lines(path: Path) -> None:
    """Cut off a file of text where a power cut or a kill tore it. No process may be writing the file.

    What had not reached the disk when the power was cut reads as zeros, also before something that had.
    """
    if not path.exists():
        return
    start = 0
    with path.open("r+b") as file:
        while block := file.read(_BLOCK):
            if (zero := block.find(0)) >= 0:
                log.warning("%s: what follows byte %d was lost, as by a power cut", path, start + zero)
                file.truncate(start + zero)
                break
            start += len(block)
        _drop_torn_line(file)


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that has no newline. No process may be writing the file."""
    if path.exists():
        with path.open("r+b") as file:
            _drop_torn_line(file)


def _drop_torn_line(file: BinaryIO | FileIO) -> int:
    """Cut off a last line that has no newline, and return where the file ends then."""
    end = file.seek(0, os.SEEK_END)
    if end > 0:
        file.seek(end - 1)
        if file.read(1) == b"\n":
            return end
    whole = 0
    while end > 0 and whole == 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        whole = start + 1 + newline if (newline := file.read(end - start).rfind(b"\n")) >= 0 else 0
        end = start
    file.truncate(whole)
    return whole


PIECE = 1 << 16


class JsonValues:
    """The ``count`` of values in the pieces that were added."""

    def __init__(self) -> None:
        self.count = 0
        self._quoted = self._escaped = False

    def add(self, piece: bytes) -> None:
        """Count a piece; it may begin and end anywhere in the text."""
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        # Backslashes stand in strings alone, and each escapes one character.
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escaped = plain.endswith(b"\\")
        parts = plain.split(b'"')
        outside = b"".join(parts[self._quoted :: 2])
        self._quoted ^= len(parts) % 2 == 0
        # Each value but the first of a container follows a comma, each first one the container's bracket.
        self.count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")

    def end_line(self) -> None:
        """Note the end of a line, which no string of JSON contains."""
        self._quoted = self._escaped = False


def has_more_values(text: bytes, most: int) -> bool:
    """Whether a JSON text has more than ``most`` values."""
    # A value takes a character at least, its comma or bracket.
    if len(text) <= most:
        return False
    values = JsonValues()
    for place in range(0, len(text), PIECE):
        values.add(text[place : place + PIECE])
        if values.count > most:
            return True
    return False


class _Lost(Exception):
    pass


def lost_when_read(text: str | bytes, *, digits: bool = True) -> str | None:
    """Say what a reader of a JSON text silently loses; None if it loses nothing.

    That is all but one value of a key that an object has twice and, with ``digits``, those of a number that no float of
    64 bits has. Raises ValueError for a text that is not JSON.
    """
    try:
        # Whole numbers are read exactly, or refused by their next reader.
        json.loads(text, object_pairs_hook=_keep_all, parse_float=_keep_digits if digits else len, parse_int=len)
    except _Lost as lost:
        return str(lost)
    return None


def _keep_all(pairs: list[tuple[str, Any]]) -> None:
    if len(keys := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in keys if names.count(name) > 1)
        raise _Lost(f"has the key {twice!r:.80} twice in one object; keep one of them")


def _keep_digits(text: str) -> None:
    # Doubles are printed with 17 digits, or with as few as name them.
    if len(text) > 17 or not float(text):
        value = float(text)
        if Decimal(text) not in (Decimal(repr(value)), Decimal(f"{value:.16e}")):
            raise _Lost(f"has the number {text:.80}, which would become {value!r}; write it as text")
