"""What the processes of a run did when, for ``rl-async view`` and ``rl-async trace``: ``RUN/timeline/WRITER.jsonl``.

A line says that a lane entered a stage, which lasts until the lane's next line: the last one of a process that was
killed is what it did then. Each file has one writing process, and at most two times MOST_BYTES are kept of it.
"""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from rl_async.undecodable import UNDECODABLE

MOST_BYTES = 1 << 20
FOLDER = "timeline"
OLDER = ".older"


class Entered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lane, such as a trainer rank or an engine, has entered a stage."""

    writer: str  # whose file it is in
    lane: str
    at: float  # Unix time
    stage: str = ""  # empty: it does nothing
    step: int = -1  # to which the stage belongs
    version: str = ""  # of the weights that it is about
    about: str = ""


def enter(run: Path, writer: str, lane: str, stage: str, *, step: int = -1, version: str = "", about: str = "") -> None:
    """Append a line to the file of ``writer``, by which no other process writes. Costs about 50 µs."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{writer}.jsonl"
    line = Entered(writer=writer, lane=lane, at=time.time(), stage=stage, step=step, version=version, about=about)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # by a power cut
        os.write(file, b"\n" * torn + msgspec.json.encode(line) + b"\n")
    finally:
        os.close(file)
    if size > MOST_BYTES:
        path.replace(folder / f"{writer}{OLDER}.jsonl")


class TimelineReader:
    """Reads what all processes of a run entered, of each file only what was added since the last call.

    ``read`` may be called on several threads.
    """

    def __init__(self, run: Path) -> None:
        self._folder, self._lock = run / FOLDER, threading.Lock()
        self._files: dict[bytes, _Read] = {}  # by the first line, which a file keeps when it becomes the older one

    def read(self) -> list[Entered]:
        """Return everything that the files hold, oldest first. Lines that a power cut tore are left out."""
        with self._lock:
            found: dict[bytes, _Read] = {}
            for path in self._folder.glob("*.jsonl"):
                with suppress(FileNotFoundError), path.open("rb") as file:  # it has become the older one
                    first = file.readline()
                    found[first] = self._files.get(first, _Read(0, [])).advanced(file)
            self._files = found
            entered = [one for read in found.values() for one in read.entered]
        return sorted(entered, key=lambda one: one.at)


class _Read(NamedTuple):
    """What was read of a file, up to ``offset``."""

    offset: int
    entered: list[Entered]

    def advanced(self, file: BinaryIO) -> "_Read":
        file.seek(self.offset)
        whole, newline, _ = file.read().rpartition(b"\n")
        for line in whole.splitlines():
            with suppress(*UNDECODABLE):
                self.entered.append(msgspec.json.decode(line, type=Entered))
        return _Read(self.offset + len(whole) + len(newline), self.entered)


def read_timeline(run: Path) -> list[Entered]:
    """Read what all processes of a run entered, oldest first. Lines that a power cut tore are left out."""
    return TimelineReader(run).read()
