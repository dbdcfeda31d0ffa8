"""Writes the Python stack of a process on a signal, for ``rl-async doctor``: ``RUN/stacks/NAME.txt``."""

import faulthandler
import os
import re
import shutil
import signal
import sys

import msgspec

STACKS = "RL_ASYNC_STACKS"  # variable with the path of the file, set by the supervisor
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
    path = os.environ.pop(STACKS, None)  # not inherited by the processes that this one starts
    if path is not None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)  # open as long as the process lives
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
