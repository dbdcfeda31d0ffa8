"""A disk that keeps what was flushed, and the journal on it. A crash may strike at every call."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import msgspec

from rl_async.codec import Frame
from rl_async.messages import RowKey
from rl_async.transfer_queue.journal.journal import Recovered, freed_by
from rl_async.transfer_queue.transitions import Transition, TransitionType

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TransitionType).decode
Rows = dict[int, dict[int, list[bytes]]]  # by group and sample


class Crash(Exception):
    """The queue's process is dead; the argument says where it was."""


class Fuse:
    """Counts down the places where a crash may strike; burns when it was lit."""

    def __init__(self, struck: Counter[str]) -> None:
        self._left: int | None = None
        self._struck = struck

    def light(self, points: int) -> None:
        """Crash at this many places from now."""
        self._left = points

    def out(self) -> None:
        """No crash any more."""
        self._left = None

    def point(self, where: str) -> None:
        """A place where a crash may strike."""
        if self._left is None:
            return
        self._left -= 1
        if self._left < 0:
            self._left = None
            self._struck[f"queue killed: {where}"] += 1
            raise Crash(where)


class Disk:
    """What is durable."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.log: list[bytes] = []  # behind the dump
        self.dump, self.dumped = b"", 0
        self.rows: Rows = {}
        self._history: list[bytes] = []

    @property
    def history(self) -> list[Transition]:
        """All there ever were, for the rules."""
        return [_decode(transition) for transition in self._history]

    def commit(self, transitions: list[bytes], rows: Rows | None) -> None:
        """A transaction."""
        self.log += transitions
        self._history += transitions
        if rows is not None:
            self.rows = rows


class SimJournal:
    """See ``Journal``. A flush is one transaction, as that of SQLite is."""

    def __init__(self, disk: Disk, fuse: Fuse, rng: Random) -> None:
        self.run_id = disk.run_id
        self._disk, self._fuse = disk, fuse
        self._pending: list[bytes] = []
        self._rows: Rows = {group: dict(samples) for group, samples in disk.rows.items()}
        self._dirty = False
        self._longest = rng.choice([15, 40, 10_000])

    def recover(self) -> Recovered:
        """What was flushed."""
        return Recovered(self._disk.dump, self._disk.dumped, map(_decode, list(self._disk.log)))

    def append(self, transition: Transition) -> None:
        """Take it in, and free payloads."""
        self._fuse.point("append")
        self._pending.append(_encode(transition))
        freed = freed_by(transition)
        for group in list(self._rows) if freed is None else freed:
            self._dirty |= self._rows.pop(group, None) is not None

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Take the rows in, unless they are here."""
        self._fuse.point("put")
        samples = self._rows.setdefault(group, {})
        if sample not in samples:
            samples[sample] = [bytes(row) for row in rows]
            self._dirty = True

    def has(self, group: int, sample: int) -> bool:
        """Whether rows of this sample are here."""
        return sample in self._rows.get(group, {})

    def get(self, key: RowKey) -> Frame | None:
        """One row; None if it is not here."""
        group, sample, segment = key
        rows = self._rows.get(group, {}).get(sample, [])
        return rows[segment] if 0 <= segment < len(rows) else None

    def flush(self) -> None:
        """All of it or nothing."""
        if not self._pending and not self._dirty:
            return
        self._fuse.point("before the flush")
        rows = {group: dict(samples) for group, samples in self._rows.items()} if self._dirty else None
        self._disk.commit(self._pending, rows)
        self._pending, self._dirty = [], False
        self._fuse.point("after the flush")

    @property
    def outgrown(self) -> bool:
        """Whether the log is long."""
        return len(self._disk.log) > self._longest

    def compact(self, dump: bytes) -> None:
        """The dump in place of the log, in one transaction."""
        self._fuse.point("before compacting")
        disk = self._disk
        disk.dump, disk.dumped, disk.log = dump, disk.dumped + len(disk.log), []
        self._fuse.point("after compacting")

    def close(self) -> None:
        """Nothing is open."""
