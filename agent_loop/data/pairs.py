"""Reads preference pairs from Parquet or JSONL. Every error names the file, the row and the column."""

from itertools import takewhile
from typing import Any, NamedTuple

from rl_async.errors import DataError
from rl_async.transfer_queue.chat_messages import for_templates, is_number
from rl_async.transfer_queue.dataset import as_messages, open_rows

Message = dict[str, Any]


class Pair(NamedTuple):
    """Two conversations of which the first is better. ``margin`` may be None; ``place`` is file and row."""

    chosen: list[Message]
    rejected: list[Message]
    margin: float | None
    place: str

    @property
    def prompt(self) -> str:
        """Everything before the first answer, by which pairs of one prompt are kept together."""
        return repr(_asked(self.chosen))


def read_pairs(path: str) -> list[Pair]:
    """Read all pairs of a file. Raises DataError for the first row that is not a pair."""
    rows = open_rows(path)
    if rows.generated:
        raise DataError(f"{path}: preference pairs come from a Parquet or JSONL file")
    return [to_pair(row, f"{rows.name}, row {number}") for number, row in enumerate(rows)]


def to_pair(row: dict[str, Any], place: str) -> Pair:
    """Convert a row.

    Columns: chosen and rejected, as messages or as the assistant's text; prompt, which is put before both unless they
    begin with it, and which whole conversations do not need; margin, a number.
    """
    given = row.get("prompt")
    prompt = [] if given is None else as_messages(given, place, "prompt")
    chosen, rejected = (_conversation(row.get(column), prompt, place, column) for column in ("chosen", "rejected"))
    if _asked(chosen) != _asked(rejected):
        raise DataError(f"{place}, column rejected: answers another prompt than chosen; compare answers to one prompt")
    if chosen == rejected:
        raise DataError(f"{place}, column rejected: the same as chosen; leave the row out")
    margin = row.get("margin")
    if margin is None:
        return Pair(chosen, rejected, None, place)
    if not is_number(margin):
        raise DataError(f"{place}, column margin: needs a finite number, got {margin!r:.80}")
    return Pair(chosen, rejected, float(margin), place)


def _conversation(value: Any, prompt: list[Message], place: str, column: str) -> list[Message]:
    if isinstance(value, str) and not prompt:
        raise DataError(f"{place}, column {column}: a text needs a column prompt; or give whole conversations")
    said = as_messages(value, place, column, role="assistant")
    if prompt and said[: len(prompt)] != prompt:
        if prompt[-1]["role"] != "assistant" and said[0]["role"] in ("system", "developer", "user"):
            raise DataError(f"{place}, column {column}: does not begin with the prompt; leave column prompt out")
        said = [*prompt, *said]
    if said[-1]["role"] != "assistant":
        raise DataError(
            f"{place}, column {column}: ends with the {said[-1]['role']}, and not with an answer to compare"
        )
    return for_templates(said)


def _asked(conversation: list[Message]) -> list[Message]:
    """Return everything before the first answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", conversation))
