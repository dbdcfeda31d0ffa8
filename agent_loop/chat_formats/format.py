"""What the system needs to know about the way in which a family of models writes tool calls."""

from collections.abc import Callable
from typing import NamedTuple

BAD_CALL = "error: bad call"  # the result of a malformed call


class ParsedCall(NamedTuple):
    """One call as the model wrote it. ``arguments`` is None if the call is malformed; ``raw`` is its text."""

    name: str
    arguments: dict[str, object] | None
    raw: str


class ChatFormat(NamedTuple):
    """Reads and writes tool calls.

    ``parse`` finds all calls in an answer, in order. ``render`` writes a call of a function by name, with arguments as
    JSON text. ``call_start`` opens every call; what an answer says before the first one is its text.
    """

    parse: Callable[[str], list[ParsedCall]]
    render: Callable[[str, str], str]
    call_start: str
