"""Reads task files with verl's columns as Tasks. Every error names the file, the row and the column."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rl_async.configs.derived.data import GENERATED_PREFIX, files_of
from rl_async.errors import ConfigError, DataError
from rl_async.messages import Task

GENERATED_ROWS = 1_000_000  # a generated data set has no end; an epoch of it has this many rows
_BATCH = 1024
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
            self._table = pq.read_table(path) if first is None else _first_rows(path, first)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._table.slice(number, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._table.to_batches(max_chunksize=_BATCH):
            yield from batch.to_pylist()


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
                data = b"".join(islice((line for line in file if line.strip()), first))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        self._lines = [line for line in data.splitlines() if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self._lines[number], type=dict[str, Any])
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise DataError(f"{self.name}, row {number}: not a JSON object: {error}") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))


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
        raise DataError(f"{place}, column reward_model: needs a ground_truth, got {_short(reward_model)}")
    truth = reward_model["ground_truth"]
    extra = row.get("extra_info")
    if extra is not None and not isinstance(extra, dict):
        raise DataError(f"{place}, column extra_info: needs a mapping, got {_short(extra)}")
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, str) for tool in tools)):
        raise DataError(f"{place}, column tools: needs a list of names, got {_short(tools)}")
    return Task(
        task_id=task_id,
        data_source=_text(row, "data_source", place),
        prompt=as_messages(row.get("prompt"), place, "prompt"),
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth, default=str),
        ability=_text(row, "ability", place),
        agent=_text(row, "agent_name", place),
        tools=tools,
        extra=extra or {},
        priority=_priority(row, extra or {}, place),
    )


def as_messages(value: Any, place: str, column: str, *, role: str = "user") -> list[dict[str, Any]]:
    """Return a column's chat messages; a text is one message of ``role``. Raises DataError naming place and column."""
    if isinstance(value, str) and value:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}, column {column}: needs a list of messages or a text, got {_short(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}, column {column}: a message needs a role, got {_short(message)}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"{place}, column {column}: a message needs its content as text, got {_short(message)}")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def _priority(row: dict[str, Any], extra: dict[str, Any], place: str) -> float:
    """Return the number in column ``priority``, or in extra_info, where any other value is ignored."""
    value = row.get("priority")
    if value is None:
        inner = extra.get("priority")
        return float(inner) if _is_number(inner) else 0.0
    if not _is_number(value):
        raise DataError(f"{place}, column priority: needs a finite number, got {_short(value)}")
    return float(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(row: dict[str, Any], column: str, place: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{place}, column {column}: needs text, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
