"""Rows of any columns as tasks: a data set's templates for the system message, the prompt and the ground truth."""

import re
from typing import Any

from rl_async.configs.schema.data import DataSource
from rl_async.errors import DataError
from rl_async.extraction import extract

_PLACE = re.compile(r"\{(\w+(?:\.\w+)*)\}")  # {column} or {column.key}; other braces, such as \boxed{}, stay text


def templated(row: dict[str, Any], source: DataSource, place: str) -> dict[str, Any]:
    """Return ``row`` with the prompt and the ground truth that the data set's templates make of its columns.

    ``{prompt}`` is the text of the last user message. Raises DataError naming place and column.
    """
    changed = dict(row)
    if source.prompt or source.system:
        changed["prompt"] = _messages(row, source, place)
    truth = fill(source.ground_truth, row, place) if source.ground_truth else _truth(row)
    if source.ground_truth_extract:
        found = extract(truth, source.ground_truth_extract)
        if found is None:
            raise DataError(f"{place}: ground_truth_extract finds nothing in {truth!r:.200}")
        truth = found
    if source.ground_truth or source.ground_truth_extract:
        given = row.get("reward_model")
        changed["reward_model"] = {**(given if isinstance(given, dict) else {}), "ground_truth": truth}
    return changed


def fill(template: str, row: dict[str, Any], place: str) -> str:
    """Put columns into a template, all in one pass, so that braces in a column stay text. Raises DataError."""

    def value(match: re.Match[str]) -> str:
        found: Any = row
        for key in match[1].split("."):
            found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            raise DataError(f"{place}: the template has {match[0]}, and the row has only {', '.join(sorted(row))}")
        return found if isinstance(found, str) else str(found)

    return _PLACE.sub(value, template)


def _messages(row: dict[str, Any], source: DataSource, place: str) -> list[dict[str, Any]]:
    given = row.get("prompt")
    messages = list(given) if isinstance(given, list) else [{"role": "user", "content": given}] if given else []
    if source.prompt:
        said = str(messages[-1].get("content") or "") if messages and isinstance(messages[-1], dict) else None
        text = fill(source.prompt, row | ({} if said is None else {"prompt": said}), place)
        messages = [*messages[:-1], {"role": "user", "content": text}]
    if source.system:
        own = {"role": "system", "content": fill(source.system, row, place)}
        messages = [own, *(message for message in messages if message.get("role") != "system")]
    return messages


def _truth(row: dict[str, Any]) -> str:
    given = row.get("reward_model")
    return str(given.get("ground_truth", "")) if isinstance(given, dict) else ""
