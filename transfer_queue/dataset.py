"""Data sets as tasks: files with verl's columns or any others by templates, mixed into one endless stream.

Rows are read one by one from Parquet, JSONL, CSV or reasoning-gym. A data set's templates may make the system message,
the prompt and the ground truth of any columns. After a restart the stream continues from a cursor. Every error names
the file, the row and the column. To read another kind of file, implement ``Rows`` and name it in ``READERS``.
"""

import csv
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_async.configs.derived import (
    GENERATED_PREFIX,
    ListedCode,
    code_problem,
    eval_parts,
    files_of,
    label_of,
    labels,
    listed_code,
    parts,
    points_of,
    shares_at,
)
from rl_async.configs.schema.data import DataSource
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, DataError
from rl_async.extraction import extract
from rl_async.files import UNDECODABLE, lost_when_read, nearest_file
from rl_async.messages import Task
from rl_async.transfer_queue.chat_messages import (
    PromptLength,
    Schemas,
    as_text,
    depth_problem,
    is_number,
    message_problem,
    prompt_length,
    refuse_lost,
    short,
    to_messages,
    with_images,
    without_nulls,
)
from rl_async.transfer_queue.images import folder_of

# A generated data set is endless; an epoch of it has this many rows.
GENERATED_ROWS = 1_000_000
_BATCH = 1024
# Columns whose keys without a value are taken for Arrow's.
_NESTED = ("prompt", "messages", "chosen", "rejected", "tools", "reward_model")
_OTHERS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
}
_UTF8_BOM = b"\xef\xbb\xbf"
EMPTY: Mapping[str, Any] = {}
# Hidden tests of a program are longer than the 131,072 characters that the module allows a field.
csv.field_size_limit(1 << 30)


class Rows(Protocol):
    """A data set: rows by number, as dicts with verl's columns. ``generated`` ones have too many rows to read all."""

    name: str
    generated: bool

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


def open_rows(path: str, *, seed: int = 0, parameters: Mapping[str, Any] = EMPTY) -> Rows:
    """Open Parquet, JSONL or CSV, in one file or several (``files_of``), or ``reasoning_gym:NAME`` with ``parameters``.

    Raises DataError for a missing, empty or unreadable file.
    """
    if path.startswith(GENERATED_PREFIX):
        return GeneratedRows(path.removeprefix(GENERATED_PREFIX), seed, parameters)
    files = open_files(path)
    return files[0] if len(files) == 1 else FilesRows(path, files)


def open_files(path: str, first: int | None = None) -> list[Rows]:
    """Open each file of a data set that is in files; with only its ``first`` rows if given, which is quick.

    Raises DataError as ``open_rows``.
    """
    files = [_open_file(file, first) for file in files_of(path)]
    if not any(len(rows) for rows in files):
        raise DataError(f"{path}: it has no rows")
    return files


def _open_file(file: Path, first: int | None) -> Rows:
    if not file.is_file():
        raise DataError(f"no file {file}; {nearest_file(file) or 'paths are relative to the working directory'}")
    if file.suffix not in READERS:
        raise DataError(f"{file}: unknown kind of data set; known: {', '.join(READERS)}, reasoning_gym:NAME")
    return READERS[file.suffix](file, first)


class ParquetRows:
    """A Parquet file, or its ``first`` rows, held as Arrow columns; rows are made on access."""

    generated = False

    def __init__(self, path: Path, first: int | None = None) -> None:
        self.name = str(path)
        try:
            self._table = _all_rows(path) if first is None else _first_rows(path, first)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
        names = self._table.column_names
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(f"{path}: has more than one column {twice[0]}; rename the others")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        (row,) = self._converted(self._table.slice(number, 1), number)
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), _BATCH):
            yield from self._converted(self._table.slice(start, _BATCH), start)

    def _converted(self, table: pa.Table, start: int) -> list[dict[str, Any]]:
        """Make rows of a part of the table that begins at row ``start``. Raises DataError naming row and column."""
        columns = {}
        for name in table.column_names:
            values = _to_python(table[name], f"{self.name}, row {{}}, column {name}", start)
            columns[name] = without_nulls(values) if name in _NESTED else values
        return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _to_python(column: pa.ChunkedArray, place: str, start: int) -> list[Any]:
    try:
        values = column.to_pylist(maps_as_pydicts="strict")
        return [_as_written(value, column.type) for value in values] if _has_narrow(column.type) else values
    # Text may not be UTF-8, a date beyond Python's, a key of a map there twice.
    except (ValueError, OverflowError, KeyError, pa.ArrowException) as error:
        if len(column) == 1:
            raise DataError(f"{place.format(start)}: {error}; write it as text in UTF-8") from error
        return [value for n in range(len(column)) for value in _to_python(column.slice(n, 1), place, start + n)]


_NARROW = {pa.float16(): np.float16, pa.float32(): np.float32}


def _has_narrow(kind: pa.DataType) -> bool:
    """Whether values of a type have floats of fewer than 64 bits at any depth."""
    return kind in _NARROW or any(_has_narrow(kind.field(n).type) for n in range(kind.num_fields))


def _as_written(value: Any, kind: pa.DataType) -> Any:
    """Give floats the shortest decimals that are them in their own type: 0.1 of 32 bits is 0.10000000149 in 64."""
    if value is None or not _has_narrow(kind):
        return value
    if kind in _NARROW:
        return float(str(_NARROW[kind](value)))
    if pa.types.is_struct(kind):
        return {field.name: _as_written(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {key: _as_written(item, kind.item_type) for key, item in value.items()}
    return [_as_written(item, kind.value_type) for item in value]


def _all_rows(path: Path) -> pa.Table:
    """Read a Parquet file alone: `pq.read_table` would add columns after the names of its folders."""
    with pq.ParquetFile(path) as file:
        return file.read()


def _first_rows(path: Path, count: int) -> pa.Table:
    """Read the first rows of a Parquet file; mapped, so that no more of a row group is read than they need."""
    with pq.ParquetFile(path, memory_map=True) as file:
        batches = (batch for batch in file.iter_batches(batch_size=count) if batch.num_rows)
        return pa.Table.from_batches(list(islice(batches, 1)), schema=file.schema_arrow)


class JsonlRows:
    """A JSONL file, or its ``first`` rows, one object per line; blank lines do not count as rows."""

    generated = False

    def __init__(self, path: Path, first: int | None = None) -> None:
        self.name = str(path)
        try:
            with path.open("rb") as file:
                self._lines = list(islice(filled_lines(file), first))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> dict[str, Any]:
        line, text = self._lines[number]
        return json_row(text, f"{self.name}, row {number} (line {line})")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))


def filled_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a JSONL file that are not blank, with their numbers from 1, without UTF-8's mark at the
    beginning."""
    for number, line in enumerate(file, 1):
        text = (line.removeprefix(_UTF8_BOM) if number == 1 else line).strip()
        if text:
            yield number, text


def json_row(line: bytes, place: str) -> dict[str, Any]:
    """Decode the JSON object of a line. Raises DataError that names its ``place``."""
    if kind := next((kind for begin, kind in _OTHERS.items() if line.startswith(begin)), None):
        raise DataError(f"{place}: the file is {kind}, not JSON lines in UTF-8; convert it, or give it its own suffix")
    try:
        row: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error}); convert the file, as `iconv -t UTF-8` does") from error
    except UNDECODABLE as error:
        raise DataError(f"{place}: not a JSON object: {error}; write one on each line, as json.dumps does") from error
    if problem := depth_problem(row) or lost_when_read(line):
        raise DataError(f"{place}: {problem}")
    return row


class CsvRows:
    """A CSV file, or its ``first`` rows, whose first line names the columns. All values are text."""

    generated = False

    def __init__(self, path: Path, first: int | None = None) -> None:
        self.name = str(path)
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                reader = csv.reader(file, strict=True)
                self._columns = next(reader, [])
                self._rows = list(islice(filter(None, reader), first))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: cannot be read as CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error}); convert the file, as `iconv -t UTF-8` does") from error
        if twice := [name for name in self._columns if self._columns.count(name) > 1]:
            raise DataError(f"{path}: has more than one column {twice[0]}; rename the others")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self._rows[number]
        if len(row) != len(self._columns):
            raise DataError(f"{self.name}, row {number}: {len(row)} values for {len(self._columns)} columns")
        return dict(zip(self._columns, row))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))


READERS: Mapping[str, Callable[[Path, int | None], Rows]] = {
    ".parquet": ParquetRows,
    ".jsonl": JsonlRows,
    ".csv": CsvRows,
}


class FilesRows:
    """The rows of several files, one after another."""

    generated = False

    def __init__(self, name: str, files: Sequence[Rows]) -> None:
        self.name, self._files = name, files
        self._starts = [0, *accumulate(len(file) for file in files)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        file = bisect_right(self._starts, number) - 1
        return self._files[file][number - self._starts[file]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(self._files)


class GeneratedRows:
    """A reasoning-gym data set, generated row by row. Its scorer generates the row again from ``extra_info``."""

    generated = True

    def __init__(self, dataset: str, seed: int, parameters: Mapping[str, Any] = EMPTY) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self._rows = open_reasoning_gym(dataset, seed, parameters)
        self._from: dict[str, Any] = {"dataset": dataset, "seed": seed, "rows": GENERATED_ROWS}
        if parameters:
            self._from["parameters"] = dict(parameters)

    def __len__(self) -> int:
        return GENERATED_ROWS

    def __getitem__(self, number: int) -> dict[str, Any]:
        item = self._rows[number]
        return {
            "data_source": self.name,
            "prompt": [{"role": "user", "content": item["question"]}],
            "reward_model": {"style": "rule", "ground_truth": str(item["answer"])},
            "extra_info": {**self._from, "index": number},
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))


def open_reasoning_gym(dataset: str, seed: int, parameters: Mapping[str, Any] = EMPTY) -> Any:
    """A reasoning-gym data set of GENERATED_ROWS rows.

    Raises ConfigError if it, or the package, is missing, or if it does not take the parameters.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.path: reasoning_gym:{dataset} needs `pip install rl-async[reasoning-gym]`") from error
    try:
        return reasoning_gym.create_dataset(dataset, size=GENERATED_ROWS, seed=seed, **parameters)
    except ValueError as error:
        raise ConfigError(f"data.path: reasoning_gym has no data set {dataset!r}: {error}") from error
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"data.path: parameters of reasoning_gym:{dataset}: {error}") from error


def to_task(row: dict[str, Any], place: str, task_id: str, folder: Path | None = None) -> Task:
    """Convert a row to a Task. ``place`` is "file, row n", for errors; images that are files lie in ``folder``.

    Columns: prompt (messages, or one user message as text), images (at the marks <image> of the prompt),
    reward_model.ground_truth, data_source, ability, extra_info, agent_name, tools, priority (a number, which may also
    stand in extra_info).
    """
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        fitting = "" if "reward_model" in row else _fitting(row)
        raise DataError(f"{place}, column reward_model: needs a ground_truth, got {short(reward_model)}{fitting}")
    truth = reward_model["ground_truth"]
    extra = row.get("extra_info")
    if extra is not None and not isinstance(extra, dict):
        raise DataError(f"{place}, column extra_info: needs a mapping, got {short(extra)}")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, str) for tool in tools)):
        raise DataError(f"{place}, column tools: needs a list of names, got {short(tools)}")
    prompt = with_images(as_messages(row.get("prompt"), place, "prompt", folder=folder), row, place, folder)
    refuse_lost(row, prompt, place)
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{place}, column prompt: ends with the assistant's turn, which is the policy's; cut it off")
    task = Task(
        task_id=task_id,
        data_source=_text(row, "data_source", place),
        prompt=prompt,
        ground_truth=text_of(truth, f"{place}, column reward_model: its ground_truth"),
        ability=_text(row, "ability", place),
        agent=_text(row, "agent_name", place),
        tools=tools,
        extra=extra or {},
        priority=_priority(row, extra or {}, place),
    )
    return _sent(task, place)


# Names that data sets give to the question and to the answer.
_QUESTIONS = ("question", "problem", "instruction", "query", "input", "text")
_ANSWERS = ("ground_truth", "answer", "final_answer", "solution", "target", "label", "output", "response")


def _fitting(row: dict[str, Any]) -> str:
    """Name the columns of a row that has no ground truth, and the templates that would make tasks of such rows."""
    question, answer = (next((name for name in known if name in row), "COLUMN") for known in (_QUESTIONS, _ANSWERS))
    prompt = "" if "prompt" in row else f"prompt: '{{{question}}}', "
    return (
        f'; the row has {", ".join(sorted(row)) or "no columns"}; name those to use, as in "data.path=[{{path: FILE, '
        f"{prompt}ground_truth: '{{{answer}}}'}}]\""
    )


def as_messages(
    value: Any, place: str, column: str, *, role: str = "user", folder: Path | None = None
) -> list[dict[str, Any]]:
    """Return a column's chat messages; a text is one message of ``role``. Raises DataError naming place and column."""
    return to_messages(value, f"{place}, column {column}", role=role, folder=folder)


def text_of(value: Any, place: str) -> str:
    """Return a value as text. Raises DataError that names ``place`` for one that has no text of its own."""
    try:
        return as_text(value)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from error


def _sent(task: Task, place: str) -> Task:
    """Return a task as the processes of a run get it. Raises DataError for one that no message can carry."""
    for column, value in (("prompt", task.prompt), ("extra_info", task.extra)):
        if problem := message_problem(value):
            raise DataError(f"{place}, column {column}: {problem}")
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task)
    # A type may have no encoding, and a text half a character.
    except (*UNDECODABLE, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{place}: it cannot be sent: {error}") from error


def _priority(row: dict[str, Any], extra: dict[str, Any], place: str) -> float:
    """Return the number in column ``priority``, or in extra_info, where any other value is ignored."""
    value = row.get("priority")
    if value is None:
        inner = extra.get("priority")
        return float(inner) if is_number(inner) else 0.0
    if not is_number(value):
        raise DataError(f"{place}, column priority: needs a finite number, got {short(value)}")
    return float(value)


def _text(row: dict[str, Any], column: str, place: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{place}, column {column}: needs text, got {short(value)}")
    return value


# A column or column.key.
_NAME = r"([A-Za-z_]\w*(?:\.\w+)*)"
# {{{name}}} is a value in braces, {{name}} the name in braces as text, {name} a value. Other braces, \frac{1}{2}, stay.
_PLACE = re.compile(rf"\{{\{{\{{{_NAME}\}}\}}\}}|\{{\{{{_NAME}\}}\}}|\{{{_NAME}\}}")


def templated(row: dict[str, Any], source: DataSource, place: str) -> dict[str, Any]:
    """Return ``row`` with the prompt and the ground truth that the data set's templates make of its columns.

    ``{prompt}`` is the text of the last user message. Raises DataError naming place and column.
    """
    changed = dict(row)
    if source.prompt or source.system:
        changed["prompt"] = _messages(row, source, place)
    given = row.get("reward_model")
    given = given if isinstance(given, dict) else {}
    truth = fill(source.ground_truth, row, place) if source.ground_truth else given.get("ground_truth")
    if source.ground_truth_extract:
        if truth is None:
            raise DataError(f"{place}, column reward_model: needs a ground_truth for ground_truth_extract")
        truth = text_of(truth, f"{place}, column reward_model: its ground_truth")
        try:
            found = extract(truth, source.ground_truth_extract)
        except TimeoutError as error:
            raise DataError(f"{place}: ground_truth_extract: {error}") from error
        if found is None:
            raise DataError(f"{place}: ground_truth_extract finds nothing in {truth!r:.200}")
        truth = found
    if source.ground_truth or source.ground_truth_extract:
        changed["reward_model"] = {**given, "ground_truth": truth}
    return changed


def fill(template: str, row: dict[str, Any], place: str) -> str:
    """Put columns into a template, all in one pass, so that braces in a column stay text. Raises DataError."""

    def replaced(match: re.Match[str]) -> str:
        braced, text, name = match.groups()
        if text:
            return f"{{{text}}}"
        return f"{{{_value(row, braced, place)}}}" if braced else _value(row, name, place)

    return _PLACE.sub(replaced, template)


def _value(row: dict[str, Any], name: str, place: str) -> str:
    found: Any = row
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            columns = ", ".join(sorted(row))
            raise DataError(
                f"{place}: the template has {{{name}}}, and the row has only {columns}; as text, {{{{{name}}}}}"
            )
        found = found[key]
    if found is None:
        raise DataError(f"{place}: the template has {{{name}}}, which is null in this row")
    return text_of(found, f"{place}: the template has {{{name}}}")


def _messages(row: dict[str, Any], source: DataSource, place: str) -> list[dict[str, Any]]:
    given = row.get("prompt")
    messages = as_messages(given, place, "prompt", folder=folder_of(source.path)) if given else []
    if source.prompt:
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
        columns = {name: value for name, value in row.items() if name != "prompt"}
        if last is None:
            messages.append({"role": "user", "content": fill(source.prompt, columns, place)})
        else:
            columns["prompt"] = messages[last]["content"]
            messages[last] = messages[last] | {"content": fill(source.prompt, columns, place)}
    if source.system:
        own = {"role": "system", "content": fill(source.system, row, place)}
        messages = [own, *(message for message in messages if message["role"] != "system")]
    return messages


NO_SCHEMAS: Schemas = {}
# The rows of each file that are read before a run starts.
FIRST_ROWS = 8


class _Cursor(msgspec.Struct, array_like=True):
    """For each source: tasks taken, rows (to notice changed data), and how many tasks it is behind its share.

    An empty ``owed`` means that every source has its share.
    """

    drawn: list[int]
    rows: list[int]
    owed: list[float] = []


class _Source:
    """One data set, which has another order in each epoch if it is shuffled.

    With ``shorter_first``, the first epoch is in the order of the prompts' lengths.
    """

    def __init__(
        self,
        rows: Rows,
        part: DataSource,
        label: str,
        seed: int | None,
        listed: ListedCode | None,
        *,
        shorter_first: bool = False,
    ) -> None:
        self.rows, self.label, self.weights = rows, label, points_of(part)
        self._part, self._listed = part, listed
        # Without a seed, rows come in the file's order.
        self._seed = seed
        self._shorter_first = shorter_first
        self._epoch, self._order = -1, list[int]()

    def task(self, drawn: int) -> Task:
        """Return task number ``drawn``, counted from the beginning of the first epoch."""
        epoch, position = divmod(drawn, len(self.rows))
        number = position
        # Generated rows are random already.
        if (self._seed is not None or self._shorter_first) and not self.rows.generated:
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(len(self.rows)))
                if self._seed is not None:
                    random.Random(f"{self._seed} {self.label} {epoch}").shuffle(self._order)
                if self._shorter_first and epoch == 0:
                    self._order.sort(key=lambda row: len(msgspec.json.encode(self.at(row).prompt)))
            number = self._order[position]
        return self.at(number)

    def at(self, number: int) -> Task:
        """Return the task of the row with this number."""
        task = self._task(self.rows[number], number, f"{self.label}:{number}")
        return msgspec.structs.replace(task, source=self.label)

    def _task(self, row: dict[str, Any], number: int, task_id: str) -> Task:
        """Convert a row. Raises DataError naming it if it is bad or names code that the config does not list."""
        place = f"{self.rows.name}, row {number}"
        task = to_task(templated(row, self._part, place), place, task_id, folder_of(self._part.path))
        if problem := code_problem(task, self._listed):
            raise DataError(f"{place}, column {problem}")
        return task

    def every_task(self) -> Iterator[tuple[str, Task]]:
        """Yield the tasks of all rows with the places of their prompts, for errors; generated ones are endless."""
        for number, row in enumerate(self.rows if not self.rows.generated else ()):
            yield f"{self.rows.name}, row {number}, column prompt", self._task(row, number, "")

    def check(self, length: PromptLength, longest: int) -> None:
        """Raise DataError for the first row that is not a task, or whose prompt has more than ``longest`` tokens."""
        for place, task in self.every_task():
            try:
                tokens = length(task)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
            if tokens > longest:
                raise DataError(
                    f"{place}: {tokens} tokens with the template's own text and the tools, more than "
                    f"data.max_prompt_tokens={longest}"
                )


class TaskStream:
    """Endless tasks from several data sets in proportion to their weights. Implements the queue's Protocol.

    The order depends only on the data, the weights, the seed and the requested steps. So a cursor holds the number of
    tasks taken from each data set, and by how many each is behind: weights may change from step to step.
    """

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._sources = sources
        self._drawn = [0] * len(sources)
        self._owed = [0.0] * len(sources)

    def next(self, step: int = 0) -> Task:
        """Return the next task, trained at about ``step``, from the data set that is furthest behind its share.

        One whose share is 0 gives none.
        """
        shares = shares_at([source.weights for source in self._sources], step)
        self._owed = [owed + share for owed, share in zip(self._owed, shares)]
        chosen = max((n for n, share in enumerate(shares) if share), key=self._owed.__getitem__)
        task = self._sources[chosen].task(self._drawn[chosen])
        self._drawn[chosen] += 1
        self._owed[chosen] -= 1.0
        return task

    def cursor(self) -> bytes:
        return msgspec.msgpack.encode(_Cursor(self._drawn, [len(s.rows) for s in self._sources], self._owed))

    def seek(self, cursor: bytes) -> None:
        """Continue from a cursor. Raises DataError if it was taken from other data sets."""
        try:
            found = msgspec.msgpack.decode(cursor, type=_Cursor)
        except UNDECODABLE as error:
            raise DataError(f"not a cursor of a task stream: {error}") from error
        rows = [len(source.rows) for source in self._sources]
        if found.rows != rows or len(found.drawn) != len(rows):
            raise DataError(
                f"data.path has changed: the cursor is for data sets of {found.rows} rows, these have {rows}"
            )
        self._drawn, self._owed = list(found.drawn), list(found.owed) or [0.0] * len(rows)


def find_task(config: RunConfig, task_id: str, partition: str) -> Task:
    """Return the task with this id in the data of ``partition``. Raises DataError if it does not exist any more."""
    sources = _held_out_sources(config, listed_code(config)) if partition == "eval" else _training_sources(config)
    label, _, number = task_id.rpartition(":")
    for source in sources:
        if source.label == label and number.isdigit() and int(number) < len(source.rows):
            return source.at(int(number))
    key = "data.eval_path" if partition == "eval" else "data.path"
    raise DataError(f"{key} has no task {task_id}; was it made by another data set, or submitted by a client?")


def make_sources(config: RunConfig, schemas: Schemas = NO_SCHEMAS) -> tuple[TaskStream, list[Task]]:
    """Return the training tasks, and the held-out tasks of one evaluation.

    All rows are read once, so that a bad one stops the run before it starts; ``schemas`` are those of the tools that
    they may name. Raises DataError naming it.
    """
    data = config.data
    length = prompt_length(config, schemas)
    sources, held_out_sources = _training_sources(config), _held_out_sources(config, listed_code(config))
    for source in (*held_out_sources, *sources):
        source.check(length, data.max_prompt_tokens)
    return TaskStream(sources), _held_out(held_out_sources, config.eval.tasks)


def check_first_rows(config: RunConfig) -> None:
    """Raise DataError, naming the key, for a file that ``make_sources`` would refuse because of its first rows.

    Reads no others, so that it is quick, and leaves out generated data sets.
    """
    listed = listed_code(config)
    for key, found in (("data.path", parts(config.data)), ("data.eval_path", eval_parts(config.data))):
        for part in found:
            if part.path.startswith(GENERATED_PREFIX):
                continue
            try:
                for rows in open_files(part.path, FIRST_ROWS):
                    source = _Source(rows, part, "", None, listed)
                    for number in range(len(rows)):
                        source.at(number)
            except DataError as error:
                raise DataError(f"{key}: {error}") from error


def every_task(config: RunConfig) -> Iterator[tuple[str, Task]]:
    """Yield the tasks of all files of a run with the places of their prompts. Raises DataError for a bad row."""
    for source in (*_training_sources(config), *_held_out_sources(config, listed_code(config))):
        yield from source.every_task()


def first_task(config: RunConfig) -> Task:
    """Return a task of ``data.path``, to try an environment with. Raises DataError."""
    part, label = parts(config.data)[0], labels(config.data)[0]
    if part.path.startswith(GENERATED_PREFIX):
        rows = open_rows(part.path, seed=config.seed, parameters=part.parameters)
    else:
        rows = open_files(part.path, FIRST_ROWS)[0]
    return _Source(rows, part, label, None, listed_code(config)).at(0)


def held_out_tasks(config: RunConfig) -> list[Task]:
    """Return the held-out tasks of one evaluation, however long they are. Raises DataError for a bad row."""
    return _held_out(_held_out_sources(config, listed_code(config)), config.eval.tasks)


def _training_sources(config: RunConfig) -> list[_Source]:
    data, listed = config.data, listed_code(config)
    sources = []
    for part, label in zip(parts(data), labels(data), strict=True):
        rows = open_rows(part.path, seed=config.seed, parameters=part.parameters)
        seed = config.seed if data.shuffle else None
        by_length = data.curriculum is not None and data.curriculum.by_length
        sources.append(_Source(rows, part, label, seed, listed, shorter_first=by_length))
    return sources


def _held_out_sources(config: RunConfig, listed: ListedCode | None) -> list[_Source]:
    """Open the held-out data sets, with another seed than training's: a generated set would hold out what is trained.

    A single one is named after its file alone.
    """
    found = eval_parts(config.data)
    return [
        _Source(
            open_rows(part.path, seed=config.seed + 1_000_003, parameters=part.parameters),
            part,
            label_of(part.path) if len(found) == 1 else f"{number}-{label_of(part.path)}",
            None,
            listed,
        )
        for number, part in enumerate(found)
    ]


def _held_out(sources: Sequence[_Source], tasks: int) -> list[Task]:
    """Take the first tasks of each data set, in proportion to the weights; fewer where it has fewer rows."""
    shares = shares_at([source.weights for source in sources], 0)
    return [
        source.at(number)
        for source, share in zip(sources, shares, strict=True)
        for number in range(min(max(1, round(tasks * share)), len(source.rows)))
    ]
