"""Keeps a table of all recorded trajectories of a run, which grows with the run.

It is an SQLite file beside the run's own, ``RUN/view.sqlite``: a cache that may be deleted at any time. A row has the
columns for lists, filters and sorting, and the place of the trajectory's line, which alone has its tokens. Text is
searched by words, through an index without the text itself. Words are those of SQLite's unicode61, and single signs of
scripts without spaces. ``insight/view/web/src/embedded.ts`` does the same in a report, which has no server.
"""

import logging
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.errors import RequestRefused
from rl_async.insight.view.trajectories import RecordedFile, RecordedRow, lines
from rl_async.messages import ToolCall

# Each term of a search costs a lookup, so their number is limited.
MOST_TERMS = 64
# Han, kana, and the marks between them.
_SIGN = re.compile(
    "[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)


def searchable(text: str) -> str:
    """Return the text with spaces around Chinese and Japanese signs, so that each becomes a word."""
    return text if text.isascii() else _SIGN.sub(r" \g<0> ", text)


def words(text: str) -> str:
    """Return the full-text query for rows that contain each of these words; the last word may be a prefix.

    Quoted phrases, words with punctuation such as ``total_price``, and adjacent signs must occur in that order. The
    text cannot contain operators. Raises RequestRefused for a text without letters and digits, or with too many words.
    """
    # SQLite's query would end at a NUL.
    parts = text.replace("\0", " ").split('"')
    quoted = [part.strip() for part in parts[1::2]]
    plain = [word for part in parts[::2] for word in part.split()]
    terms = [term for term in (*quoted, *plain) if any(character.isalnum() for character in term)]
    if not terms:
        raise RequestRefused("text: give a word with letters or digits", code="no_words", param="text")
    if len(terms) > MOST_TERMS:
        raise RequestRefused(f"text: give at most {MOST_TERMS} words", code="too_many_words", param="text")
    prefix = "*" if plain and terms[-1] == plain[-1] and terms[-1][-1].isalnum() else ""
    return " AND ".join(f'"{searchable(term).strip()}"' for term in terms) + prefix


log = logging.getLogger("rl_async.view")

FILE = "view.sqlite"
# A file whose tables have another format is made anew.
FORMAT = 6
# At most this many characters of a trajectory are searched, and of a prompt or an answer shown in a list.
SEARCHED = 1 << 16
PREVIEW = 200
POLL_S = 2.0
SCHEMA = """
CREATE TABLE files (name TEXT PRIMARY KEY, size INTEGER, changed INTEGER);
CREATE TABLE rows (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT, place INTEGER,
    partition TEXT, step INTEGER, lineage INTEGER, grp INTEGER, sample INTEGER, segment INTEGER,
    role TEXT, asked INTEGER, task TEXT, source TEXT,
    reward REAL, turn_reward REAL, scored INTEGER, finish TEXT, error INTEGER,
    tokens INTEGER, sampled INTEGER, masked INTEGER, min_weight REAL, advantage REAL, difference REAL,
    staleness INTEGER, turns INTEGER, calls INTEGER, failed_calls INTEGER, seconds REAL,
    prompt TEXT, answer TEXT, expected TEXT
);
CREATE INDEX rows_by_key ON rows (partition, step, grp, sample, segment);
CREATE INDEX rows_by_task ON rows (task);
CREATE INDEX rows_by_episode ON rows (step, source, role, task, grp, sample) WHERE partition = 'eval';
CREATE INDEX rows_by_file ON rows (file);
CREATE TABLE tools (row INTEGER, name TEXT, error TEXT, calls INTEGER, seconds REAL, slowest REAL);
CREATE INDEX tools_by_row ON tools (row);
CREATE TABLE engines (row INTEGER, name TEXT, turns INTEGER, seconds REAL, slowest REAL, tokens INTEGER, timed REAL);
CREATE INDEX engines_by_row ON engines (row);
CREATE TABLE rules (row INTEGER, name TEXT, tokens INTEGER);
CREATE INDEX rules_by_row ON rules (row);
CREATE VIRTUAL TABLE texts USING fts5 (text, content='', tokenize='unicode61 remove_diacritics 2');
CREATE TABLE lineages (lineage INTEGER PRIMARY KEY, first_step INTEGER);
"""


# A file's size and modification time.
Stat = tuple[int, int]


class Progress(NamedTuple):
    """How many of the run's files are in the index. ``looked`` is False until the files have been counted."""

    indexed: int
    files: int
    looked: bool = True


class Damage(NamedTuple):
    """A file that could not be read, and that is read again once it changes."""

    stat: Stat
    why: str


class TrajectoryIndex:
    """The index of the run in ``folder``. Only one thread calls ``update``; any may call ``connect``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trajectories = folder / "trajectories"
        self._temporary = not os.access(folder, os.W_OK)
        self.path = (Path(tempfile.mkdtemp(prefix="rl-async-view-")) if self._temporary else folder) / FILE
        self.progress = Progress(0, 0, looked=False)
        self.damaged: dict[str, Damage] = {}
        # Why the last update failed.
        self.problem = ""
        self._making = threading.Lock()
        self._prepare()

    def _prepare(self) -> None:
        """Make the file unless it exists and has this format."""
        with self._making:
            try:
                with closing(sqlite3.connect(self.path)) as connection:
                    (found,) = connection.execute("PRAGMA user_version").fetchone()
            except sqlite3.DatabaseError:
                # The file is damaged, or of another program.
                found = None
            if found != FORMAT:
                self._make()

    def remake(self) -> None:
        """Make the file anew, without rows."""
        with self._making:
            self._make()

    def _make(self) -> None:
        for path in self.path.parent.glob(f"{FILE}*"):
            path.unlink(missing_ok=True)
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        self.progress, self.damaged = Progress(0, 0, looked=False), {}

    def state(self) -> dict[str, Any]:
        """Return the progress of the index, the files that could not be read, and the reason if the update failed."""
        damaged = {name: damage.why for name, damage in dict(self.damaged).items()}
        return {"progress": self.progress._asdict(), "damaged": damaged, "problem": self.problem}

    def close(self) -> None:
        """Remove an index that could not be kept beside its run."""
        if self._temporary:
            shutil.rmtree(self.path.parent, ignore_errors=True)

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """Open the index for one thread; make it anew if it was deleted."""
        if self._making.locked() or not self.path.is_file():
            self._prepare()
        with closing(sqlite3.connect(self.path, timeout=60.0)) as connection:
            connection.row_factory = sqlite3.Row
            # The file is a cache, which can be made again.
            connection.execute("PRAGMA synchronous = OFF")
            yield connection

    def update(self, stopping: threading.Event) -> None:
        """Index new and replaced files, the newest step first, until ``stopping``."""
        with self.connect() as connection:
            known = {name: (size, changed) for name, size, changed in connection.execute("SELECT * FROM files")}
            found = self._files()
            gone = known.keys() - found.keys()
            self.damaged = {name: damage for name, damage in self.damaged.items() if found.get(name) == damage.stat}
            todo = [name for name, stat in found.items() if known.get(name) != stat and name not in self.damaged]
            self.progress = Progress(len(found) - len(todo), len(found))
            for name in gone:
                _forget(connection, name)
            for name in sorted(todo, key=lambda name: (-_recorded(name).step, name)):
                if stopping.is_set():
                    return
                self._index(connection, name, found[name])
                self.progress = self.progress._replace(indexed=self.progress.indexed + 1)

    def _files(self) -> dict[str, Stat]:
        """Return the size and modification time of each recorded file."""
        if not self._trajectories.is_dir():
            return {}
        with os.scandir(self._trajectories) as entries:
            found = {entry.name: entry.stat() for entry in entries if RecordedFile.of(entry.name)}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}

    def _index(self, connection: sqlite3.Connection, name: str, stat: Stat) -> None:
        """Add one file in one transaction; a reader sees all of its rows or none.

        Raises sqlite3.DatabaseError if the index cannot be written. A file that cannot be read loses its old rows.
        """
        place = _recorded(name)
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                _delete(connection, name)
                for offset, line in lines(self._trajectories / name):
                    _insert(connection, place, offset, msgspec.json.decode(line, type=RecordedRow))
                if place.partition == "train":
                    connection.execute(
                        "INSERT INTO lineages VALUES (?, ?) "
                        "ON CONFLICT DO UPDATE SET first_step = min(first_step, excluded.first_step)",
                        (place.lineage, place.step),
                    )
                connection.execute("INSERT INTO files VALUES (?, ?, ?)", (name, *stat))
        except FileNotFoundError:
            # The run has deleted the file meanwhile.
            return
        except sqlite3.DatabaseError:
            raise
        # Damage may raise anything, and must not keep other files from being read.
        except Exception as error:
            self.damaged[name] = Damage(stat, f"{type(error).__name__}: {error}")
            log.warning("%s cannot be read: %s", self._trajectories / name, self.damaged[name].why)
            _forget(connection, name)


def _forget(connection: sqlite3.Connection, name: str) -> None:
    with connection:
        _delete(connection, name)


def _recorded(name: str) -> RecordedFile:
    file = RecordedFile.of(name)
    # ``_files`` lists no others.
    assert file is not None
    return file


def _delete(connection: sqlite3.Connection, file: str) -> None:
    """Remove a file's rows. Their words stay in ``texts``, where no row refers to them: ids are never used again."""
    for table in ("tools", "engines", "rules"):
        connection.execute(f"DELETE FROM {table} WHERE row IN (SELECT id FROM rows WHERE file = ?)", (file,))
    connection.execute("DELETE FROM rows WHERE file = ?", (file,))
    connection.execute("DELETE FROM files WHERE name = ?", (file,))


def _insert(connection: sqlite3.Connection, file: RecordedFile, place: int, row: RecordedRow) -> None:
    calls = [call for turn in row.turns for call in turn.tool_calls]
    base, correction = row.staleness_base, row.correction
    advantages = correction.advantages if correction else []
    values = {
        "file": file.name,
        "place": place,
        "partition": file.partition,
        "step": file.step,
        "lineage": file.lineage,
        "grp": row.group_id,
        "sample": row.sample,
        "segment": row.segment,
        "role": row.role,
        "asked": row.asked(),
        "task": row.task_id,
        "source": row.data_source,
        "reward": row.reward,
        "turn_reward": row.turn_reward,
        "scored": row.scored,
        "finish": row.finish_reason,
        "error": bool(row.error),
        "tokens": len(row.token_ids),
        "sampled": len(row.sampled),
        "masked": sum(run.end - run.start for run in correction.rules) if correction else None,
        "min_weight": min(correction.weights, default=None) if correction else None,
        "advantage": sum(advantages) / len(advantages) if advantages else None,
        "difference": _difference(row),
        "staleness": file.step - base if base is not None and file.partition == "train" else None,
        "turns": len(row.turns),
        "calls": len(calls),
        "failed_calls": sum(bool(call.error) for call in calls),
        "seconds": row.timings.get("total"),
        "prompt": _preview(row.said_last("user")),
        "answer": _preview(row.error or row.said_last("assistant")),
        "expected": _preview(row.ground_truth),
    }
    names = ", ".join(values)
    marks = ", ".join("?" * len(values))
    cursor = connection.execute(f"INSERT INTO rows ({names}) VALUES ({marks})", list(values.values()))
    number = cursor.lastrowid
    connection.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (number, searchable(row.text()[:SEARCHED])))
    connection.executemany("INSERT INTO tools VALUES (?, ?, ?, ?, ?, ?)", [(number, *one) for one in _tools(calls)])
    connection.executemany(
        "INSERT INTO engines VALUES (?, ?, ?, ?, ?, ?, ?)", [(number, *one) for one in _engines(row)]
    )
    masked: Counter[str] = Counter()
    for run in correction.rules if correction else ():
        masked[run.rule] += run.end - run.start
    connection.executemany("INSERT INTO rules VALUES (?, ?, ?)", [(number, *one) for one in masked.items()])


def _tools(calls: Sequence[ToolCall]) -> Iterator[tuple[str, str, int, float, float]]:
    """Yield, for each tool and error of a row, the number of calls, their seconds, and those of the slowest.

    Successful calls have an empty error.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        found.setdefault((call.name, _preview(call.error)), []).append(call.seconds)
    for (name, error), seconds in found.items():
        yield name, error, len(seconds), sum(seconds), max(seconds)


def _engines(row: RecordedRow) -> Iterator[tuple[str, int, float, float, int, float]]:
    """Yield, for each engine of a conversation, its turns, their seconds, those of the slowest turn, and the tokens and
    seconds of the turns whose tokens are in this row."""
    asked = [one for one in row.activities if one.kind == "generate" and one.name]
    sampled = [n for turn in row.turns if turn.role == "assistant" and (n := sum(row.loss_mask[turn.start : turn.end]))]
    # If the numbers differ, other rows hold some of the turns, and tokens cannot be assigned to requests.
    tokens = sampled if len(sampled) == len(asked) else [0] * len(asked)
    found: dict[str, list[tuple[float, int]]] = {}
    for one, count in zip(asked, tokens, strict=True):
        found.setdefault(one.name, []).append((one.seconds, count))
    for name, turns in found.items():
        seconds = [took for took, _ in turns]
        timed = sum(took for took, count in turns if count)
        yield name, len(turns), sum(seconds), max(seconds), sum(count for _, count in turns), timed


def _difference(row: RecordedRow) -> float | None:
    """Return the largest difference between the engine's and the trainer's log-probability of a token.

    A grammar's mask changes the engine's distribution, so such tokens do not count. Returns None without other tokens.
    """
    if row.correction is None or not row.correction.logprobs:
        return None
    engines = [row.logprobs[at] for at in row.explained]
    differences = [abs(theirs - ours) for theirs, ours in zip(engines, row.correction.logprobs, strict=True)]
    if row.constrained:
        differences = [one for at, one in zip(row.explained, differences) if at not in row.constrained_places]
    return max(differences, default=None)


def _preview(text: str) -> str:
    return " ".join(text[: 4 * PREVIEW].split())[:PREVIEW]


class Indexer:
    """A thread that updates the indexes of runs whose trajectories have been viewed.

    Consumes the files in ``trajectories/``; produces the indexes. Waits POLL_S between updates. Runs until ``close``.
    """

    def __init__(self) -> None:
        self._indexes: dict[Path, TrajectoryIndex] = {}
        self._lock = threading.Lock()
        self._stopping, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="indexer", daemon=True)
        self._thread.start()

    def of(self, folder: Path) -> TrajectoryIndex:
        """Return the index of a run, and update it from now on."""
        with self._lock:
            if folder not in self._indexes:
                self._indexes[folder] = TrajectoryIndex(folder)
                self._wanted.set()
            return self._indexes[folder]

    def progress(self, folder: Path) -> Progress | None:
        """Return the progress of a run's index, or None if its trajectories have not been viewed."""
        with self._lock:
            return self._indexes[folder].progress if folder in self._indexes else None

    def close(self) -> None:
        """Stop the thread once it has read its current file."""
        self._stopping.set()
        self._wanted.set()
        self._thread.join()
        for index in self._indexes.values():
            index.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wanted.clear()
            with self._lock:
                indexes = list(self._indexes.values())
            for index in indexes:
                self._update(index)
            self._wanted.wait(POLL_S)

    def _update(self, index: TrajectoryIndex) -> None:
        """Update one index. After a failure, which does not affect the others, the index is made anew, once."""
        if not index.folder.is_dir():
            with self._lock:
                del self._indexes[index.folder]
            index.close()
            return
        try:
            index.update(self._stopping)
            index.problem = ""
        except Exception as error:
            again, index.problem = bool(index.problem), f"{type(error).__name__}: {error}"
            if again:
                return
            log.warning("the index of %s is made anew: %s", index.folder, index.problem)
            # If this fails, too, the next update reports the problem.
            with suppress(OSError, sqlite3.Error):
                index.remake()
                self._wanted.set()
