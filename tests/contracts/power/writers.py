"""Programs that keep or break a promise: ``python -m tests.contracts.power.writers ROOT NAME``, to be recorded."""

import mmap
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

from rl_async.files import force_to_disk
from tests.support.power.cuts import mark

LINE = b"%3000d\n"
REPLACED = [b"%d" % number * 9000 for number in range(4)]
ROWS = 12


def lines(root: Path, *, file: bool = True, folder: bool = True) -> None:
    """Append to a file of several pages, and acknowledge each line."""
    with (root / "lines").open("ab", buffering=0) as out:
        for number in range(len(REPLACED)):
            out.write(LINE % number)
            if file:
                os.fsync(out.fileno())
            if folder:
                force_to_disk(root)
            mark(str(number))


def replaced(root: Path, *, file: bool = True, folder: bool = True) -> None:
    """Replace a file by another that is written beside it, and acknowledge each."""
    for number, content in enumerate(REPLACED):
        (root / "new").write_bytes(content)
        if file:
            force_to_disk(root / "new")
        (root / "new").replace(root / "file")
        if folder:
            force_to_disk(root)
        mark(str(number))


def database(root: Path, journal: str, synchronous: str) -> None:
    """Insert rows into plain SQLite, one transaction each, and acknowledge each."""
    db = sqlite3.connect(root / "db", isolation_level=None)
    db.execute(f"PRAGMA journal_mode={journal}")
    db.execute(f"PRAGMA synchronous={synchronous}")
    db.execute("PRAGMA wal_autocheckpoint=8")
    db.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, body BLOB)")
    for number in range(ROWS):
        db.execute("INSERT INTO rows VALUES (?, zeroblob(3000))", (number,))
        mark(str(number))
    db.close()


def mapped(root: Path) -> None:
    """Write through a memory map."""
    with (root / "mapped").open("w+b") as file:
        file.write(bytes(4096))
        file.flush()
        with mmap.mmap(file.fileno(), 4096) as memory:
            memory[:4] = b"seen"


WRITERS: dict[str, Callable[[Path], None]] = {
    "lines": lines,
    "lines_without_fsync": lambda root: lines(root, file=False),
    "lines_without_folder": lambda root: lines(root, folder=False),
    "replaced": replaced,
    "replaced_without_fsync": lambda root: replaced(root, file=False),
    "replaced_without_folder": lambda root: replaced(root, folder=False),
    "wal_full": lambda root: database(root, "wal", "full"),
    "wal_normal": lambda root: database(root, "wal", "normal"),
    "wal_off": lambda root: database(root, "wal", "off"),
    "delete_full": lambda root: database(root, "delete", "full"),
    "delete_extra": lambda root: database(root, "delete", "extra"),
    "mapped": mapped,
}

if __name__ == "__main__":
    WRITERS[sys.argv[2]](Path(sys.argv[1]))
