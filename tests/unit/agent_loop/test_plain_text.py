"""Escapes of terminals in what environments say."""

import pytest

from rl_async.agent_loop.environments.session import without_escapes


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[41mS\x1b[0mFF", "[S]FF"),
        ("\x1b[1;43mT\x1b[0m|\x1b[34;1mR\x1b[0m", "[T]|R"),
        ("\x1b[48;5;2mx\x1b[0m", "x"),
        ("\x1b[2J\x1b[Hhome\x1b[K", "home"),
        ("\x1b]0;title\x07shell", "shell"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Bascii\x1b=", "ascii"),
        ("\x1bPdevice\x1b\\text", "text"),
        ("\x9b31mred\x9bm", "red"),
        ("cut \x1b[3", "cut "),
        ("cut \x1b", "cut "),
        ("[0m is text", "[0m is text"),
    ],
)
def test_escapes_are_removed_and_nothing_else(written: str, read: str) -> None:
    assert without_escapes(written) == read
