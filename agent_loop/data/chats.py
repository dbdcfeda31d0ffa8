"""Reads conversations to fine-tune on from JSONL or Parquet. Every error names the file, the line and what to do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl_async.configs.derived.data import files_of
from rl_async.configs.schema.data import DataSource
from rl_async.errors import DataError
from rl_async.files import UNDECODABLE
from rl_async.transfer_queue.chat_messages import for_templates, refuse_media, to_messages
from rl_async.transfer_queue.dataset import ParquetRows, fill, filled_lines, json_row

Message = dict[str, Any]

# Keys of a message that say whether its turn is learned.
_WEIGHTS = ("weight", "train", "trainable", "loss", "loss_mask", "loss_weight")
SUFFIXES = (".jsonl", ".parquet")


class Chat(NamedTuple):
    """One conversation. ``tools`` are JSON schemas; ``place`` is its file and line, for errors."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    place: str


def read_chats(source: DataSource) -> Iterator[Chat]:
    """Yield the conversations of a data set (``files_of``) with a column ``messages`` and, optionally, ``tools``.

    Raises DataError for the first that cannot be trained on, and for a data set that is missing or empty.
    """
    empty = True
    for file in files_of(source.path):
        for place, row in _rows(file):
            empty = False
            chat = to_chat(row, place)
            yield chat._replace(messages=_templated(chat.messages, row, source, place))
    if empty:
        raise DataError(f"{source.path}: no conversations in it; write one JSON object with `messages` on each line")


def to_chat(row: dict[str, Any], place: str) -> Chat:
    """Convert a row: tool-call arguments become mappings, as most chat templates need, and missing content is empty."""
    refuse_media(row, place)
    if row.get("functions"):
        raise DataError(f"{place}: functions is OpenAI's old form; write tools")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: needs `messages`, a list of {{role, content}}, got {messages!r:.80}")
    chat = for_templates(to_messages(messages, place))
    spoken = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
    for number in spoken:
        if key := next((key for key in _WEIGHTS if chat[number].get(key, 1) != 1), None):
            raise DataError(f"{place}, message {number}: {key} is not supported; make a row that ends before the turn")
    if not spoken:
        raise DataError(f"{place}: no assistant turn, so there is nothing to learn; leave the line out")
    if spoken[0] == 0:
        raise DataError(f"{place}: begins with the assistant; put a user message before it")
    return Chat(chat, _tools(row.get("tools"), place), place)


def _templated(messages: list[Message], row: dict[str, Any], source: DataSource, place: str) -> list[Message]:
    """Return the conversation with the data set's system message and its template of the last user message.

    ``{column}`` is another column of the row, and ``{prompt}`` what the user said. Raises DataError naming the column.
    """
    if not (source.prompt or source.system):
        return messages
    last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
    columns = {name: value for name, value in row.items() if name != "messages"}
    if last is not None:
        columns["prompt"] = messages[last]["content"]
    elif source.prompt:
        raise DataError(f"{place}: its data set has a template of the user's message, and it has no user; add one")
    changed = [*messages]
    if last is not None and source.prompt:
        changed[last] = messages[last] | {"content": fill(source.prompt, columns, place)}
    if source.system:
        own = {"role": "system", "content": fill(source.system, columns, place)}
        changed = [own, *(message for message in changed if message["role"] != "system")]
    return changed


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not file.is_file():
        raise DataError(f"data.path: no file {file}; paths are relative to the working directory")
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file}: unknown kind of file; give {' or '.join(SUFFIXES)}, with a column `messages`")
    return _lines(file) if file.suffix == ".jsonl" else _parquet(file)


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file with their line, counted from 1; blank lines are skipped."""
    with file.open("rb") as opened:
        for number, line in filled_lines(opened):
            place = f"{file}, line {number}"
            yield place, json_row(line, place)


def _parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(ParquetRows(file)):
        yield f"{file}, row {number}", row


def _tools(value: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(value, str):  # as Parquet files tend to have it
        try:
            value = msgspec.json.decode(value)
        except UNDECODABLE as error:
            raise DataError(f"{place}: tools are not JSON: {error}") from error
    if value is None:
        return []
    if not isinstance(value, list) or not all(_is_named(tool) for tool in value):
        raise DataError(f"{place}: tools are a list of JSON schemas of functions with names, got {value!r:.80}")
    return value


def _is_named(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(name := function.get("name"), str) and bool(name)
