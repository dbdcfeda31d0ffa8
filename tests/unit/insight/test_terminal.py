"""Text of any origin does not steer the terminal."""

import io

from rich.console import Console

from rl_async.insight.terminal import say


def test_a_line_is_printed_as_it_is_but_for_control_characters() -> None:
    output = io.StringIO()
    say(Console(file=output, force_terminal=True, width=20), "[bold] 12 \x1b[2J\x9b1m and a line longer than that")
    assert output.getvalue() == "[bold] 12 \\x1b[2J\\x9b1m and a line longer than that\n"
