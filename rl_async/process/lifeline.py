"""A child process that must not outlive its supervisor watches a pipe which only the supervisor holds open."""

import os
import signal
import sys
import threading

LIFELINE_FD = "RL_ASYNC_LIFELINE_FD"


def watch_lifeline() -> None:
    """Exit this process, and those it started, at once when the supervisor is gone. Does nothing when started by hand.

    The supervisor passes the read end of a pipe and keeps the write end; the kernel closes it however it dies.
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
