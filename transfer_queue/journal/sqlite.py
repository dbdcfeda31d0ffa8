"""The journal in the run folder: transitions in ``queue.sqlite`` (write-ahead log), payload bytes in segment files.

A flush hands the payloads to their file first and then commits one transaction with the transitions and the places of
the payloads. So whenever the process is killed, the database is as after a whole number of flushes, and everything
that it names is there.

With ``synchronous=normal`` a power cut may take payloads that the database names. Then the log is shortened to where
all payloads were there (``shortening.py``). It can be, because the samples of a dump are forced to the disk before the
dump, and what a group's end frees is kept, rows and files, until the next dump.

Each row has a checksum of its values, which is compared when the journal is read: SQLite has none of what is in its
pages, and a changed bit there could be another reward, version or cursor. A journal of before gets them when it is
opened.
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.errors import JournalError, UserError
from rl_async.filesystems import require_local
from rl_async.messages import RowKey
from rl_async.messages.codec import Frame
from rl_async.transfer_queue.journal.interface import (
    CHECKED,
    JOURNAL_SCHEMA,
    Recovered,
    consecutive,
    digest,
    new_run_id,
)
from rl_async.transfer_queue.journal.payloads import freed_by
from rl_async.transfer_queue.journal.segments import SEGMENT_BYTES, START_OVER, SegmentPlace, Segments
from rl_async.transfer_queue.journal.shortening import History
from rl_async.transfer_queue.state.transitions import Transition, TransitionType
from rl_async.undecodable import UNDECODABLE

log = logging.getLogger("rl_async.queue")

Synchronous = Literal["normal", "full", "off"]

FILE = "queue.sqlite"
PAYLOADS = "queue-payloads"
LOCK = "queue.lock"
LEAST_LOG_BYTES = 1 << 20  # a shorter log is not worth compacting
MOST_DEAD = 3  # segments that no sample uses any more; a compaction deletes them
LOG_PER_STATE = 4  # a log this many times as long as the state is compacted
_WAL_PAGES = (
    8192  # of 4 KiB: how much is written before the database itself is brought up to date, which waits for disk
)

_TABLES = """
CREATE TABLE meta (run_id TEXT NOT NULL, digest BLOB);
CREATE TABLE log (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL, digest BLOB);
CREATE TABLE dump (seq INTEGER NOT NULL, body BLOB NOT NULL, digest BLOB);
CREATE TABLE payload (
    grp INTEGER, sample INTEGER, place BLOB NOT NULL, digest BLOB, PRIMARY KEY (grp, sample)
) WITHOUT ROWID;
"""
_COLUMNS = {"meta": "run_id", "dump": "seq, body", "log": "seq, kind, body", "payload": "grp, sample, place"}

_transition: msgspec.msgpack.Decoder[Transition] = msgspec.msgpack.Decoder(TransitionType)
_encode = msgspec.msgpack.Encoder().encode


class SqliteJournal:
    """See ``Journal``. ``flush`` survives the death of the process at any instant; ``synchronous`` says what else."""

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
        self._places: dict[int, dict[int, SegmentPlace]] = {}  # by group and sample
        self._pending: list[tuple[int, str, bytes]] = []
        self._placed: dict[tuple[int, int], bytes] = {}
        self._freed: set[int] = set()  # groups whose places the next compaction deletes
        self._start_over = False
        self._log_bytes = self._dump_bytes = 0
        self._kept_dead = 0  # segments that could not be deleted when they should have been
        _require_local(run)
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
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # under another name it would be another journal
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
        """Read what was flushed. Raises JournalError naming the file for what cannot be understood."""
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
        """Raise JournalError if the file's structure or a row is not as it was written."""
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
        """What the log says of payloads, after taking off its end if payloads of that are lost."""
        history = History(self._db, dumped)
        if self._synchronous == "full":  # then it was no power cut
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

    def _transitions(self, first: int) -> Iterator[Transition]:
        try:
            entries = self._db.execute("SELECT seq, body FROM log ORDER BY seq")
            for _, body in consecutive(entries, first, str(self._path)):
                yield _transition.decode(body)
        except (sqlite3.Error, *UNDECODABLE) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> JournalError:
        text = f"the queue's journal {self._path}: {error}"
        if isinstance(error, sqlite3.OperationalError) and "decode" not in str(error):  # text that is none is damage
            return JournalError(
                f"{text}; see that there is room and that it can be written, then continue with --resume: nothing that "
                "was acknowledged is lost"
            )
        return JournalError(f"{text}. {START_OVER}")

    # --- recording --------------------------------------------------------------------------------------------------

    def append(self, transition: Transition) -> None:
        """Queue the transition for the next ``flush``."""
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
        """Queue the rows for the next ``flush``, unless the journal holds them."""
        places = self._places.setdefault(group, {})
        if sample not in places:
            places[sample] = self._segments.add(rows)
            self._placed[group, sample] = _encode(places[sample])

    def has(self, group: int, sample: int) -> bool:
        """Whether the journal holds rows of this sample."""
        return sample in self._places.get(group, {})

    def get(self, key: RowKey) -> Frame | None:
        """One row, read from its file, which the operating system caches; None if the journal does not hold it."""
        group, sample, segment = key
        place = self._places.get(group, {}).get(sample)
        if place is None or not 0 <= segment < len(place.lengths):
            return None
        return self._segments.read(place, segment)

    def flush(self) -> None:
        """Write payloads, then commit. Nothing of it counts if the process ends before the end."""
        if not self._pending and not self._placed:
            return
        self._segments.flush()
        if self._start_over:
            self._segments.force()  # no state before this one will have its payloads
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

    def _checkpointed(self) -> bool:
        """Bring the database up to date; False if another process reads it just now."""
        busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    @property
    def outgrown(self) -> bool:
        """Whether the log is some times as long as the state was, or files wait to be deleted."""
        return (
            self._log_bytes > max(self._least_log_bytes, LOG_PER_STATE * self._dump_bytes)
            or len(self._segments.dead) >= self._kept_dead + MOST_DEAD
        )

    def compact(self, dump: bytes) -> None:
        """Replace the transitions of the log by the dump, and delete what only they needed."""
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
            if dead and self._checkpointed():  # now nothing names them, not even what is left after a power cut
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
    """Give the rows of a journal of before their checksums, all at once."""
    db.create_function("checksum", -1, digest, deterministic=True)
    db.execute("BEGIN IMMEDIATE")
    for table, columns in _COLUMNS.items():
        db.execute(f"ALTER TABLE {table} ADD COLUMN digest BLOB")
        db.execute(f"UPDATE {table} SET digest = checksum({columns})")
    db.execute(f"PRAGMA user_version={JOURNAL_SCHEMA | CHECKED}")
    db.execute("COMMIT")


def _require_local(folder: Path) -> None:
    """Refuse a folder that hosts share: there, locks and memory maps do not do what SQLite relies on."""
    try:
        require_local(folder, "set queue.journal_folder to one on a disk of this host, or use queue.journal=redis")
    except UserError as error:
        raise JournalError(f"the queue's journal: {error}") from error


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
