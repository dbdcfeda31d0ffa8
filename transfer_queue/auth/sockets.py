"""Socket files for a queue that only this machine uses: in a folder that only this user can enter.

The operating system keeps strangers out, so nothing is encrypted; a client shows its key in its hello, which says its
role.
"""

from pathlib import Path

from rl_async.errors import QueueLost
from rl_async.process.private_folder import require_private

SCHEME = "ipc://"


def check_private(folder: Path) -> None:
    """Raise UserError if another user may be behind the socket files in a folder, QueueLost if there is no folder."""
    try:
        require_private(folder)
    except FileNotFoundError:
        raise QueueLost(f"no transfer queue listens in {folder}, which does not exist") from None


def is_file(address: str) -> bool:
    """Return whether an address is that of a socket file."""
    return address.startswith(SCHEME)


def folder_of(address: str) -> Path:
    """Return the folder of a socket file's address."""
    return Path(address.removeprefix(SCHEME)).parent
