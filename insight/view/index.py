"""Keeps a table of all recorded trajectories of a run, which grows with the run, and answers the page's questions.

It is an SQLite file beside the run's own, ``RUN/view.sqlite``: a cache that may be deleted at any time. A row has the
columns for lists, filters and sorting, and the place of the trajectory's line, which alone has its tokens. Text is
searched by words, through an index without the text itself. Words are those of SQLite's unicode61, and single signs of
scripts without spaces. ``insight/view/web/src/embedded.ts`` does the same in a report, which has no server.
Evaluations have avg@k and pass@k with intervals, and two may be compared. SQLite adds up the episodes through an index,
so that memory here grows with the tasks of an evaluation, not with its episodes.
"""

import logging
import math
import os
import re
import shutil
import sqlite3
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.configs.suggestions import nearest
from rl_async.errors import RequestRefused, UserError
from rl_async.evaluation import ROUNDING, Tried, line_of, summary
from rl_async.insight.recorded_evaluations import Evaluation, TaskKey, compare
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
    connection.executemany("INSERT INTO tools VALUES (?, ?, ?, ?, ?, ?)", [(number, *one) for one in _tool_rows(calls)])
    connection.executemany(
        "INSERT INTO engines VALUES (?, ?, ?, ?, ?, ?, ?)", [(number, *one) for one in _engine_rows(row)]
    )
    masked: Counter[str] = Counter()
    for run in correction.rules if correction else ():
        masked[run.rule] += run.end - run.start
    connection.executemany("INSERT INTO rules VALUES (?, ?, ?)", [(number, *one) for one in masked.items()])


def _tool_rows(calls: Sequence[ToolCall]) -> Iterator[tuple[str, str, int, float, float]]:
    """Yield, for each tool and error of a row, the number of calls, their seconds, and those of the slowest.

    Successful calls have an empty error.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for call in calls:
        found.setdefault((call.name, _preview(call.error)), []).append(call.seconds)
    for (name, error), seconds in found.items():
        yield name, error, len(seconds), sum(seconds), max(seconds)


def _engine_rows(row: RecordedRow) -> Iterator[tuple[str, int, float, float, int, float]]:
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


# SQLite's largest whole number.
MOST = (1 << 63) - 1


def integer(name: str, text: str) -> int:
    """Parse the whole number in parameter ``name``. Raises RequestRefused, also for a number too large for SQLite."""
    try:
        found = int(text)
    except ValueError:
        raise _refused(name, text, "whole number") from None
    if abs(found) > MOST:
        raise _refused(name, text, "whole number of 64 bits")
    return found


def number(name: str, text: str) -> float:
    """Parse the finite number in parameter ``name``. Raises RequestRefused."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise _refused(name, text, "finite number")
    return found


def _refused(name: str, text: str, kind: str) -> RequestRefused:
    return RequestRefused(f"{name}: {text[:100]!r} is no {kind}", code="no_number", param=name)


# The most rows on a page, values offered for a filter, and kinds of errors shown for a tool.
PAGE = 100
CHOICES = 200
SHOWN_ERRORS = 3
TOTAL = "rows.reward + rows.turn_reward"
# Leaves out rows that a later lineage trained again. An evaluation has no lineage, since its file is rewritten.
CURRENT = (
    "(rows.partition != 'train' OR NOT EXISTS "
    "(SELECT 1 FROM lineages l WHERE l.lineage > rows.lineage AND l.first_step <= rows.step))"
)
KEY = ("partition", "step", "grp", "sample", "segment")
LISTED = (
    *("partition", "step", "lineage", "grp", "sample", "segment", "role", "task"),
    *("source", "reward", "turn_reward", "scored"),
    *("finish", "error", "tokens", "sampled", "masked", "min_weight", "advantage", "difference", "staleness", "turns"),
    *("calls", "failed_calls", "seconds", "prompt", "answer", "expected"),
)

# The condition of each filter, with a placeholder for its value. A range consists of two filters.
FILTERS: dict[str, str] = {
    "partition": "rows.partition = ?",
    "step": "rows.step = ?",
    "step_from": "rows.step >= ?",
    "step_to": "rows.step <= ?",
    "group": "rows.grp = ?",
    "sample": "rows.sample = ?",
    "task": "rows.task = ?",
    "source": "rows.source = ?",
    "reward_from": f"{TOTAL} >= ?",
    "reward_to": f"{TOTAL} <= ?",
    "finish": "rows.finish = ?",
    "tool": "EXISTS (SELECT 1 FROM tools WHERE tools.row = rows.id AND tools.name = ?)",
    "failed_tool": "EXISTS (SELECT 1 FROM tools WHERE tools.row = rows.id AND tools.error != '' AND tools.name = ?)",
    "engine": "EXISTS (SELECT 1 FROM engines WHERE engines.row = rows.id AND engines.name = ?)",
    "rule": "EXISTS (SELECT 1 FROM rules WHERE rules.row = rows.id AND rules.name = ?)",
    "staleness_from": "rows.staleness >= ?",
}
NUMBERS = {"step", "step_from", "step_to", "group", "sample", "reward_from", "reward_to", "staleness_from"}
# The condition of each flag, a filter without a value.
FLAGS: dict[str, str] = {
    "error": "rows.error",
    "failed_call": "rows.failed_calls > 0",
    "masked": "rows.masked > 0",
    "unparsed": "EXISTS (SELECT 1 FROM tools WHERE tools.row = rows.id AND tools.name = '')",
    "unscored": "NOT rows.scored",
}
ORDERS: dict[str, str] = {
    "newest": "rows.step DESC, rows.grp, rows.sample, rows.segment",
    "oldest": "rows.step, rows.grp, rows.sample, rows.segment",
    "reward_low": f"{TOTAL}, rows.step DESC",
    "reward_high": f"{TOTAL} DESC, rows.step DESC",
    "masked": "rows.masked DESC, rows.step DESC",
    "difference": "rows.difference DESC, rows.step DESC",
    "weight": "rows.min_weight IS NULL, rows.min_weight, rows.step DESC",
    "tokens": "rows.tokens DESC, rows.step DESC",
    "seconds": "rows.seconds DESC, rows.step DESC",
    "failed_calls": "rows.failed_calls DESC, rows.step DESC",
}
# What the language of ``where`` compares: numbers, texts, and names of which a row may have several.
FIELDS: dict[str, str] = {
    **{name: f"rows.{name}" for name in ("step", "sample", "segment", "advantage", "tokens", "sampled", "masked")},
    **{name: f"rows.{name}" for name in ("difference", "staleness", "turns", "calls", "failed_calls", "seconds")},
    "group": "rows.grp",
    "reward": TOTAL,
    "weight": "rows.min_weight",
}
TEXTS: dict[str, str] = {
    **{name: f"rows.{name}" for name in ("task", "source", "role", "prompt", "answer", "expected", "partition")},
    "end": "rows.finish",
}
SEVERAL = ("tool", "failed_tool", "engine", "rule")
# A row in the order of a column, as a click on its head asks for: NAME_up and NAME_down.
ORDERS |= {
    f"{name}_{way}": f"{column} {'ASC' if way == 'up' else 'DESC'} NULLS LAST, rows.step DESC, rows.grp, rows.sample"
    for name, column in (FIELDS | TEXTS).items()
    for way in ("up", "down")
}
_TERM = re.compile(r'(?:and\s+)?(\w+)\s*(<=|>=|!=|=|<|>|~)\s*("[^"]*"|[^\s"]+)\s*')
_BY = re.compile(r"group\s+by\s+(\w+)\s*$")
OTHERS = {"order", "offset", "limit"}


class Query(NamedTuple):
    """SQL conditions with their values, and the name of the field to group by, if any."""

    where: str
    values: list[Any]
    by: str = ""


def parsed(text: str) -> Query:
    """Translate text such as ``reward < 0.5 tool = shell answer ~ "no idea" group by task``.

    ``~`` finds a part of a text, whatever its case. Raises RequestRefused for what it does not understand.
    """
    by = ""
    if found := _BY.search(text):
        by, text = found[1], text[: found.start()]
        if by not in FIELDS and by not in TEXTS:
            raise _misread(f"cannot group by {by[:100]}{nearest(by, [*FIELDS, *TEXTS])}")
    conditions, values, at = list[str](), list[Any](), 0
    text = text.strip()
    while at < len(text):
        term = _TERM.match(text, at)
        if term is None:
            raise _misread(f"{text[at : at + 60]!r} is not NAME, one of < <= = != >= > ~, and a value")
        at = term.end()
        name, sign, value = term[1], term[2], term[3].strip('"')
        if name in FIELDS and sign != "~":
            conditions.append(f"{FIELDS[name]} {sign} ?")
            values.append(number(f"where: {name}", value))
        elif name in TEXTS and sign in ("=", "!="):
            conditions.append(f"{TEXTS[name]} {sign} ?")
            values.append(value)
        elif name in TEXTS and sign == "~":
            conditions.append(f"instr(lower({TEXTS[name]}), lower(?))")
            values.append(value)
        elif name in SEVERAL and sign in ("=", "!="):
            conditions.append(("NOT " if sign == "!=" else "") + FILTERS[name])
            values.append(value)
        elif name in FIELDS or name in TEXTS or name in SEVERAL:
            raise _misread(f"{name} cannot be compared by {sign}")
        else:
            raise _misread(f"there is no field {name[:100]}{nearest(name, [*FIELDS, *TEXTS, *SEVERAL])}")
    return Query(" AND ".join(conditions), values, by)


def _misread(reason: str) -> RequestRefused:
    return RequestRefused(f"where: {reason}", code="no_filter", param="where")


def query(given: Mapping[str, str]) -> Query:
    """Translate filters, such as ``{"tool": "shell", "reward_to": "0.5", "error": "1"}``.

    Raises RequestRefused, naming the filter, if it is unknown or its value is not a number.
    """
    conditions, values, by = [CURRENT], list[Any](), ""
    for name, value in given.items():
        if name in FLAGS:
            conditions.append(FLAGS[name])
        elif name in FILTERS:
            conditions.append(FILTERS[name])
            values.append(number(name, value) if name in NUMBERS else value)
        elif name == "text":
            conditions.append("rows.id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
            values.append(words(value))
        elif name == "where":
            asked = parsed(value)
            conditions += filter(None, [asked.where])
            values += asked.values
            by = asked.by
        elif name not in OTHERS:
            raise RequestRefused(f"there is no filter {name[:100]!r}", code="no_filter", param=name)
    return Query(" AND ".join(conditions), values, by)


def find(connection: sqlite3.Connection, given: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of matching rows, and the number of all; or, with ``group by``, of their groups.

    Raises RequestRefused as ``query`` does.
    """
    wanted = query(given)
    order = given.get("order", "newest")
    if order not in ORDERS:
        raise RequestRefused(f"order: there is none called {order[:100]!r}", code="no_order", param="order")
    offset = integer("offset", given.get("offset", "0"))
    limit = integer("limit", given.get("limit", str(PAGE)))
    if wanted.by:
        return _grouped(connection, wanted, offset, limit)
    (count,) = connection.execute(f"SELECT count(*) FROM rows WHERE {wanted.where}", wanted.values).fetchone()
    # Rows are long, so only their ids are sorted.
    rows = connection.execute(
        f"SELECT * FROM rows WHERE id IN (SELECT rows.id FROM rows WHERE {wanted.where} ORDER BY {ORDERS[order]} "
        f"LIMIT ? OFFSET ?) ORDER BY {ORDERS[order]}",
        [*wanted.values, max(0, min(limit, PAGE)), max(0, offset)],
    )
    return {"count": count, "offset": offset, "rows": [listed(row) for row in rows]}


def _grouped(connection: sqlite3.Connection, wanted: Query, offset: int, limit: int) -> dict[str, Any]:
    """Return one page of groups, with the statistics of their rows: numbers in order, texts the largest group first."""
    column = {**FIELDS, **TEXTS}[wanted.by]
    grouped = (
        f"SELECT {column} AS value, count(*) AS rows, avg({TOTAL}) AS reward, min({TOTAL}) AS lowest, "
        f"max({TOTAL}) AS highest, avg(rows.tokens) AS tokens, avg(rows.failed_calls) AS failed_calls, "
        f"avg(rows.error) AS errors FROM rows WHERE {wanted.where} GROUP BY 1"
    )
    (count,) = connection.execute(f"SELECT count(*) FROM ({grouped})", wanted.values).fetchone()
    order = "value" if wanted.by in FIELDS else "rows DESC, value"
    groups = connection.execute(
        f"{grouped} ORDER BY {order} LIMIT ? OFFSET ?", [*wanted.values, max(0, min(limit, PAGE)), max(0, offset)]
    )
    return {"count": count, "offset": offset, "rows": [], "by": wanted.by, "groups": [dict(one) for one in groups]}


def listed(row: sqlite3.Row) -> dict[str, Any]:
    """Return the columns of a row that a list shows."""
    return {name: row[name] for name in LISTED}


def choices(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return the values that filters may take, each with its number of rows, the most frequent first, and statistics of
    tools and engines.

    Like searches, the counts leave out rows that were trained again.
    """

    def counted(column: str) -> list[dict[str, Any]]:
        found = connection.execute(
            f"SELECT {column} AS value, count(*) AS rows FROM rows WHERE {CURRENT} AND {column} != '' GROUP BY 1 "
            f"ORDER BY 2 DESC LIMIT {CHOICES}"
        )
        return [dict(row) for row in found]

    rules = connection.execute(
        "SELECT name AS value, count(*) AS rows, sum(rules.tokens) AS tokens FROM rules "
        f"JOIN rows ON rows.id = rules.row WHERE {CURRENT} GROUP BY 1 ORDER BY 3 DESC"
    )
    trained = f"SELECT min(step), max(step) FROM rows WHERE partition = 'train' AND {CURRENT}"
    (first, last) = connection.execute(trained).fetchone()
    return {
        "source": counted("source"),
        "finish": counted("finish"),
        "partition": counted("partition"),
        "tool": _tools(connection),
        "engine": _engines(connection),
        "rule": [dict(row) for row in rules],
        "steps": [first, last],
    }


def _tools(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return each tool with its calls, their seconds, and its failures with their most frequent errors.

    The tool with the most failures comes first.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, error, calls, seconds, slowest in connection.execute(
        "SELECT name, tools.error, sum(tools.calls), sum(tools.seconds), max(tools.slowest) FROM tools "
        f"JOIN rows ON rows.id = tools.row WHERE {CURRENT} GROUP BY 1, 2 ORDER BY 3 DESC"
    ):
        none = {"value": name, "calls": 0, "failed": 0, "seconds": 0.0, "slowest": 0.0, "errors": []}
        one = found.setdefault(name, none)
        one["calls"] += calls
        one["seconds"] += seconds
        one["slowest"] = max(one["slowest"], slowest)
        if error:
            one["failed"] += calls
            one["errors"] = [*one["errors"], {"value": error, "calls": calls}][:SHOWN_ERRORS]
    return sorted(found.values(), key=lambda one: (-one["failed"], -one["calls"]))[:CHOICES]


def _engines(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return each engine with its sampled turns, their seconds and tokens per second; the slowest comes first."""
    found = connection.execute(
        "SELECT name AS value, count(*) AS rows, sum(engines.turns) AS turns, sum(engines.seconds) AS seconds, "
        "max(engines.slowest) AS slowest, sum(engines.tokens) AS tokens, sum(engines.tokens) / sum(timed) AS speed "
        f"FROM engines JOIN rows ON rows.id = engines.row WHERE {CURRENT} GROUP BY 1 "
        f"ORDER BY speed IS NULL, speed LIMIT {CHOICES}"
    )
    return [dict(row) for row in found]


def key_of(row: sqlite3.Row) -> str:
    """Return the key of a row, such as ``train-5-48-0-0``."""
    return "-".join(str(row[name]) for name in KEY)


def row_of_key(connection: sqlite3.Connection, key: str) -> sqlite3.Row:
    """Return the row with a key such as ``train-5-48-0-0``: partition, step, group, sample and segment.

    Raises RequestRefused, with 404 for an unknown row and 400 for a key with a part that is not a number.
    """
    partition, *numbers = key.split("-")
    found = None
    if len(numbers) == 4:
        found = connection.execute(
            "SELECT * FROM rows WHERE partition = ? AND step = ? AND grp = ? AND sample = ? AND segment = ? "
            "ORDER BY lineage DESC LIMIT 1",
            (partition, *(integer("key", part) for part in numbers)),
        ).fetchone()
    if found is None:
        raise RequestRefused(f"there is no trajectory {key[:100]!r}", code="no_trajectory", status=404)
    return found


def rows_of_group(connection: sqlite3.Connection, partition: str, step: int, group: int) -> list[sqlite3.Row]:
    """Return the rows of a group, ordered by sample and segment. Raises RequestRefused (404) for an unknown group."""
    found = connection.execute(
        f"SELECT * FROM rows WHERE {CURRENT} AND partition = ? AND step = ? AND grp = ? ORDER BY sample, segment",
        (partition, step, group),
    ).fetchall()
    if not found:
        raise RequestRefused(f"there is no group {group} of step {step}", code="no_group", status=404)
    return found


# The most tasks of a comparison.
SHOWN = 500
# Selects the reward of each role of each held-out episode, as ``role_rewards`` computes it: a role with several rows
# gets the rewards of all turns of its scored rows, and 0 without a scored row.
EPISODES = (
    "SELECT step, source, role, task, max(scored) AS scored, "
    "coalesce(min(iif(scored, reward, NULL)) + sum(iif(scored, turn_reward, 0.0)), 0.0) AS earned "
    "FROM rows INDEXED BY rows_by_episode "
    "WHERE partition = 'eval' AND {condition} GROUP BY step, source, role, task, grp, sample"
)


def table(connection: sqlite3.Connection, solved: float) -> list[dict[str, Any]]:
    """Return one line per step and source (``Summary``). An episode passes with a reward of ``solved`` or more."""
    rows = connection.execute(
        "SELECT step, source, role, count(*), avg(earned), sum(earned >= ?) "
        f"FROM ({EPISODES.format(condition='TRUE')}) GROUP BY step, source, role, task ORDER BY step, source, role",
        (solved - ROUNDING,),
    )
    lines = [
        {"step": step, **msgspec.structs.asdict(summary(line_of(source, role), [Tried(*row[3:]) for row in part]))}
        for (step, source, role), part in groupby(rows, key=lambda row: tuple(row[:3]))
    ]
    return sorted(lines, key=lambda line: (line["step"], line["source"]))


class Place(NamedTuple):
    """The first answer to a task: ids of the first and last row of its first sample, and the first row's key."""

    key: str
    first: int
    last: int


class Recorded(NamedTuple):
    """An evaluation with the place of each task's first answer; its texts are still in the index."""

    evaluation: Evaluation
    places: Mapping[TaskKey, Place]
    connection: sqlite3.Connection


def recorded(connection: sqlite3.Connection, name: str, step: int) -> Recorded:
    """Return the evaluation of version ``step`` of the run ``name``, without questions and answers."""
    if not connection.in_transaction:
        # In one transaction all reads see the same state, while the indexer adds and removes files.
        connection.execute("BEGIN")
    means, unscored = dict[TaskKey, float](), 0
    for source, role, task, mean, failed in connection.execute(
        "SELECT source, role, task, avg(earned), sum(NOT scored) "
        f"FROM ({EPISODES.format(condition='step = ?')}) GROUP BY source, role, task",
        (step,),
    ):
        means[source, role, task] = mean
        unscored += failed
    asked, places = dict[TaskKey, int](), dict[TaskKey, Place]()
    rows = connection.execute(
        "SELECT source, role, task, grp, sample, segment, asked, id FROM rows WHERE partition = 'eval' AND step = ? "
        "ORDER BY source, role, task, sample, segment",
        (step,),
    )
    for key, of_task in groupby(rows, key=lambda row: (row["source"], row["role"], row["task"])):
        first, last = _first_sample(of_task)
        asked[key] = first["asked"]
        named = f"eval-{step}-{first['grp']}-{first['sample']}-{first['segment']}"
        places[key] = Place(named, first["id"], last["id"])
    return Recorded(Evaluation(f"{name}@{step}", means, unscored, asked, {}, {}), places, connection)


def _first_sample(rows: Iterable[sqlite3.Row]) -> tuple[sqlite3.Row, sqlite3.Row]:
    """Return the first and the last row of the first sample, and ignore the others."""
    _, sample = next(groupby(rows, key=lambda row: row["sample"]))
    first = next(sample)
    newest = deque(sample, maxlen=1)
    return first, newest[0] if newest else first


def compared(before: Recorded, after: Recorded) -> dict[str, Any]:
    """Return a ``Comparison`` as a dictionary, with the SHOWN tasks that became worse most and previews of their texts.

    ``keys`` of a task are those of its trajectories before and after. Raises RequestRefused (409) if the evaluations
    share no task.
    """
    try:
        found = compare(before.evaluation, after.evaluation)
    except UserError as error:
        raise RequestRefused(str(error), code="nothing_to_compare", status=409) from error
    sides = [{(line_of(*key[:2]), key[2]): place for key, place in side.places.items()} for side in (before, after)]
    tasks = []
    for task in found.tasks[:SHOWN]:
        first, second = (side[task.source, task.task] for side in sides)
        texts = {
            "question": _text(before.connection, "prompt", first.first),
            "replied_before": _text(before.connection, "answer", first.last),
            "replied_after": _text(after.connection, "answer", second.last),
        }
        tasks.append({**msgspec.structs.asdict(task), **texts, "keys": [first.key, second.key]})
    return {**msgspec.structs.asdict(found), "tasks": tasks, "count": len(found.tasks)}


def _text(connection: sqlite3.Connection, column: str, row: int) -> str:
    """Return a preview; empty if the row's file has been reindexed meanwhile."""
    found = connection.execute(f"SELECT {column} FROM rows WHERE id = ?", (row,)).fetchone()
    return "" if found is None else str(found[0])
