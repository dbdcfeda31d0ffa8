"""A folder that only its user can enter, and shared memory, for a run's processes on one machine while it lasts.

The folder holds the queue's socket files, and the file that trainer ranks meet through. The operating system keeps
strangers out of it. It is not in the run's own folder, whose path may be longer than a socket file's can be, or on a
network file system. A segment of shared memory outlives its process: Python's resource tracker unlinks those of a
killed process, unless it is killed with it. So their names tell the supervisor which to remove, and a lock tells which
are in use, since containers that share ``/dev/shm`` (``--ipc=host``) may have run folders of the same path.
"""

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import BinaryIO

from rl_async.errors import UserError

# Environment variable: the file through which ranks meet, new for each of their starts.
RENDEZVOUS = "RL_ASYNC_RENDEZVOUS"
# Bytes of a socket file's path (unix(7)).
LONGEST = 107
# The launcher holds it while the run lasts.
LOCK = "lock"

log = logging.getLogger("rl_async.launcher")


def private_folder(run: Path) -> Path:
    """Return the private folder of a run, the same for the same run folder, user and TMPDIR."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rl-async-{os.getuid()}" / name


def socket_file(run: Path, name: str) -> Path:
    """Return the path of a socket file in a run's private folder. Raises UserError if TMPDIR makes it too long."""
    path = private_folder(run) / name
    if (length := len(os.fsencode(path))) > LONGEST:
        raise UserError(
            f"TMPDIR: the path of a socket file in {tempfile.gettempdir()} would have {length} bytes, and the most is "
            f"{LONGEST}; set TMPDIR to a shorter path, such as /tmp"
        )
    return path


@contextmanager
def hold_private_folder(run: Path) -> Iterator[Path]:
    """Have the run's private folder, empty at first, while the block runs; remove those that dead launchers left.

    Raises UserError if it cannot be made.
    """
    folder = private_folder(run)
    make_private(folder.parent)
    for left in folder.parent.iterdir():
        _sweep(left)
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Make a folder, unless it is there, that only this user can enter. Raises UserError if others can."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the private folder {folder}: {error.strerror} (TMPDIR)") from error
    require_private(folder)


def require_private(folder: Path) -> None:
    """Raise UserError if another user may have put a file into a folder, FileNotFoundError if it does not exist."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot look at the folder {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"{folder} is not a folder that only this user can enter (mode 0700), so a stranger may listen there; "
            "remove it, or set TMPDIR to another place"
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder and hold its lock, which the kernel releases when this process ends; children do not inherit it.

    A launcher that starts at the same time may remove the folder before its lock is held; then this is repeated.
    """
    while True:
        make_private(folder)
        try:
            file = (folder / LOCK).open("ab")
        except FileNotFoundError:
            continue
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, folder / LOCK):
                yield
                return


def _sweep(folder: Path) -> None:
    """Remove a folder whose launcher is dead. One without a lock was not made by a launcher, and stays."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, folder / LOCK):
                log.info("removing %s, which a killed launcher left", folder)
                shutil.rmtree(folder, ignore_errors=True)
    except (FileNotFoundError, NotADirectoryError, BlockingIOError):
        return


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return False


SEGMENT_PREFIX = "RL_ASYNC_SHARED_MEMORY"
# On Linux.
SEGMENTS = Path("/dev/shm")


def prefix_for(file: Path) -> str:
    """Return the prefix for the segments of the process whose own file this is, the same at each of its starts."""
    return f"rl-async-{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:12]}-"


def create_segment(nbytes: int) -> SharedMemory:
    """Create a segment whose name has the prefix that this process was started with, and which only it unlinks.

    Its descriptor holds a lock until it is closed or the process ends. Raises OSError if it cannot be made.
    """
    while True:
        name = f"{os.environ.get(SEGMENT_PREFIX, 'rl-async-')}{secrets.token_hex(4)}"
        segment = SharedMemory(name, create=True, size=nbytes)
        fcntl.flock(segment._fd, fcntl.LOCK_SH)  # type: ignore[attr-defined]
        # A supervisor of another container may have unlinked it before the lock was held.
        if os.fstat(segment._fd).st_nlink:  # type: ignore[attr-defined]
            return segment
        segment.close()
        resource_tracker.unregister(f"/{name}", "shared_memory")


def sweep_segments(prefix: str) -> None:
    """Unlink this user's segments with this prefix whose processes have ended; mappings of them stay."""
    for segment in SEGMENTS.glob(f"{prefix}*"):
        # The resource tracker may be faster; a locked one belongs to a process of another container.
        with suppress(FileNotFoundError, BlockingIOError):
            if segment.lstat().st_uid == os.getuid():
                with segment.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    segment.unlink()
