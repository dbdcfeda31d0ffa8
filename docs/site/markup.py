"""Parts of generated Markdown."""

import re
from collections.abc import Iterable, Sequence

_OUTSIDE_CODE = re.compile(r"(`[^`]*`)|\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a cell's bars outside code and its line breaks are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def code(value: str) -> str:
    """Return inline code, or nothing for an empty value."""
    return f"`{value}`" if value else ""


def _cell(text: str) -> str:
    return _OUTSIDE_CODE.sub(lambda match: match[1] or "\\|", text).replace("\n", " ")
