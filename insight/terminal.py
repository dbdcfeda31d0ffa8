"""Prints text of models, tools and programs to a terminal without the escape sequences that it would obey."""

import re

from rich.console import Console

# Control characters except tab and line break, and characters that change the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with control characters spelled out, such as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(console: Console, text: str) -> None:
    """Print lines of any origin unchanged, except for their control characters."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
