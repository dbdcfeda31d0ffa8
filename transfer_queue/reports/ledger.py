"""The admission ledger ``RUN/ledger.jsonl``: one JSON object per line, appended and never rewritten.

It says which groups exist and what became of them, independently of the trainer's ``trained.jsonl``;
``audit.py`` compares the two. Lines are written after the journal has what they say, and each has the number of its
transition (``seq``), so that a queue which was killed in between, or lost the end of its journal, sets it right. They
are forced to disk only before the journal forgets the transitions that they came from (``compacting``): after a power
cut, whatever is missing or torn can be written again.
"""

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from rl_async.errors import JournalError
from rl_async.files import drop_torn_line, force_to_disk
from rl_async.transfer_queue.state.transitions import (
    Admitted,
    BatchCommitted,
    BatchReserved,
    DeadLettered,
    GroupDropped,
    GroupReady,
    RolledBack,
    RunFinished,
    SamplesStored,
    ShardLost,
    Transition,
)
from rl_async.undecodable import UNDECODABLE

log = logging.getLogger("rl_async.queue")

COMPACTED = "compacted"  # the event of a line that says: the lines before it are on the disk
_encode = msgspec.json.Encoder().encode


class Ledger:
    """Writes what became of groups, and the hashes of each sample's tokens as its producer announced them.

    Whole lines are written; one torn by a kill or a full disk is cut off by the next queue, and so is what follows the
    first line that a power cut tore.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        drop_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self.is_empty = self._file.tell() == 0  # as at a run's first start, or since the file was lost
        self._lines: list[bytes] = []
        self._seq = 0  # of the next transition
        self._known = 0  # transitions whose lines are in the file already
        self._claimed = 0  # the same, with those of lines that were cut off
        self._journal = ""  # that is followed

    def follow(self, journal: str, count: int) -> bool:
        """Continue after ``count`` transitions of this journal; return whether it is the one followed so far.

        If it is not, a line will say so. Raises JournalError if lines are torn that the journal cannot restore.
        """
        self._seq = count
        start, last = _settled(self._path)
        torn, known, self._journal = None, 0, journal
        for offset, line in _numbered(self._path, start):
            if line is None:
                if torn is None:
                    torn, known = offset, self._known if last == journal else -1
            elif line.event == "journal":
                last, self._known = line.id, 0
            elif last == journal:
                self._known = line.seq + 1
        if last != journal:
            self._known = 0
            self._lines.append(msgspec.json.encode({"event": "journal", "id": journal}) + b"\n")
        self._claimed = self._known
        if torn is not None:
            self._cut_torn(torn, known)
        return last == journal

    def _cut_torn(self, offset: int, known: int) -> None:
        """Cut off the line at ``offset`` and the rest, if the journal has all but the first ``known`` transitions."""
        number = 1 + self._path.read_bytes()[:offset].count(b"\n")
        if known < self._seq:
            raise JournalError(
                f"{self._path}:{number} is damaged, and the journal does not have what was there; move the file away, "
                "the audit needs it whole"
            )
        log.warning("%s:%d is torn, as by a power cut; from here on it is written again", self._path, number)
        self._file.truncate(offset)
        self._known = known

    def catch_up(self, transitions: Iterable[Transition], *, may_cut: bool = True) -> Iterator[Transition]:
        """Pass on transitions of the journal, writing the lines that are missing and cutting off those too many.

        Raises JournalError if there are too many and they may not be cut: the journal has lost what was acknowledged.
        """
        for transition in transitions:
            self.append(transition)
            yield transition
        if self._claimed > self._seq:
            if not may_cut:
                raise JournalError(
                    f"the queue's journal ends at transition {self._seq}, and {self._path} knows {self._claimed}: what "
                    "was acknowledged is lost, as when a replica of Redis without it is promoted; end the run's other "
                    "processes and continue from the last checkpoint with --resume"
                )
            self._cut(self._seq)
        self.flush()

    def _cut(self, count: int) -> None:
        """The journal has only ``count`` transitions: what is written of later ones did not happen."""
        start, end = 0, None
        for offset, line in _numbered(self._path):
            assert line is not None, "torn lines were cut off"
            if line.event == "journal":
                start, end = offset, None
            elif end is None and line.seq >= count:
                end = offset
        if end is not None and end > start:
            self._file.truncate(end)
        self._known = count

    @property
    def count(self) -> int:
        """The number of transitions seen so far."""
        return self._seq

    def append(self, transition: Transition) -> None:
        """Take in the transition if it belongs into the ledger."""
        seq, self._seq = self._seq, self._seq + 1
        line = _LINES.get(type(transition))
        if line is not None and seq >= self._known:
            self._lines.append(_encode(line(transition) | {"seq": seq}) + b"\n")

    def flush(self) -> None:
        """Write the lines. Raises JournalError naming the file if that fails."""
        if not self._lines:
            return
        data, self._lines = b"".join(self._lines), []
        try:
            written = self._file.write(data)
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            raise JournalError(f"{self._path}: {error.strerror}; make room there and continue with --resume") from error

    def force(self) -> None:
        """Write the lines, and return when they and the file's name would survive a power cut."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
            force_to_disk(self._path.parent)
        except OSError as error:
            raise JournalError(f"{self._path}: {error.strerror}") from error

    def compacting(self) -> None:
        """Force to disk what the journal is about to forget."""
        self._lines.append(_encode({"event": COMPACTED, "seq": self._seq - 1, "id": self._journal}) + b"\n")
        self.force()

    def close(self) -> None:
        """Close the file; lines that were not flushed are forgotten."""
        self._file.close()


def tells_samples(path: Path) -> bool:
    """Whether a ledger says that a sample came to the queue; False without one."""
    return path.exists() and any(line is not None and line.event == "put" for _, line in _numbered(path))


def newest_lineage(path: Path) -> int:
    """Return the lineage of the last trainer that a ledger saw resume the run; -1 if it saw none."""
    with _mapped(path) as lines:
        return max((line.lineage for _, line in _newest(lines, "resume")), default=-1)


def tells_end(path: Path) -> bool:
    """Whether the last that a ledger says of its run is that it ended; False without one. Torn lines do not count."""
    with _mapped(path) as lines:
        finished, resumed = (next(_newest(lines, event), (-1, None))[0] for event in ("finish", "resume"))
    return finished > resumed


def _settled(path: Path) -> tuple[int, str | None]:
    """Where a ledger need not be read before, and the journal that is followed there.

    That is the last line but one that says that those before it are on the disk: the journal forgot nothing before the
    next such line was written. 0 if there is none, so that what a long run has written is not read whole at each start.
    """
    with _mapped(path) as lines:
        places = _newest(lines, COMPACTED)
        next(places, None)
        offset, line = next(places, (0, None))
    return (offset, line.id) if line is not None and line.id else (0, None)


@contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """The bytes of a file without reading those that nobody looks at; none if it is not there."""
    if not path.exists() or not path.stat().st_size:
        yield b""
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        yield lines


def _newest(lines: bytes | mmap.mmap, event: str) -> "Iterator[tuple[int, _Numbered]]":
    """The whole lines of one event with their offsets, newest first.

    Their beginning occurs nowhere else: a string in JSON has no bare quotes.
    """
    beginning, at = b'{"event":"%b"' % event.encode(), len(lines)
    while (at := lines.rfind(beginning, 0, at)) >= 0:
        end = lines.find(b"\n", at)
        with suppress(*UNDECODABLE):
            yield at, msgspec.json.decode(lines[at : end if end >= 0 else len(lines)], type=_Numbered)


class _Numbered(msgspec.Struct):
    event: str
    seq: int = -1
    id: str = ""
    lineage: int = -1


def _numbered(path: Path, offset: int = 0) -> Iterator[tuple[int, _Numbered | None]]:
    """The lines from ``offset`` on with their offsets, None for one that is no line of a ledger."""
    decoder = msgspec.json.Decoder(_Numbered)
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            try:
                yield offset, decoder.decode(line)
            except UNDECODABLE:
                yield offset, None
            offset += len(line)


def _admit(event: Admitted) -> dict[str, Any]:
    return {
        "event": "admit",
        "group": event.group,
        "task": event.task.task_id,
        "partition": event.partition,
        "samples": event.samples,
    }


def _put(event: SamplesStored) -> dict[str, Any]:
    """One line for all samples: (group, sample, the hash of each row's tokens by segment)."""
    stored = [(rows[0].group_id, rows[0].sample, [header.tokens_hash for header in rows]) for rows in event.samples]
    return {"event": "put", "stored": stored}


def _lost(event: ShardLost) -> dict[str, Any]:
    return {"event": "lost", "shard": event.shard_id, "rows": event.samples}


def _resume(event: RolledBack) -> dict[str, Any]:
    return {
        "event": "resume",
        "step": event.step,
        "lineage": event.lineage,
        "fresh": event.fresh,
        "next_group": event.next_group,
        "readmitted": [group.group for group in event.readmitted],
    }


_LINES: dict[type[Transition], Callable[[Any], dict[str, Any]]] = {
    Admitted: _admit,
    SamplesStored: _put,
    GroupReady: lambda event: {"event": "ready", "group": event.group},
    BatchReserved: lambda event: {"event": "reserve", "step": event.step, "groups": event.groups},
    BatchCommitted: lambda event: {"event": "commit", "step": event.step},
    GroupDropped: lambda event: {"event": "drop", "group": event.group, "reason": event.reason},
    DeadLettered: lambda event: {"event": "dead_letter", "group": event.group, "error": event.error},
    RolledBack: _resume,
    ShardLost: _lost,
    RunFinished: lambda event: {"event": "finish", "left": event.left},
}
