"""Counts the values of JSON before it is parsed, and says what parsing loses.

A parser holds Python's lock until it is done, in a thread as well, so what a stranger sends is bounded by its values as
by its bytes: 8 MiB of empty lists take a second.
"""

import json
from decimal import Decimal
from typing import Any

PIECE = 1 << 16


class JsonValues:
    """The ``count`` of values in the pieces that were added."""

    def __init__(self) -> None:
        self.count = 0
        self._quoted = self._escaped = False

    def add(self, piece: bytes) -> None:
        """Count a piece; it may begin and end anywhere in the text."""
        if self._escaped and piece:
            piece, self._escaped = piece[1:], False
        # Backslashes stand in strings alone, and each escapes one character.
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escaped = plain.endswith(b"\\")
        parts = plain.split(b'"')
        outside = b"".join(parts[self._quoted :: 2])
        self._quoted ^= len(parts) % 2 == 0
        # Each value but the first of a container follows a comma, each first one the container's bracket.
        self.count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")

    def end_line(self) -> None:
        """Note the end of a line, which no string of JSON contains."""
        self._quoted = self._escaped = False


def has_more_values(text: bytes, most: int) -> bool:
    """Whether a JSON text has more than ``most`` values."""
    # A value takes a character at least, its comma or bracket.
    if len(text) <= most:
        return False
    values = JsonValues()
    for place in range(0, len(text), PIECE):
        values.add(text[place : place + PIECE])
        if values.count > most:
            return True
    return False


class _Lost(Exception):
    pass


def lost_when_read(text: str | bytes, *, digits: bool = True) -> str | None:
    """Say what a reader of a JSON text silently loses; None if it loses nothing.

    That is all but one value of a key that an object has twice and, with ``digits``, those of a number that no float of
    64 bits has. Raises ValueError for a text that is not JSON.
    """
    try:
        # Whole numbers are read exactly, or refused by their next reader.
        json.loads(text, object_pairs_hook=_keep_all, parse_float=_keep_digits if digits else len, parse_int=len)
    except _Lost as lost:
        return str(lost)
    return None


def _keep_all(pairs: list[tuple[str, Any]]) -> None:
    if len(keys := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in keys if names.count(name) > 1)
        raise _Lost(f"has the key {twice!r:.80} twice in one object; keep one of them")


def _keep_digits(text: str) -> None:
    # Doubles are printed with 17 digits, or with as few as name them.
    if len(text) > 17 or not float(text):
        value = float(text)
        if Decimal(text) not in (Decimal(repr(value)), Decimal(f"{value:.16e}")):
            raise _Lost(f"has the number {text:.80}, which would become {value!r}; write it as text")
