"""The reference of the command line, one page a command, from its parsers."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from markup import code, table

from rl_async.launcher.cli.__main__ import make_parser

WIDTH = 84  # of a usage line
INTRODUCTION = """# Command line

`rl-async COMMAND --help` prints what this page says. Exit codes: 0, done; 1, something failed; 2, a mistake in what was
given, named in one line; 130, interrupted. `launch` has more of them: a run that diverged or was refused by one of its
own checks never ends with 0.

"""


def write(pages: Path) -> list[str]:
    """Write the page below ``pages``; return its path."""
    parts = []
    for name, summary, parser in _commands(make_parser()):
        parts.append(_command(f"rl-async {name}", summary, parser, 2))
    (pages / "reference/command_line.md").write_text(INTRODUCTION + "\n".join(parts))
    return ["reference/command_line.md"]


def _command(path: str, summary: str, parser: argparse.ArgumentParser, level: int) -> str:
    inner = list(_commands(parser))
    said = parser.description or summary
    text = f"{'#' * level} {path}\n\n{said[:1].upper()}{said[1:].rstrip('.')}.\n\n"
    if not inner:
        parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
        text += f"```text\n{parser.format_usage().removeprefix('usage: ')}```\n\n{_arguments(parser)}\n"
    for name, summary, below in inner:
        text += _command(f"{path} {name}", summary, below, level + 1)
    return text


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Return name, one line and parser of each command below one."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield choice.dest, choice.help or "", action.choices[choice.dest]


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        shown = f"{name} {value}" if action.option_strings and action.nargs != 0 else name
        if action.choices:
            shown = f"{name} {{{','.join(map(str, action.choices))}}}"
        rows.append((code(shown), (action.help or "").replace("%%", "%")))
    return table(["argument", "meaning"], rows) if rows else ""
