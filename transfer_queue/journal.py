"""Journals: the interface, the journal in memory, and the one in the run folder.

A journal records transitions and payloads, and never decodes a payload; a restarted queue continues where it ends. A
transition says which payloads it frees. The journal in memory ends with the process. To add a backend, implement
``Journal`` in a file beside ``redis_journal.py``, pass the tests in ``tests/contracts/queue_storage``, and name it in
``open_journal`` and in the config's schema.

``SqliteJournal`` writes transitions to ``queue.sqlite`` (write-ahead log) and payload bytes to segment files. A flush
hands the payloads to their file first and then commits one transaction with the transitions and the places of the
payloads. So whenever the process is killed, the database is as after a whole number of flushes, and everything that it
names is there. Segment files (``RUN/queue-payloads/00000001.segment`` and so on) are append-only, and each is deleted
whole once nothing in it is wanted.

With ``synchronous=normal`` a power cut may take payloads that the database names. Then the log is shortened to the
newest state whose samples all have their payloads (``History``). It can be, because the samples of a dump are forced
to the disk before the dump, and the rows and files that a group's end frees are kept until the next dump.

Each row has a checksum of its values, which is compared when the journal is read: SQLite has none for its pages, and a
changed bit there could be another reward, version or cursor. Journals of older versions get them when they are opened.
A folder on a file system that hosts share is refused.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from rl_async.errors import JournalError, UserError
from rl_async.files import UNDECODABLE, force_to_disk, make_durable_folder
from rl_async.messages import Frame, RowKey
from rl_async.process.allocation import give_back_freed_memory
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue import wire

# --- the interface ----------------------------------------------------------------------------------------------------

# Raise it when an older process would misread a transition or a dump of the store.
JOURNAL_SCHEMA = 5
# Stands beside JOURNAL_SCHEMA in the version of a journal whose records have checksums.
CHECKED = 1 << 16

_encode = msgspec.msgpack.Encoder().encode


class Recovered(NamedTuple):
    """The record of a journal: ``dump`` stands for the first ``dumped`` transitions, ``transitions`` are later."""

    dump: bytes
    dumped: int
    transitions: Iterator[t.Transition]


class Journal(Protocol):
    """The record of one run's queue. Only one process at a time may have it open.

    All methods raise JournalError when the record cannot be kept; nothing may be answered after that.
    """

    @property
    def run_id(self) -> str:
        """The name of the recorded state: another name means that an earlier queue's state is lost."""
        ...

    def recover(self) -> Recovered:
        """Read the flushed record. Call it once, before anything else."""
        ...

    def append(self, transition: t.Transition) -> None:
        """Record one transition, and free the payloads that it makes unreachable."""
        ...

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Record the rows of one sample, by segment, unless they are recorded already."""
        ...

    def has(self, group: int, sample: int) -> bool:
        """Whether the journal holds rows of this sample."""
        ...

    def get(self, key: RowKey) -> Frame | None:
        """Return one row, or None if the journal does not hold it."""
        ...

    def flush(self) -> None:
        """Make the whole record durable, all of it or nothing. Called often, even when nothing is pending."""
        ...

    @property
    def outgrown(self) -> bool:
        """Whether a dump of the store would be much shorter than the record."""
        ...

    def compact(self, dump: bytes) -> None:
        """Replace all transitions, which are flushed, by a dump of the state that they led to."""
        ...

    def close(self) -> None:
        """Release the journal to other processes; unflushed changes are lost."""
        ...


def new_run_id(name: str) -> str:
    """A unique id. Clients that outlive a queue notice by it that the next one does not know them."""
    return f"{name}-{secrets.token_hex(8)}"


def digest(*values: int | str | bytes) -> bytes:
    """Return the checksum of a record of the journal; a changed bit could be another reward, version or cursor."""
    return xxh3_64_digest(_encode(values))


def consecutive(entries: Iterable[tuple[int, bytes]], first: int, place: str) -> Iterator[tuple[int, bytes]]:
    """Yield numbered transitions from ``first`` on. Raises JournalError naming the ``place`` if one is missing."""
    for expected, (number, body) in enumerate(entries, first):
        if number != expected:
            raise JournalError(hole(place, expected))
        yield number, body


def hole(place: str, number: int) -> str:
    """The message for a record without transition ``number``, which cannot be replayed."""
    return (
        f"{place} lacks transition {number}, which was recorded, so the queue's state cannot be known; move the journal"
        " away (or rename its keys) and continue from the last checkpoint with --resume"
    )


# --- payloads in memory -----------------------------------------------------------------------------------------------

# A fresh start frees all groups.
ALL_GROUPS = None
# Giving memory back takes milliseconds, which fewer freed bytes are not worth.
TRIM_BYTES = 1 << 24

_FREES: dict[type[t.Transition], Callable[[Any], Sequence[int] | None]] = {
    t.GroupDropped: lambda event: (event.group,),
    t.DeadLettered: lambda event: (event.group,),
    t.Retired: lambda event: event.groups,
    t.EvalClosed: lambda event: event.groups,
    t.Acknowledged: lambda event: event.freed,
    t.Unsubscribed: lambda event: event.freed,
    t.Missed: lambda event: event.freed,
    t.RolledBack: lambda event: ALL_GROUPS if event.fresh else (),
}
# The transitions that may free payloads.
FREEING = frozenset(_FREES)


def freed_by(transition: t.Transition) -> Sequence[int] | None:
    """The groups whose payloads cannot be requested after this; ALL_GROUPS after a fresh start."""
    frees = _FREES.get(type(transition))
    return () if frees is None else frees(transition)


class Payloads:
    """Rows by group and sample. The caller names samples as it likes: by index, or by index and attempt."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[Hashable, Sequence[Frame]]] = {}
        # Bytes now, and their peak since memory was last given back.
        self._held = self._peak = 0

    def groups(self) -> list[int]:
        """Ids of the groups with rows here."""
        return list(self._groups)

    def put(self, group: int, sample: Hashable, rows: Sequence[Frame]) -> None:
        """Keep the rows of one sample, by segment, unless they are kept already.

        Small ones are copied: a view would keep the frame that they came in for its longest-lived row.
        """
        samples = self._groups.setdefault(group, {})
        if sample not in samples:
            samples[sample] = [row if len(row) >= wire.SEPARATE_BYTES else bytes(row) for row in rows]
            self._held += sum(map(len, rows))
            self._peak = max(self._peak, self._held)

    def get(self, group: int, sample: Hashable, segment: int) -> Frame | None:
        """Return one row, or None if it is not kept."""
        rows = self._groups.get(group, {}).get(sample, ())
        return rows[segment] if 0 <= segment < len(rows) else None

    def free(self, groups: Iterable[int] | None) -> None:
        """Forget the payloads of these groups, or of all groups if None.

        Memory is given back once less than a quarter of its peak is left: a steady run soon needs the memory that it
        frees, and touching new pages costs as much as taking in the row.
        """
        freed = list(self._groups.values()) if groups is None else [self._groups.pop(g, {}) for g in groups]
        if groups is None:
            self._groups.clear()
        self._held -= sum(len(row) for samples in freed for rows in samples.values() for row in rows)
        del freed
        if self._peak - self._held > max(TRIM_BYTES, 3 * self._held):
            self._peak = self._held
            give_back_freed_memory()


class MemoryJournal:
    """A `Journal` without a record but the store's own memory. Payloads are kept beside it, until the process ends."""

    outgrown = False

    def __init__(self, name: str = "memory") -> None:
        self.run_id = new_run_id(name)
        self._payloads = Payloads()

    def recover(self) -> Recovered:
        """Return an empty record: nothing outlives the process."""
        return Recovered(b"", 0, iter(()))

    def append(self, transition: t.Transition) -> None:
        """Free payloads only: no later process could read the transition."""
        self._payloads.free(freed_by(transition))

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        self._payloads.put(group, sample, rows)

    def has(self, group: int, sample: int) -> bool:
        return self._payloads.get(group, sample, 0) is not None

    def get(self, key: RowKey) -> Frame | None:
        return self._payloads.get(*key)

    def flush(self) -> None:
        """Do nothing: memory cannot be made durable."""

    def compact(self, dump: bytes) -> None:
        """Do nothing: no transitions are kept that a dump could replace."""

    def close(self) -> None:
        """Do nothing: no file or connection is open."""


# --- payloads in segment files ----------------------------------------------------------------------------------------

# Beyond this size a new file is begun.
SEGMENT_BYTES = 1 << 25
# The buffers of one write. Linux takes 1024.
_MOST_BUFFERS = 512


class SegmentPlace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of one sample's rows: in file ``segment`` from ``offset`` on, one after another.

    ``lengths`` and ``checksums`` (XXH3, 64 bits) are those of each row.
    """

    segment: int
    offset: int
    lengths: list[int]
    checksums: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows together."""
        return sum(self.lengths)


class Segments:
    """The files of one folder. All methods raise JournalError naming the file that cannot be read or written."""

    def __init__(self, folder: Path, *, sync: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
        """With ``sync`` a flush forces rows to the disk, and does not only hand them to the operating system."""
        self._folder, self._sync, self._segment_bytes = folder, sync, segment_bytes
        # Segments with rows that were written since the file was forced to the disk.
        self._unsynced: set[int] = set()
        # The number of samples in use, by segment.
        self._live: Counter[int] = Counter()
        self._pending: list[Frame] = []
        # File descriptors by segment, and that of the newest one.
        self._reading: dict[int, int] = {}
        self._writing = -1
        self._segment = 0
        # The end of the newest segment once pending rows are written.
        self._end = 0

    def open(self, places: Iterable[SegmentPlace], kept: Collection[int]) -> None:
        """Check that all of these are there, and delete files that hold none of them, unless they must be ``kept``."""
        try:
            make_durable_folder(self._folder)
            ends: Counter[int] = Counter()
            for place in places:
                self._live[place.segment] += 1
                ends[place.segment] = max(ends[place.segment], place.offset + place.nbytes)
            sizes = {int(path.stem): path.stat().st_size for path in self._folder.glob("*.segment")}
            for segment, end in ends.items():
                if sizes.get(segment, 0) < end:
                    raise JournalError(
                        f"{self._path(segment)} holds {sizes.get(segment, 0)} bytes, and the queue's journal names "
                        f"{end}: bytes were lost, as by a power cut. {START_OVER}"
                    )
            for segment in sizes.keys() - ends.keys():
                if segment in kept:
                    self._live[segment] = 0
                else:
                    self._path(segment).unlink()
        except OSError as error:
            raise failed(self._folder, error) from error
        self._segment = max(sizes, default=0)
        # An earlier process may not have forced its rows to the disk.
        self._unsynced.update(ends)
        self._begin()

    def holds(self, place: SegmentPlace) -> bool:
        """Whether the rows of this sample are there as they were written. Call it before ``open``."""
        try:
            with self._path(place.segment).open("rb") as file:
                file.seek(place.offset)
                rows = [file.read(length) for length in place.lengths]
        except FileNotFoundError:
            return False
        except OSError as error:
            raise failed(self._path(place.segment), error) from error
        return list(map(len, rows)) == place.lengths and place.checksums == list(map(xxh3_64_intdigest, rows))

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:08d}.segment"

    def _begin(self) -> None:
        """Close the file being written and begin a new one."""
        if self._writing >= 0:
            os.close(self._writing)
        self._segment += 1
        self._end = 0
        path = self._path(self._segment)
        try:
            self._writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            if self._sync:
                # The file's name is on the disk once its folder is.
                force_to_disk(self._folder)
        except OSError as error:
            raise failed(path, error) from error

    def add(self, rows: Sequence[Frame]) -> SegmentPlace:
        """Take in the rows of one sample; the next ``flush`` writes them at the latest."""
        if self._end >= self._segment_bytes:
            self._hand_over()
            self._begin()
        place = SegmentPlace(self._segment, self._end, list(map(len, rows)), list(map(xxh3_64_intdigest, rows)))
        self._pending += rows
        self._end += place.nbytes
        self._live[place.segment] += 1
        return place

    def flush(self) -> None:
        """Hand all rows to the operating system and, with ``sync``, force all segments to the disk."""
        self._hand_over()
        if self._sync:
            self._force(self._unsynced)

    def force(self) -> None:
        """Return when all samples that are in use are on the disk, with the names of their files."""
        self._hand_over()
        self._force({segment for segment in self._unsynced if self._live[segment]})
        force_to_disk(self._folder)

    def _hand_over(self) -> None:
        pending, self._pending = self._pending, []
        try:
            for start in range(0, len(pending), _MOST_BUFFERS):
                self._write(pending[start : start + _MOST_BUFFERS])
        except OSError as error:
            raise failed(self._path(self._segment), error) from error
        if pending:
            self._unsynced.add(self._segment)

    def _force(self, segments: set[int]) -> None:
        for segment in sorted(segments):
            try:
                if segment == self._segment:
                    os.fsync(self._writing)
                else:
                    force_to_disk(self._path(segment))
            except OSError as error:
                raise failed(self._path(segment), error) from error
        self._unsynced -= segments

    def _write(self, buffers: list[Frame]) -> None:
        written = os.writev(self._writing, buffers)
        if written == sum(map(len, buffers)):
            return
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            rest = rest[os.write(self._writing, rest) :]

    def read(self, place: SegmentPlace, row: int) -> Frame:
        """Read one row from its file, and compare it with its checksum."""
        if self._pending:
            self._hand_over()
        offset = place.offset + sum(place.lengths[:row])
        total = place.lengths[row]
        path = self._path(place.segment)
        try:
            if place.segment not in self._reading:
                self._reading[place.segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._reading[place.segment], total, offset)
        except OSError as error:
            raise failed(path, error) from error
        if len(data) != total:
            raise JournalError(
                f"{path} ends before byte {offset + total}, which the queue's journal names. {START_OVER}"
            )
        if xxh3_64_intdigest(data) != place.checksums[row]:
            raise JournalError(f"{path} has other bytes at {offset} than were written there. {START_OVER}")
        return data

    def free(self, places: Iterable[SegmentPlace]) -> None:
        """Count these samples as unused; their files can be deleted once no sample uses them."""
        for place in places:
            self._live[place.segment] -= 1

    @property
    def dead(self) -> list[int]:
        """Files, by number, that no sample uses any more."""
        return [segment for segment, count in self._live.items() if not count and segment != self._segment]

    def delete(self, segments: Iterable[int]) -> None:
        """Delete dead files. Call it only when no crash can bring back a journal that names them."""
        for segment in segments:
            del self._live[segment]
            self._unsynced.discard(segment)
            descriptor = self._reading.pop(segment, None)
            if descriptor is not None:
                os.close(descriptor)
            try:
                self._path(segment).unlink()
            except OSError as error:
                raise failed(self._path(segment), error) from error

    def close(self) -> None:
        """Close the file descriptors of all segments."""
        for descriptor in [*self._reading.values(), self._writing]:
            if descriptor >= 0:
                os.close(descriptor)
        self._reading, self._writing = {}, -1


START_OVER = "Move queue.sqlite* and queue-payloads/ away and continue from the last checkpoint with --resume"


def failed(path: Path, error: OSError) -> JournalError:
    """The error for a file that cannot be used, with its remedy."""
    text = f"the queue's journal {path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return JournalError(f"{text}; free space there and continue with --resume: nothing acknowledged is lost")
    return JournalError(f"{text}; the queue needs to write there (or queue.journal=memory, which keeps nothing)")


# --- payloads after a power cut ---------------------------------------------------------------------------------------

# Group and sample. Media have negative sample numbers.
Key = tuple[int, int]
FOREVER = 1 << 62

_transition: msgspec.msgpack.Decoder[t.Transition] = msgspec.msgpack.Decoder(t.TransitionType)
_place = msgspec.msgpack.Decoder(SegmentPlace)


class _Life(NamedTuple):
    """A payload belongs to the states after transition ``born`` and up to ``died``."""

    key: Key | None
    born: int
    died: int


class History:
    """Maps states of the queue to their payloads, from the tables ``payload`` and ``log``."""

    def __init__(self, db: sqlite3.Connection, dumped: int) -> None:
        """``dumped`` is the number of transitions before the log, whose payloads are on the disk."""
        self._dumped = self._end = dumped
        # Groups that ended in the log. Their rows are still there.
        self.freed: set[int] = set()
        self._rows: dict[Key, SegmentPlace] = {}
        for group, sample, place in db.execute("SELECT grp, sample, place FROM payload"):
            self._rows[group, sample] = _place.decode(place)
        self._bad: dict[Key, bool] = {}
        self._lives: list[_Life] = []
        self._read(db)

    def _read(self, db: sqlite3.Connection) -> None:
        (self._end,) = db.execute("SELECT coalesce(max(seq) + 1, ?) FROM log", (self._dumped,)).fetchone()
        kinds = [t.SamplesStored.__name__, *(kind.__name__ for kind in FREEING)]
        query = f"SELECT seq, body FROM log WHERE kind IN ({', '.join('?' * len(kinds))}) ORDER BY seq"
        events = [(seq, _transition.decode(body)) for seq, body in db.execute(query, kinds)]
        fresh = max((seq for seq, event in events if freed_by(event) is ALL_GROUPS), default=-1)
        # A fresh start has deleted the rows of all states before it.
        if fresh >= 0:
            self._lives.append(_Life(None, self._dumped - 1, fresh))
            events = [(seq, event) for seq, event in events if seq > fresh]
        here = self._born(events)
        for seq, event in events:
            for group in freed_by(event) or ():
                self.freed.add(group)
                self._lives += [_Life((group, sample), born, seq) for sample, born in here.pop(group, {}).items()]
        for group, samples in here.items():
            self._lives += [_Life((group, sample), born, FOREVER) for sample, born in samples.items()]

    def _born(self, events: list[tuple[int, t.Transition]]) -> dict[int, dict[int, int]]:
        """The transition that stored each sample, by group, but for samples on shards.

        A medium counts as stored with the first sample of its group.
        """
        born: dict[int, dict[int, int]] = {}
        for group, sample in self._rows:
            born.setdefault(group, {})[sample] = self._dumped - 1
        for seq, event in reversed(events):
            for headers in event.samples if isinstance(event, t.SamplesStored) else ():
                if not headers[0].shards:
                    samples = born.setdefault(headers[0].group_id, {})
                    samples |= dict.fromkeys([headers[0].sample, *(key for key in samples if key < 0)], seq)
        return born

    def places(self) -> dict[Key, SegmentPlace]:
        """The payloads of the newest state."""
        return {key: place for key, place in self._rows.items() if key[0] not in self.freed}

    def segments(self) -> set[int]:
        """The files that hold payloads of any state in the log."""
        return {place.segment for place in self._rows.values()}

    def lost(self, holds: Callable[[SegmentPlace], bool]) -> int | None:
        """How many transitions at the end have to go; None if no state in the log has all its payloads."""

        def is_bad(life: _Life) -> bool:
            if life.key is None or life.key not in self._rows:
                return True
            if life.born < self._dumped:
                return False
            if life.key not in self._bad:
                self._bad[life.key] = not holds(self._rows[life.key])
            return self._bad[life.key]

        end = self._end
        while lacking := [life for life in self._lives if life.born < end <= life.died and is_bad(life)]:
            end = min(life.born for life in lacking)
            if end < self._dumped:
                return None
        return self._end - end

    def shorten(self, db: sqlite3.Connection, lost: int) -> None:
        """Delete the newest ``lost`` transitions, and the payloads that they stored."""
        end = self._end - lost
        later = [life.key for life in self._lives if life.key is not None and life.born >= end]
        # A medium's sample number is derived from its bytes, so that an intact one may stay.
        stored = [key for key in later if key[1] >= 0 or self._bad.get(key)]
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM log WHERE seq >= ?", (end,))
        db.executemany("DELETE FROM payload WHERE grp = ? AND sample = ?", stored)
        db.execute("COMMIT")


# --- the journal in the run folder ------------------------------------------------------------------------------------

log = logging.getLogger("rl_async.queue")

Synchronous = Literal["normal", "full", "off"]

FILE = "queue.sqlite"
PAYLOADS = "queue-payloads"
LOCK = "queue.lock"
# A log is compacted once it is LOG_PER_STATE times as long as the state, or if so many segments are dead. A shorter log
# is not worth compacting.
LEAST_LOG_BYTES = 1 << 20
MOST_DEAD = 3
LOG_PER_STATE = 4
# Pages of 4 KiB that are written before the database itself is brought up to date, which waits for the disk.
_WAL_PAGES = 8192

_TABLES = """
CREATE TABLE meta (run_id TEXT NOT NULL, digest BLOB);
CREATE TABLE log (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL, digest BLOB);
CREATE TABLE dump (seq INTEGER NOT NULL, body BLOB NOT NULL, digest BLOB);
CREATE TABLE payload (
    grp INTEGER, sample INTEGER, place BLOB NOT NULL, digest BLOB, PRIMARY KEY (grp, sample)
) WITHOUT ROWID;
"""
_COLUMNS = {"meta": "run_id", "dump": "seq, body", "log": "seq, kind, body", "payload": "grp, sample, place"}


class SqliteJournal:
    """Implements ``Journal`` in a run folder.

    A flush survives the death of the process at any instant, and with ``synchronous=full`` a power cut.
    """

    def __init__(
        self,
        run: Path,
        name: str,
        synchronous: Synchronous = "normal",
        *,
        segment_bytes: int = SEGMENT_BYTES,
        least_log_bytes: int = LEAST_LOG_BYTES,
    ) -> None:
        self._path, self._synchronous, self._least_log_bytes = run / FILE, synchronous, least_log_bytes
        self._segments = Segments(run / PAYLOADS, sync=synchronous == "full", segment_bytes=segment_bytes)
        # By group and sample.
        self._places: dict[int, dict[int, SegmentPlace]] = {}
        self._pending: list[tuple[int, str, bytes]] = []
        self._placed: dict[tuple[int, int], bytes] = {}
        # Groups whose places the next compaction deletes.
        self._freed: set[int] = set()
        self._start_over = False
        self._log_bytes = self._dump_bytes = 0
        # Dead segments that the last compaction could not delete.
        self._kept_dead = 0
        # On a file system that hosts share, locks and memory maps do not do what SQLite relies on.
        try:
            require_local(run, "set queue.sqlite.folder to one on a disk of this host, or use queue.journal=redis")
        except UserError as error:
            raise JournalError(f"the queue's journal: {error}") from error
        self._lock = _hold(run / LOCK, self._path)
        try:
            self._db = self._open(name)
            self._seq = self._count()
        except BaseException:
            self.close()
            raise

    # --- opening ----------------------------------------------------------------------------------------------------

    def _open(self, name: str) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self._path, isolation_level=None)
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and schema not in (JOURNAL_SCHEMA, JOURNAL_SCHEMA | CHECKED):
                raise JournalError(
                    f"{self._path} was written by another version (journal schema {schema}, this one has "
                    f"{JOURNAL_SCHEMA}). Finish the run with that version, or: {START_OVER}"
                )
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA synchronous={self._synchronous}")
            db.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
            if not tables:
                db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={JOURNAL_SCHEMA | CHECKED}; COMMIT")
            elif schema == JOURNAL_SCHEMA:
                _add_checksums(db)
            if db.execute("SELECT count(*) FROM meta").fetchone() == (0,):
                db.execute("INSERT INTO meta VALUES (?, ?)", _checked(new_run_id(name)))
                # A power cut must not take the name: under another one it would be another journal.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            (self.run_id,) = db.execute("SELECT run_id FROM meta").fetchone()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._failed(error) from error
        return db

    def _count(self) -> int:
        """The number of transitions recorded so far, dumped ones included."""
        try:
            (dumped,) = self._db.execute("SELECT coalesce(max(seq), 0) FROM dump").fetchone()
            (logged,) = self._db.execute("SELECT coalesce(max(seq) + 1, 0) FROM log").fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return int(max(dumped, logged))

    def recover(self) -> Recovered:
        """Read the flushed record. Raises JournalError naming the file if it cannot be understood."""
        try:
            self._verify()
            count, dump = self._db.execute("SELECT seq, body FROM dump").fetchone() or (0, b"")
            history = self._whole_history(count)
            for (group, sample), place in history.places().items():
                self._places.setdefault(group, {})[sample] = place
            self._freed = history.freed
            self._log_bytes = self._db.execute("SELECT coalesce(sum(length(body)), 0) FROM log").fetchone()[0]
        except (sqlite3.Error, *UNDECODABLE) as error:
            raise self._failed(error) from error
        self._dump_bytes = len(dump)
        self._segments.open(history.places().values(), history.segments())
        return Recovered(dump, count, self._transitions(count))

    def _verify(self) -> None:
        """Raise JournalError if the file's structure or a row was changed since it was written."""
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise JournalError(f"the queue's journal {self._path} is damaged ({found}). {START_OVER}")
        for table, columns in _COLUMNS.items():
            for *values, checksum in self._db.execute(f"SELECT {columns}, digest FROM {table}"):
                if checksum != digest(*values):
                    named = "" if table in ("meta", "dump") else f" {values[0]!r}"
                    raise JournalError(
                        f"the queue's journal {self._path} is damaged: the row{named} of its table {table} is not what "
                        f"was written there. {START_OVER}"
                    )

    def _whole_history(self, dumped: int) -> History:
        """Read the history of payloads, after shortening the log if the payloads of its end are lost."""
        history = History(self._db, dumped)
        # With "full" a power cut takes no payloads.
        if self._synchronous == "full":
            return history
        lost = history.lost(self._segments.holds)
        if lost is None:
            raise JournalError(f"{self._path} names payloads that are lost, as by a power cut. {START_OVER}")
        if not lost:
            return history
        log.warning("%s: the newest %d transitions lack payloads, lost as by a power cut", self._path, lost)
        history.shorten(self._db, lost)
        self._seq -= lost
        return History(self._db, dumped)

    def _transitions(self, first: int) -> Iterator[t.Transition]:
        try:
            entries = self._db.execute("SELECT seq, body FROM log ORDER BY seq")
            for _, body in consecutive(entries, first, str(self._path)):
                yield _transition.decode(body)
        except (sqlite3.Error, *UNDECODABLE) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> JournalError:
        text = f"the queue's journal {self._path}: {error}"
        # Text that does not decode is damage, although SQLite reports it as an OperationalError as well.
        if isinstance(error, sqlite3.OperationalError) and "decode" not in str(error):
            return JournalError(
                f"{text}; see that there is room and that it can be written, then continue with --resume: nothing that "
                "was acknowledged is lost"
            )
        return JournalError(f"{text}. {START_OVER}")

    # --- recording --------------------------------------------------------------------------------------------------

    def append(self, transition: t.Transition) -> None:
        self._pending.append((self._seq, type(transition).__name__, _encode(transition)))
        self._seq += 1
        freed = freed_by(transition)
        if freed is None:
            self._start_over = True
            self._freed.clear()
        for group in list(self._places) if freed is None else freed:
            places = self._places.pop(group, None)
            if places is not None:
                self._segments.free(places.values())
                if freed is not None:
                    self._freed.add(group)
                for sample in places:
                    self._placed.pop((group, sample), None)

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        places = self._places.setdefault(group, {})
        if sample not in places:
            places[sample] = self._segments.add(rows)
            self._placed[group, sample] = _encode(places[sample])

    def has(self, group: int, sample: int) -> bool:
        return sample in self._places.get(group, {})

    def get(self, key: RowKey) -> Frame | None:
        """Read one row from its file, which the operating system caches; None if the journal does not hold it."""
        group, sample, segment = key
        place = self._places.get(group, {}).get(sample)
        if place is None or not 0 <= segment < len(place.lengths):
            return None
        return self._segments.read(place, segment)

    def flush(self) -> None:
        """Write payloads, then commit. None of it counts unless the commit succeeds."""
        if not self._pending and not self._placed:
            return
        self._segments.flush()
        if self._start_over:
            # The states before this one lose their payloads, so that the log cannot be shortened to one of them.
            self._segments.force()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO log VALUES (?, ?, ?, ?)", (_checked(*row) for row in self._pending))
            if self._start_over:
                self._db.execute("DELETE FROM payload")
            if self._placed:
                rows = [_checked(group, sample, place) for (group, sample), place in self._placed.items()]
                self._db.executemany("INSERT INTO payload VALUES (?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
            self._log_bytes += sum(len(body) for _, _, body in self._pending)
            self._pending, self._placed, self._start_over = [], {}, False
        except sqlite3.Error as error:
            raise self._failed(error) from error

    @property
    def outgrown(self) -> bool:
        """Whether the log is LOG_PER_STATE times as long as the last dump, or MOST_DEAD files can be deleted."""
        return (
            self._log_bytes > max(self._least_log_bytes, LOG_PER_STATE * self._dump_bytes)
            or len(self._segments.dead) >= self._kept_dead + MOST_DEAD
        )

    def compact(self, dump: bytes) -> None:
        """Replace the transitions of the log by the dump, and delete the payloads that only they needed."""
        if self._synchronous != "off":
            self._segments.force()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM dump")
            self._db.execute("INSERT INTO dump VALUES (?, ?, ?)", _checked(self._seq, dump))
            self._db.execute("DELETE FROM log")
            self._db.executemany("DELETE FROM payload WHERE grp = ?", [(group,) for group in self._freed])
            self._db.execute("COMMIT")
            dead = self._segments.dead
            # After a checkpoint, no power cut brings back a database that names them. It is not complete while another
            # process reads the database.
            if dead and not self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                self._segments.delete(dead)
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._kept_dead = len(self._segments.dead)
        self._freed.clear()
        self._log_bytes, self._dump_bytes = 0, len(dump)

    def close(self) -> None:
        """Close the files and release the lock."""
        if hasattr(self, "_db"):
            self._db.close()
        self._segments.close()
        os.close(self._lock)


def _checked(*values: int | str | bytes) -> tuple[int | str | bytes, ...]:
    """Return the values of a row with their checksum."""
    return (*values, digest(*values))


def _add_checksums(db: sqlite3.Connection) -> None:
    """Add checksums to the rows of a journal of an older version, all at once."""
    db.create_function("checksum", -1, digest, deterministic=True)
    db.execute("BEGIN IMMEDIATE")
    for table, columns in _COLUMNS.items():
        db.execute(f"ALTER TABLE {table} ADD COLUMN digest BLOB")
        db.execute(f"UPDATE {table} SET digest = checksum({columns})")
    db.execute(f"PRAGMA user_version={JOURNAL_SCHEMA | CHECKED}")
    db.execute("COMMIT")


def _hold(path: Path, journal: Path) -> int:
    """Lock out other processes until this one ends, however it ends. Returns the file descriptor that holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise JournalError(f"the queue's journal {journal}: {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "?"
        os.close(descriptor)
        raise JournalError(
            f"another queue, process {owner}, has the journal {journal} open; stop it, or wait for its end"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


# --- file systems -----------------------------------------------------------------------------------------------------

# Linux only.
MOUNTS = Path("/proc/self/mountinfo")
NETWORK = re.compile(
    "nfs4?|lustre|gpfs|ceph|cifs|smb3|smbfs|afs|beegfs|panfs|wekafs|glusterfs|orangefs|pvfs2|ocfs2|gfs2|coda"
)
# Others of FUSE, such as fuse.fuse-overlayfs, are local.
NETWORK_FUSE = re.compile(
    r"fuse\.(sshfs|ceph|ceph-fuse|glusterfs|juicefs|s3fs|s3ql|gcsfuse|goofys|mount-s3|rclone|blobfuse2?|lizardfs|mfs|"
    "moosefs|seaweedfs|cvmfs2|dfuse|hdfs|alluxio-fuse|davfs|smbnetfs|beegfs|mfsmount)"
)


def file_system(path: Path, mounts: Path | None = None) -> str:
    """The type of the file system that holds ``path``, which need not exist; empty if it is unknown."""
    try:
        table = (MOUNTS if mounts is None else mounts).read_text(errors="replace")
    except OSError:
        return ""
    path = path.resolve()
    found, longest = "", -1
    for line in table.splitlines():
        mount, _, source = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount.split()[4]))
        # A later mount hides an earlier one.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = source.split()[0], len(point.parts)
    return found


def require_local(path: Path, remedy: str, mounts: Path | None = None) -> None:
    """Raise UserError with the ``remedy`` if ``path`` is on a file system that several hosts share."""
    kind = file_system(path, mounts)
    if NETWORK.fullmatch(kind) or NETWORK_FUSE.fullmatch(kind):
        raise UserError(f"{path} is on a file system of type {kind}, which hosts share; {remedy}")
