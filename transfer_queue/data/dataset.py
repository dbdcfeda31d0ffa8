"""Reads task files with verl's columns as Tasks. Every error names the file, the row and the column."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rl_async.configs.derived.data import GENERATED_PREFIX, files_of
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Task
from rl_async.transfer_queue.data.chat_messages import refuse_media, to_messages
from rl_async.transfer_queue.data.values import as_text, depth_problem, is_number, message_problem, short, without_nulls
from rl_async.undecodable import UNDECODABLE

GENERATED_ROWS = 1_000_000  # a generated data set has no end; an epoch of it has this many rows
_BATCH = 1024
# Columns whose keys without a value are taken for Arrow's.
_NESTED = ("prompt", "messages", "chosen", "rejected", "tools", "reward_model")
_OTHERS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PAR1": "Parquet"}
_UTF8_BOM = b"\xef\xbb\xbf"
EMPTY: Mapping[str, Any] = {}


class Rows(Protocol):
    """A data set: rows by number, as dicts with verl's columns. ``generated``: too many rows to read them all."""

    name: str
    generated: bool

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...


def open_rows(path: str, *, seed: int = 0, parameters: Mapping[str, Any] = EMPTY) -> Rows:
    """Open Parquet or JSONL, in one file or several (``files_of``), or ``reasoning_gym:NAME`` with ``parameters``.

    Raises DataError for a missing, empty or unreadable file.
    """
    if path.startswith(GENERATED_PREFIX):
        return GeneratedRows(path.removeprefix(GENERATED_PREFIX), seed, parameters)
    files = _open_files(path)
    return files[0] if len(files) == 1 else FilesRows(path, files)


def open_first_rows(path: str, count: int) -> list[Rows]:
    """Open each file of a data set that is in files, with its first ``count`` rows alone, which is quick.

    Raises DataError as ``open_rows``.
    """
    return _open_files(path, count)


def _open_files(path: str, first: int | None = None) -> list[Rows]:
    files = [_open_file(file, first) for file in files_of(path)]
    if not any(len(rows) for rows in files):
        raise DataError(f"{path}: it has no rows")
    return files


def _open_file(file: Path, first: int | None) -> Rows:
    if not file.is_file():
        raise DataError(f"no file {file}; paths are relative to the working directory")
    readers: dict[str, Callable[[Path, int | None], Rows]] = {".parquet": ParquetRows, ".jsonl": JsonlRows}
    if file.suffix not in readers:
        raise DataError(f"{file}: unknown kind of data set; known: {', '.join(readers)}, reasoning_gym:NAME")
    return readers[file.suffix](file, first)


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
        return column.to_pylist(maps_as_pydicts="strict")
    # Text may not be UTF-8, a date beyond Python's, a key of a map there twice.
    except (ValueError, OverflowError, KeyError, pa.ArrowException) as error:
        if len(column) == 1:
            raise DataError(f"{place.format(start)}: {error}; write it as text in UTF-8") from error
        return [value for n in range(len(column)) for value in _to_python(column.slice(n, 1), place, start + n)]


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
    if problem := depth_problem(row):
        raise DataError(f"{place}: {problem}")
    return row


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


def to_task(row: dict[str, Any], place: str, task_id: str) -> Task:
    """Convert a row to a Task. ``place`` is "file, row n", for errors.

    Columns: prompt (messages, or one user message as text), reward_model.ground_truth, data_source, ability,
    extra_info, agent_name, tools, priority (a number, which may also stand in extra_info).
    """
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise DataError(f"{place}, column reward_model: needs a ground_truth, got {short(reward_model)}")
    truth = reward_model["ground_truth"]
    extra = row.get("extra_info")
    if extra is not None and not isinstance(extra, dict):
        raise DataError(f"{place}, column extra_info: needs a mapping, got {short(extra)}")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, str) for tool in tools)):
        raise DataError(f"{place}, column tools: needs a list of names, got {short(tools)}")
    refuse_media(row, place)
    prompt = as_messages(row.get("prompt"), place, "prompt")
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


def as_messages(value: Any, place: str, column: str, *, role: str = "user") -> list[dict[str, Any]]:
    """Return a column's chat messages; a text is one message of ``role``. Raises DataError naming place and column."""
    return to_messages(value, f"{place}, column {column}", role=role)


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
