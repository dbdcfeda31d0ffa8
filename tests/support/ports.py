"""A free port, for a child process that must be told one before it binds."""

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
