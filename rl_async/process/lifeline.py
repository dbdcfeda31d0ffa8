"""Ends a child process with its supervisor: it watches a pipe whose write end only the supervisor holds."""

import os
import signal
import sys
import threading

LIFELINE_FD = "RL_ASYNC_LIFELINE_FD"


def watch_lifeline() -> None:
    """Exit this process, and those it started, when the supervisor is gone. Does nothing if it was started by hand.

    The supervisor passes the read end of a pipe and keeps the write end, which the kernel closes however it dies.
    """
    fd = os.environ.pop(LIFELINE_FD, None)
    if fd is None:
        return

    def watch(read_end: int) -> None:
        os.read(read_end, 1)  # blocks until the write end closes
        print("the supervisor is gone; exiting", file=sys.stderr, flush=True)
        if os.getpgrp() == os.getpid():  # the supervisor gives each of its children a group of its own
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, args=(int(fd),), name="lifeline", daemon=True).start()
