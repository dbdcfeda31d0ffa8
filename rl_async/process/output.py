"""Standard output and error of a process whose work must go on, however their reader fares.

A reader may end before the process does (``| head``, or ``| tee`` at a Ctrl-C, which reaches both), vanish with its
terminal, stop reading (a pager, Ctrl-S), or be a file on a full disk. A plain stream then raises, or blocks, wherever
something is printed: in a signal's handler, in a user's reward function, in the event loop of a supervisor.
"""

import errno
import io
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rl_async.errors import RlAsyncError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD = (0, 1, 2)
PIECE = select.PIPE_BUF  # a pipe that poll(2) calls writable takes as many bytes without blocking
KEPT_BYTES = 1 << 18
LAST_S = 5.0  # for a slow reader, at the end
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class OutputFailed(RlAsyncError):
    """Standard output cannot be written; names the cause."""


class ReaderGone(OutputFailed):
    """The reader of standard output, such as ``head``, has closed the pipe."""


class SteadyOutput(io.RawIOBase):
    """Writes to a descriptor without ever raising or blocking.

    Text that cannot be written yet is kept and tried again with the next write. Beyond KEPT_BYTES the oldest is left
    out, and a line says so. Once the reader is gone, everything is discarded. ``owned``: closing it closes the
    descriptor.
    """

    def __init__(self, descriptor: int, *, owned: bool = False) -> None:
        super().__init__()
        self._descriptor, self._owned = descriptor, owned
        self._kept = bytearray()
        self._left_out = 0
        self._gone = False
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

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
        if not self._gone:
            self._kept += given
            self._pass_on(0.0)
            if (excess := len(self._kept) - KEPT_BYTES) > 0:
                end = self._kept.find(b"\n", excess) + 1 or len(self._kept)
                self._left_out += end
                del self._kept[:end]
        return len(given)

    def close(self) -> None:
        """Take nothing more, and close a descriptor that is owned."""
        if not self.closed and self._owned:
            os.close(self._descriptor)
        super().close()

    def settle(self, seconds: float = LAST_S) -> None:
        """Write what is kept, waiting for a slow reader as long as it takes something every ``seconds``."""
        self._pass_on(seconds)

    def _pass_on(self, seconds: float) -> None:
        """Write until nothing is kept, or until the reader took nothing for ``seconds``."""
        waited = time.monotonic()
        while self._kept and not self._gone and self._poll.poll(1000 * seconds):
            if self._left_out:
                told = b"\n... %d bytes are left out here, which nobody read in time\n" % self._left_out
                self._kept[:0], self._left_out = told, 0
            try:
                del self._kept[: os.write(self._descriptor, self._kept[:PIECE])]
                waited = time.monotonic()
            except BlockingIOError:
                if time.monotonic() - waited >= seconds:
                    return
                time.sleep(0.01)
            except OSError as error:
                if error.errno in NO_ROOM:
                    return
                self._gone = True
                self._kept.clear()


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
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


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
