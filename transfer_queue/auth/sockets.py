"""Socket files for a queue that only this machine uses: in a folder that only this user can enter.

The operating system keeps strangers out, so nothing is encrypted; a client shows its key in its hello, which says its
role. The folder is not in the run's, whose path may be longer than a socket file's can be, or on a network file system.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_async.configs.derived.queue import is_encrypted
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import QueueLost, UserError

SCHEME = "ipc://"


def socket_folder(run: Path) -> Path:
    """Return the folder with the socket files of a run, the same for the same run folder, user and TMPDIR."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"rl-async-{os.getuid()}" / name


@contextmanager
def place_sockets(config: RunConfig, run: Path) -> Iterator[None]:
    """Have the run's folder for socket files, if it needs one, while the block runs.

    Raises UserError if it cannot be made.
    """
    if is_encrypted(config.queue):
        yield
        return
    folder = socket_folder(run)
    make_private(folder.parent)
    make_private(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Make a folder, unless it is there, that only this user can enter. Raises UserError if others can."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder} for socket files: {error.strerror} (TMPDIR)") from error
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raise UserError if another user may be behind the socket files in a folder, QueueLost if there is no folder."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        raise QueueLost(f"no transfer queue listens in {folder}, which does not exist") from None
    except OSError as error:
        raise UserError(f"cannot look at the folder {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"{folder} is not a folder that only this user can enter (mode 0700), so a stranger may listen there; "
            "remove it, or set TMPDIR to another place"
        )


def is_file(address: str) -> bool:
    """Return whether an address is that of a socket file."""
    return address.startswith(SCHEME)


def folder_of(address: str) -> Path:
    """Return the folder of a socket file's address."""
    return Path(address.removeprefix(SCHEME)).parent
