"""The Python stacks of a process that somebody asks with a signal, for ``rl-async doctor``: ``RUN/stacks/NAME.txt``."""

import faulthandler
import os
import re
import signal

import msgspec

STACKS = "RL_ASYNC_STACKS"  # the file, given by the supervisor
ASK = signal.SIGUSR1
FRAME = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)')


class Frame(msgspec.Struct, frozen=True):
    """One call."""

    file: str
    line: str
    name: str


def answer_with_stacks() -> None:
    """From now on, write all threads' stacks to the supervisor's file at SIGUSR1. Does nothing when started by hand.

    faulthandler writes from the signal handler itself, so a process that is stuck in C code answers too.
    """
    path = os.environ.pop(STACKS, None)  # not for the processes that this one starts
    if path is not None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)  # open as long as the process lives
        faulthandler.register(ASK, file=descriptor, all_threads=True)


def main_thread(dump: str) -> tuple[Frame, ...]:
    """The thread that got the signal, which is the main one, in what faulthandler wrote last; innermost call first."""
    frames: list[Frame] = []
    inside = False
    for line in dump.rpartition("Current thread")[2].splitlines():
        match = FRAME.fullmatch(line)
        if match:
            inside = True
            frames.append(Frame(match["file"], match["line"], match["name"]))
        elif inside:
            break
    return tuple(frames)
