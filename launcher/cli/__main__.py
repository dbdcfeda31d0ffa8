"""``rl-async``: parses the command line, runs one command, and turns its errors into messages and exit codes."""

import argparse
import errno
import locale
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from rl_async.configs.engines import ENGINES
from rl_async.configs.suggestions import nearest
from rl_async.errors import EXIT_USER, RlAsyncError, UserError
from rl_async.files import nearest_run
from rl_async.installation import commit, version
from rl_async.launcher.cli import run_commands, training_commands
from rl_async.process.role import (
    NO_ROOM,
    OutputFailed,
    ReaderGone,
    checked_output,
    discard_output,
    open_missing,
    settle_output,
    steady_errors,
    steady_output,
)

EXIT_INTERRUPTED = 130
# The system does not let a file be used by that name, or this process use more of them.
REFUSED = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE)
Command = Callable[[argparse.Namespace], int]

COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "launch": ("Train a model", training_commands.add_launch),
    "sft": ("Fine-tune on conversations, or make the data and model of a preset", training_commands.add_sft),
    "dpo": ("Train a model to prefer the better of two answers (DPO)", training_commands.add_dpo),
    "eval": ("Evaluate a model on held-out tasks: avg@k and pass@k", training_commands.add_eval),
    "compare": (
        "Compare two evaluations task by task, and test whether they differ by more than chance",
        training_commands.add_compare,
    ),
    "model": ("Import a model, or describe a model folder", training_commands.add_model_commands),
    "reward-model": ("Train a reward model on preference pairs", training_commands.add_reward_model),
    "reward": ("Score answers without a run", training_commands.add_reward_commands),
    "config": ("List, show, explain and import configs", training_commands.add_config_commands),
    "data": ("Make, inspect and convert data sets", training_commands.add_data_commands),
    "show": ("Show the trajectories of a step, and why each token trained as it did", run_commands.add_show),
    "chat": ("Talk to a run's current weights or to a model, with its tools", run_commands.add_chat),
    "view": ("Serve a local page on runs: curves, trajectories token by token, evaluations", run_commands.add_view),
    "report": ("Write that page of one run into a file to send", run_commands.add_report),
    "trace": ("Write a trace for Perfetto of the processes of a run", run_commands.add_trace),
    "replay": ("Play a recorded episode again, to debug its tools and rewards", run_commands.add_replay),
    "engine": ("Verify an engine, or list, add and remove engines of a run", run_commands.add_engine_commands),
    "queue": ("Inspect a transfer queue, act on it, or serve one without a run", run_commands.add_queue_commands),
    "gateway": ("Let agent programs play episodes of a running run; list and end episodes", run_commands.add_gateway),
    "play": ("Play episodes with an agent program as it is, and grade the results", run_commands.add_play),
    "doctor": ("Diagnose a stuck run or this machine", run_commands.add_doctor),
    "profile": ("Profile the ranks or processes of a live run", run_commands.add_profile),
    "plan": ("Simulate how to split devices between trainer and engines", run_commands.add_plan),
    "export": ("Write a checkpoint of a run as a Hugging Face folder", training_commands.add_export),
    "audit": ("Check that every admitted sample of a run was trained exactly once", run_commands.add_audit),
    "docs": ("Print a page of the documentation of this version, or list them", run_commands.add_docs),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code: 2 for a mistake of the user, 1 for a failure, 130 if interrupted.

    Commands that set ``steady`` go on when their output cannot be written; others end with its reader. In a locale with
    another encoding than UTF-8, which the files of a run have, the program starts again in Python's UTF-8 mode, which
    the processes of a run inherit.
    """
    if argv is None and locale.getpreferredencoding(False).lower() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    open_missing()
    steady_errors()
    checked_output()
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    command: Command = arguments.command
    try:
        os.getcwd()
    except FileNotFoundError:
        _print_error("the working directory has been removed; change to one that is there")
        return EXIT_USER
    if getattr(arguments, "steady", False):
        steady_output()
    try:
        _check_run(getattr(arguments, "run", None))
        code = command(arguments)
        sys.stdout.flush()
        return code
    except ReaderGone:
        discard_output()
        return 0
    except OutputFailed as error:
        discard_output()
        _print_error(str(error))
        return 1
    except UserError as error:
        _print_error(str(error))
        return EXIT_USER
    except RlAsyncError as error:
        _print_error(f"{type(error).__name__}: {error}")
        return 1
    except OSError as error:
        if error.errno not in (*NO_ROOM, *REFUSED):
            raise
        way_out = "; make room there, and give the command again" if error.errno in NO_ROOM else ""
        _print_error(f"{error.filename or 'a file'!s:.200}: {error.strerror}{way_out}")
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        settle_output()


def _check_run(run: object) -> None:
    """Raise UserError for a run folder that does not exist, naming the nearest one beside it."""
    if isinstance(run, Path) and not run.exists():
        raise UserError(f"no run folder {run}; {nearest_run(run) or 'name one as runs/NAME'}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. Unlike with argparse alone, overrides may stand between options."""
    parser = make_parser()
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(EXIT_USER)
    program: Sequence[str] = ()
    # argparse would remove a second "--" from the program's arguments.
    if "--" in argv and argv[0] == "play":
        end = argv.index("--")
        argv, program = argv[:end], argv[end + 1 :]
    arguments, left = parser.parse_known_args(argv)
    if program:
        arguments.program += program
    chosen: Parser = arguments.parser
    for word in left:
        if word.startswith("-"):
            chosen.error(chosen.unknown(word))
        if not hasattr(arguments, "overrides"):
            chosen.error(f"unknown argument {word}")
        arguments.overrides.append(word)
    return arguments


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, from which the reference of the command line is also generated."""
    parser = Parser(
        prog="rl-async",
        description="Asynchronous reinforcement learning.",
        epilog="Messages name pages such as docs/how-to/memory.md: `rl-async docs PAGE` prints them.",
    )
    parser.add_argument("--version", action=PrintVersions, help="print the versions of rl-async, torch and engines")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=summary))
    return parser


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest command or option; ``arguments.parser`` is that of the chosen command."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.set_defaults(parser=self)
        self._given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = [*args] if args is not None else ()
        return super().parse_known_args(args, namespace)

    def unknown(self, option: str) -> str:
        """Return the complaint about an unknown option."""
        known = re.findall(r"--[\w-]+", self.format_help())
        return f"unknown option {option}{nearest(option.partition('=')[0], sorted({*known}))}"

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            given, known = wrong[1], re.findall(r"[\w-]+", wrong[2])
            message = message.replace(wrong[0], f"{given!r} is unknown{nearest(given, known)}")
        elif message.startswith("the following arguments are required"):
            # A misspelt option is the reason why the right one is missing.
            options = [word for word in self._given if word.startswith("--") and word != "--"]
            names = self._option_string_actions
            strange = (word for word in options if not any(name.startswith(word.partition("=")[0]) for name in names))
            message = next(map(self.unknown, strange), message)
        super().error(message)


class PrintVersions(argparse.Action):
    """Prints the versions and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("\n".join(version_lines()))
        parser.exit()


def version_lines() -> list[str]:
    """Return a line for rl-async, with its commit if known, and one for each installed package that runs depend on.

    Versions are read from metadata, since importing torch takes seconds.
    """
    made_from = commit()
    lines = [f"rl-async {version()}" + (f" (commit {made_from})" if made_from else "")]
    lines.append(f"python {platform.python_version()}")
    engines = [name for traits in ENGINES.values() if traits.package for name in (traits.package, *traits.builds)]
    for name in ("torch", "transformers", *engines):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return lines


def _print_error(text: str) -> None:
    """Print an error without its control characters, since it may quote a log or a data set."""
    from rl_async.process.role import printable

    print(f"error: {printable(text)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
