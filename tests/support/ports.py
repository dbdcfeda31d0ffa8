"""Free ports, for child processes that must be told one before they bind."""

import atexit
import socket
from collections import deque

MOST_HELD = 64
HELD: deque[socket.socket] = deque()


def free_port() -> int:
    """Return a port of 127.0.0.1 on which a server that sets SO_REUSEADDR, as all of ours do, may listen.

    The kernel gives it to no other process: a socket that does not listen stays bound to it, until this process has
    asked for MOST_HELD other ports.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    if len(HELD) > MOST_HELD:
        HELD.popleft().close()
    return int(held.getsockname()[1])


@atexit.register
def release() -> None:
    """Close the sockets that hold ports."""
    while HELD:
        HELD.pop().close()
