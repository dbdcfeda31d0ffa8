"""Signals that a process was started to ignore, and which stay ignored: ``nohup`` does so with SIGHUP, a shell's script
with SIGINT for its jobs in the background.
"""

import signal
from types import FrameType


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
