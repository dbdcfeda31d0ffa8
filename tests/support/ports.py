"""Hold free ports for child processes, and find where processes listen."""

import atexit
import ipaddress
import os
import socket
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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


LISTEN = "0A"


def listeners(pids: Iterable[int]) -> dict[str, int]:
    """The addresses on which the processes listen, ``HOST:PORT``, each with the pid that does."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            sockets = _sockets(pid)
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == LISTEN and fields[9] in sockets:
                        found[_address(fields[1])] = pid
    return found


def _sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return inodes


def _address(text: str) -> str:
    """``0100007F:1F90`` is 127.0.0.1:8080: words of 32 bits, in this machine's byte order."""
    host, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    return f"{ipaddress.ip_address(packed)}:{int(port, 16)}"
