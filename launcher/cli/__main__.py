"""``rl-async --version``. Imports no package whose version it tells."""

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from rl_async.configs.engines import ENGINES
from rl_async.errors import EXIT_USER, RlAsyncError, UserError
from rl_async.installation import commit, version
from rl_async.launcher.cli import run_commands, training_commands
from rl_async.launcher.cli.run_commands import add_engine_commands, add_queue_commands
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


def version_lines() -> list[str]:
    """Return a line for rl-async, with its commit if known, and one for each package here that runs depend on."""
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


EXIT_INTERRUPTED = 130
Command = Callable[[argparse.Namespace], int]

COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "launch": ("train", training_commands.add_launch),
    "sft": ("fine-tune on conversations; or make the data and model of a preset", training_commands.add_sft),
    "eval": ("what a model earns on the held-out tasks: avg@k and pass@k", training_commands.add_eval),
    "compare": (
        "two evaluations task by task, and whether they differ by more than chance",
        training_commands.add_compare,
    ),
    "model": ("import a model; what a model folder holds and needs", training_commands.add_model_commands),
    "reward-model": ("train a reward model on preference pairs", training_commands.add_reward_model),
    "reward": ("score answers without a run", training_commands.add_reward_commands),
    "config": ("list, show and explain configs", training_commands.add_config_commands),
    "data": ("make and inspect data sets", training_commands.add_data_commands),
    "show": ("the trajectories of a step, and why each token trained as it did", run_commands.add_show),
    "view": ("a local page on runs: curves, trajectories token by token, evaluations", run_commands.add_view),
    "report": ("that page of one run as a file to send", run_commands.add_report),
    "trace": ("what each process of a run did when, as a trace for Perfetto", run_commands.add_trace),
    "replay": ("play a recorded episode again, to debug its tools and rewards", run_commands.add_replay),
    "engine": ("verify an engine; list, add and remove engines of a run", add_engine_commands),
    "queue": ("inspect a transfer queue, act on it, or serve one without a run", add_queue_commands),
    "gateway": ("let agent programs play episodes of a running run; list and end episodes", run_commands.add_gateway),
    "play": ("play episodes with an agent program as it is, and grade what it did", run_commands.add_play),
    "doctor": ("what a run waits for; without a run: what this machine lacks", run_commands.add_doctor),
    "profile": ("what a live run's ranks or processes spend their time on", run_commands.add_profile),
    "plan": ("how to split devices between trainer and engines, by simulation", run_commands.add_plan),
    "export": ("write a checkpoint of a run as a Hugging Face folder", training_commands.add_export),
    "audit": ("check that every admitted sample of a run was trained exactly once", run_commands.add_audit),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 2: a mistake of the user, 1: something failed, 130: interrupted.

    Commands with ``steady`` beside ``command`` go on however their output fares; others end with its reader.
    """
    open_missing()
    steady_errors()
    checked_output()
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    command: Command = arguments.command
    if getattr(arguments, "steady", False):
        steady_output()
    try:
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
        if error.errno not in NO_ROOM:
            raise
        _print_error(f"{error.filename or 'a file'}: {error.strerror}; make room there, and give the command again")
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        settle_output()


class PrintVersions(argparse.Action):
    """Prints the versions, and ends the program, when its option is met."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("\n".join(version_lines()))
        parser.exit()


def _print_error(text: str) -> None:
    """Print an error, in which there may be lines of a log or of a data set."""
    from rl_async.insight.terminal import printable

    print(f"error: {printable(text)}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; the reference of the command line is generated from it, too."""
    parser = argparse.ArgumentParser(prog="rl-async", description="Asynchronous reinforcement learning.")
    parser.add_argument("--version", action=PrintVersions, help="print the versions of rl-async, torch and engines")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, add_arguments) in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=summary))
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; overrides may stand between options, which argparse alone does not allow."""
    parser = make_parser()
    program: Sequence[str] = ()
    if "--" in argv and argv[0] == "play":  # argparse would take a second "--" out of the program's arguments
        end = argv.index("--")
        argv, program = argv[:end], argv[end + 1 :]
    arguments, left = parser.parse_known_args(argv)
    if program:
        arguments.program += program
    if left and not hasattr(arguments, "overrides"):
        parser.error(f"unknown arguments: {' '.join(left)}")
    for word in left:
        if word.startswith("-"):
            parser.error(f"unknown option {word}")
        arguments.overrides.append(word)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
