"""How models write tool calls and reasoning in a text."""

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


NO_CALLS = CallSyntax(lambda _: [], lambda name, arguments: f"{name}({arguments})", "")

THINK_START, THINK_END = "<think>", "</think>"


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """Split what was sampled into (reasoning, the rest). ``opened``: the prompt ends with ``<think>``.

    Reasoning that never ends is all there is: what looks like a call inside it is none.
    """
    begun = text.lstrip().startswith(THINK_START)
    if not (opened or begun):
        return "", text
    body = text.lstrip().removeprefix(THINK_START) if begun else text
    reasoning, _, rest = body.partition(THINK_END)
    return reasoning.strip(), rest.lstrip("\n")
