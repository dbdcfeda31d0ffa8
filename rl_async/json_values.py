"""Counts the values of JSON before it is parsed.

A parser holds Python's lock until it is done, in a thread as well, so what a stranger sends is bounded by its values as
by its bytes: 8 MiB of empty lists take a second.
"""

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
