"""How models write tool calls in a text."""

from collections.abc import Callable
from typing import NamedTuple

from rl_async.agent_loop.chat_formats.format import ParsedCall


class CallSyntax(NamedTuple):
    """Reads and writes tool calls.

    ``parse`` finds all calls in an answer, in order. ``render`` writes a call of a function by name, with arguments as
    JSON text. ``call_start`` opens every call; what an answer says before the first one is its content.
    """

    parse: Callable[[str], list[ParsedCall]]
    render: Callable[[str, str], str]
    call_start: str
