"""The start and end of every process of a run: arguments, exit codes, logging, output, signals and supervision.

A role's ``__main__.py`` parses its arguments and calls ``run_role``; code that imports torch is in another module,
imported only then, so that ``--help`` answers at once. A role ends with its supervisor, by a pipe whose write end
only the supervisor holds, and writes its Python stack on a signal. Standard output and error are steady: a reader may
end before the process does, vanish with its terminal, stop reading, or be a file on a full disk, and any ``print`` to
a plain stream would then raise or block. Text of models, tools and programs is shown without the escape sequences that
a terminal would obey.
"""

import argparse
import errno
import faulthandler
import io
import logging
import os
import re
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

import msgspec

from rl_async.errors import EXIT_USER, RlAsyncError, UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console


def own_module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of ``rl_async.NAME``.

    ``-P`` keeps the working directory out of the search for modules: a user's ``random.py`` or ``queue.py`` there would
    else be imported in place of the standard library's. Users' code finds its neighbours by ``userload``.
    """
    return (sys.executable, "-P", "-m", f"rl_async.{name}", *arguments)


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return those of the signals that this process was not started to ignore."""
    return [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, _nothing)]


def ignore_alone(*numbers: signal.Signals) -> None:
    """Keep ignoring signals that this process was started to ignore, but let its children start without that.

    A supervisor ends its children by SIGTERM. They inherit ignored signals, but get the default for handled ones.
    """
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    pass


LIFELINE_FD = "RL_ASYNC_LIFELINE_FD"


def watch_lifeline() -> None:
    """Exit this process, and those it started, when the supervisor is gone. Does nothing if it was started by hand.

    The supervisor passes the read end of a pipe and keeps the write end, which the kernel closes however it dies.
    """

    def leave() -> None:
        print("the supervisor is gone; exiting", file=sys.stderr, flush=True)
        # The supervisor gives each of its children a group of its own.
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    _when_closed(LIFELINE_FD, leave)


STARTER_FD = "RL_ASYNC_STARTER_FD"


def stop_with_starter() -> None:
    """Ask this process to end, as SIGTERM does, once the program that started it has ended; nothing without one.

    The program passes the read end of a pipe and keeps the write end, as the supervisor does.
    """

    def stop() -> None:
        print("the program that started the run has ended; stopping", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    _when_closed(STARTER_FD, stop)


def _when_closed(variable: str, act: Callable[[], None]) -> None:
    """Call ``act`` in a thread once the pipe closes whose read end ``variable`` names; never without the variable."""
    fd = os.environ.pop(variable, None)
    if fd is None:
        return

    def watch(read_end: int) -> None:
        # Blocks until the write end closes.
        os.read(read_end, 1)
        act()

    threading.Thread(target=watch, args=(int(fd),), name=variable, daemon=True).start()


def setup_logging(role: str) -> logging.Logger:
    """Log to standard error as ``time role level message`` and return the role's logger."""
    line = f"%(asctime)s {role} %(levelname)s %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=line, datefmt="%H:%M:%S")
    for noisy in ("httpx", "urllib3", "filelock", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(f"rl_async.{role}")


# Environment variable with the path of the file, set by the supervisor.
STACKS = "RL_ASYNC_STACKS"
ASK = signal.SIGUSR1
FRAME = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)')


class Frame(msgspec.Struct, frozen=True):
    """One call of a Python stack."""

    file: str
    line: str
    name: str


def answer_with_stacks() -> None:
    """Write the main thread's stack to the supervisor's file on each SIGUSR1. Does nothing if it was started by hand.

    faulthandler writes from the signal handler itself, so it works in a process that is stuck in C code too. It would
    read other threads' frames while they run, and so ends a busy process with SIGSEGV now and then.
    """
    # The processes that this one starts do not inherit it.
    path = os.environ.pop(STACKS, None)
    if path is not None:
        # Open as long as the process lives.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        faulthandler.register(ASK, file=descriptor, all_threads=False)


def main_thread(dump: str) -> tuple[Frame, ...]:
    """Parse the stack of the main thread, which got the signal, from faulthandler's last dump; innermost call first."""
    frames: list[Frame] = []
    inside = False
    for line in dump.rpartition("(most recent call first)")[2].splitlines():
        match = FRAME.fullmatch(line)
        if match:
            inside = True
            frames.append(Frame(match["file"], match["line"], match["name"]))
        elif inside:
            break
    return tuple(frames)


def py_spy() -> str | None:
    """Return the path of py-spy, which reads another process's stacks: of this Python's environment, or of PATH.

    An environment whose Python was named by its path has its programs beside it, and need not be on PATH.
    """
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")


STANDARD = (0, 1, 2)
# A pipe that poll(2) calls writable takes so many bytes without blocking.
PIECE = select.PIPE_BUF
KEPT_BYTES = 1 << 18
# For a slow reader, at the end.
LAST_S = 5.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class OutputFailed(RlAsyncError):
    """Standard output cannot be written; names the cause."""


class ReaderGone(OutputFailed):
    """The reader of standard output, such as ``head``, has closed the pipe."""


class SteadyOutput(io.RawIOBase):
    """Writes to a descriptor without ever raising or blocking, in any thread and in signal handlers.

    Text that cannot be written yet is kept and tried again with the next write. Beyond KEPT_BYTES the oldest is left
    out, and a line says so. Once the reader is gone, everything is discarded. ``owned``: closing it closes the
    descriptor.
    """

    def __init__(self, descriptor: int, *, owned: bool = False) -> None:
        super().__init__()
        self._descriptor, self._owned = descriptor, owned
        self._writes_to = _unblocked(descriptor)
        self._kept = bytearray()
        self._left_out = 0
        self._gone = False
        # Reentrant, since a signal handler may print while its own thread is writing; then it only leaves its text.
        self._lock, self._passing = threading.RLock(), False
        self._poll = select.poll()
        self._poll.register(self._writes_to, select.POLLOUT)

    def writable(self) -> bool:
        """Return True, as a text layer asks."""
        return True

    def fileno(self) -> int:
        """Return the descriptor that is written to, as `io` asks for it."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, data: "ReadableBuffer", /) -> int:
        """Take all of ``data``, and write as much as its reader takes at once."""
        given = bytes(data)
        with self._lock:
            if self._gone:
                return len(given)
            self._kept += given
            if self._passing:
                return len(given)
            self._pass_on()
            if (excess := len(self._kept) - KEPT_BYTES) > 0:
                end = self._kept.find(b"\n", excess) + 1 or len(self._kept)
                self._left_out += end
                del self._kept[:end]
        return len(given)

    def close(self) -> None:
        """Take nothing more, and close a descriptor that is owned."""
        if not self.closed:
            if self._writes_to != self._descriptor:
                os.close(self._writes_to)
            if self._owned:
                os.close(self._descriptor)
        super().close()

    def settle(self, seconds: float = LAST_S) -> None:
        """Write what is kept, waiting for a slow reader as long as it takes something every ``seconds``."""
        taken = time.monotonic()
        while True:
            with self._lock:
                before = len(self._kept)
                waits = self._pass_on()
                taken = time.monotonic() if len(self._kept) < before else taken
            if not waits or time.monotonic() - taken >= seconds:
                return
            # Not within the lock, so that others can write meanwhile.
            time.sleep(0.01)

    def _pass_on(self) -> bool:
        """Write as much as the reader takes at once; return whether it may take the rest later."""
        self._passing = True
        try:
            while self._kept and not self._gone:
                if not self._poll.poll(0):
                    return True
                if self._left_out:
                    told = b"\n... %d bytes are left out here, which nobody read in time\n" % self._left_out
                    self._kept[:0], self._left_out = told, 0
                try:
                    del self._kept[: os.write(self._writes_to, self._kept[:PIECE])]
                except BlockingIOError:
                    return True
                except OSError as error:
                    if error.errno in NO_ROOM:
                        return False
                    self._gone = True
                    self._kept.clear()
            return False
        finally:
            self._passing = False


def _unblocked(descriptor: int) -> int:
    """Return a descriptor of the same terminal whose writes never block; ``descriptor`` if it is none.

    A pipe with room takes a whole piece. A terminal that nobody reads says that it has room, and blocks a write of more
    bytes than that. It is opened again, since the flag for this belongs to all processes that share an open file.
    """
    try:
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return descriptor


class CheckedOutput(io.FileIO):
    """Writes to standard output, and raises OutputFailed or ReaderGone in place of an OSError."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write ``data``, waiting for its reader."""
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderGone("standard output: its reader is gone") from error
        except OSError as error:
            raise OutputFailed(f"standard output cannot be written: {error.strerror}") from error


def open_missing() -> None:
    """Open ``/dev/null`` as each standard stream that is closed, so that no other file gets its number."""
    for descriptor in STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            # open takes the lowest free number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def steady_errors() -> None:
    """Make standard error steady, unless something else has replaced it."""
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(SteadyOutput(2))


def steady_output() -> None:
    """Make standard output steady, unless something other than ``checked_output`` has replaced it."""
    binary = getattr(sys.stdout, "buffer", None)
    if sys.stdout is sys.__stdout__ or isinstance(getattr(binary, "raw", None), CheckedOutput):
        sys.stdout = _text(SteadyOutput(1))


def checked_output() -> None:
    """Let a failure of standard output be told from other errors, unless something else has replaced it."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(io.BufferedWriter(CheckedOutput(1, "wb", closefd=False)), lines=os.isatty(1))


def steady_file(path: Path) -> TextIO:
    """Open a file to append lines to, which are lost where the disk is full. Raises OSError if it cannot be opened."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    return _text(SteadyOutput(descriptor, owned=True))


def settle_output() -> None:
    """Write what steady streams keep. Call it at the end of a process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(raw := getattr(stream, "buffer", None), SteadyOutput):
            stream.flush()
            raw.settle()


def discard_output() -> None:
    """Send to ``/dev/null`` what standard output still holds and will get."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _text(binary: io.RawIOBase | io.BufferedWriter, lines: bool = True) -> TextIO:
    """Return a text stream for ``binary``. Characters that its encoding lacks are written as escape sequences."""
    encoding = next((stream.encoding for stream in (sys.__stdout__, sys.__stderr__) if stream is not None), "utf-8")
    return io.TextIOWrapper(binary, encoding, "backslashreplace", line_buffering=lines)  # type: ignore[type-var]


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
    # A signal's handler, or argparse, may raise it.
    except SystemExit as ended:
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


# Control characters except tab and line break, and characters that change the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return the text with control characters spelled out, such as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def say(console: "Console", text: str) -> None:
    """Print lines of any origin unchanged, except for their control characters."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
