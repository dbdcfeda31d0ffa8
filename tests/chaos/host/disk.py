"""A small file system that can be filled to the last byte and emptied again."""

import errno
import subprocess
import time
from pathlib import Path

BALLAST = "ballast"
BLOCKS = (1 << 20, 1 << 12, 1)
AGAIN_S = 0.02  # within which freed space is filled again


class SmallDisk:
    """A tmpfs of ``megabytes`` at ``folder``, gone with its mount namespace."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self._folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)

    def stay_full(self, seconds: float) -> None:
        """Fill it, and whatever is freed as well, for that long; then make room."""
        end = time.monotonic() + seconds
        try:
            with (self._folder / BALLAST).open("ab", buffering=0) as file:
                while time.monotonic() < end:
                    for block in BLOCKS:
                        _fill(file, bytes(block))
                    time.sleep(AGAIN_S)
        finally:
            (self._folder / BALLAST).unlink()

    def unmount(self) -> None:
        """Give the memory back, with everything in it."""
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)


def _fill(file: object, block: bytes) -> None:
    try:
        while file.write(block) == len(block):  # type: ignore[attr-defined]
            pass
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
