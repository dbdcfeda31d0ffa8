"""Text for terminals as plain text, which a model can read."""

import re

_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, movements of the cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # strings for devices
    r"|\x1b[ -/]*[0-~]?"
)
_HIGHLIGHT = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:4[0-7]|10[0-7])(?:;[0-9;]*)?m([^\x1b\n]+)\x1b\[(?:0|49)?m")


def without_escapes(text: str) -> str:
    """Remove ANSI escapes. A text on a coloured background, such as the place where one is, is put in brackets."""
    if "\x1b" not in text and "\x9b" not in text and "\x9d" not in text:
        return text
    return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", text))
