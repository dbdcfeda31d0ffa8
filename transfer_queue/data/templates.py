"""Rows of any columns as tasks: a data set's templates for the system message, the prompt and the ground truth."""

import re
from typing import Any

from rl_async.configs.schema.data import DataSource
from rl_async.errors import DataError
from rl_async.extraction import extract
from rl_async.transfer_queue.data.dataset import as_messages, text_of

_NAME = r"([A-Za-z_]\w*(?:\.\w+)*)"  # column or column.key
# {{{name}}} is a value in braces, {{name}} the name in braces as text, {name} a value; other braces, \frac{1}{2}, stay
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
    messages = as_messages(given, place, "prompt") if given else []
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
