"""What all roles have in common at their start and end: supervision, logging, arguments and exit codes.

A role's ``__main__.py`` parses its arguments and calls ``run_role``; what imports torch stands in another module, which
is imported only then, so that ``--help`` answers at once.
"""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from rl_async.errors import EXIT_USER, RlAsyncError, UserError
from rl_async.process.lifeline import watch_lifeline
from rl_async.process.log import setup_logging
from rl_async.process.output import steady_errors, steady_output
from rl_async.process.stacks import answer_with_stacks


def role_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m rl_async.MODULE`` without arguments."""
    return argparse.ArgumentParser(prog=f"python -m rl_async.{module}", description=description)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add ``--run``, which every role of a run takes."""
    parser.add_argument("--run", type=Path, required=True, help="run folder with config.yaml")


def join_supervisor() -> None:
    """End with the supervisor and write stacks when it asks. Does nothing in a process that was started by hand."""
    watch_lifeline()
    answer_with_stacks()


def wait_policy() -> dict[str, str]:
    """The variable that says how threads of OpenMP wait for one another: asleep, unless it is set.

    They otherwise spin at every barrier, on cores that another process, or the thread they wait for, needs.
    """
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}


def run_role(name: str, work: Callable[[], None], exits: Mapping[type[RlAsyncError], int] | None = None) -> int:
    """Do the work of the role ``name`` and return its exit code: 0 at its end, EXIT_USER for a mistake of the user.

    ``exits`` has the codes of other errors that are expected, the most specific first. All may come in an
    ExceptionGroup. Any other error is a bug and propagates. Prints to a full disk raise nothing, in users'
    functions neither. OpenMP reads its variables when ``work`` imports torch, so that its threads wait in the same way
    in a role that no launcher has started.
    """
    os.environ.update(wait_policy())
    steady_errors()
    steady_output()
    join_supervisor()
    log, exits = setup_logging(name), exits or {}
    expected: tuple[type[BaseException], ...] = (*exits, BaseExceptionGroup)
    try:
        work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except expected as error:
        causes = list(_causes(error))
        if all(isinstance(cause, UserError) for cause in causes):
            print(f"error: {causes[0]}", file=sys.stderr)
            return EXIT_USER
        codes = [next((code for kind, code in exits.items() if isinstance(cause, kind)), None) for cause in causes]
        if None in codes:
            raise
        log.error("%s", "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes))
        return max(code for code in codes if code is not None)
    return 0


def end_with(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and end this process with its exit code, without the interpreter's own end.

    For roles that use torch in daemon threads: such a thread may be waiting in gloo, and one that comes back from C++
    while the interpreter ends aborts the process ("terminate called without an active exception"). Whatever must be
    finished is finished by ``main``: no ``atexit`` function runs.
    """
    try:
        code = main()
    except SystemExit as ended:  # a signal's handler, or argparse
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _causes(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error


def bind(host: str, port: int, key: str) -> socket.socket:
    """Bind a socket for an HTTP server; port 0 takes a free one. Raises UserError, naming ``key``, on failure."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"{key}: cannot listen on {host}:{port}: {error}") from error
    return listener
