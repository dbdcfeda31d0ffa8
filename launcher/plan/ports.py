"""Assigns ports to the processes of a run: configured ones are checked, for the others free ones are chosen."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rl_async.errors import ConfigError

HOST = "127.0.0.1"


@dataclass(frozen=True)
class PortWish:
    """A port that a process needs. ``port`` 0 means any free one; ``key`` is the config key that sets it."""

    name: str
    port: int = 0
    key: str = ""


def assign_ports(wishes: Sequence[PortWish]) -> dict[str, int]:
    """Assign a port to every wish, by name.

    Raises ConfigError naming the key if a configured port is taken or configured twice. All sockets are held open
    until every port is known, so that no port is assigned twice.
    """
    ports: dict[str, int] = {}
    with ExitStack() as held:
        for wish in sorted(wishes, key=lambda wish: wish.port == 0):  # configured ones first
            listener = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
            try:
                listener.bind((HOST, wish.port))
                listener.listen(1)
            except (OSError, OverflowError) as error:
                place = f"{wish.key}: " if wish.key else ""
                raise ConfigError(
                    f"{place}port {wish.port} for {wish.name} cannot be used ({error}); choose another one, or 0 for "
                    "a free one"
                ) from error
            ports[wish.name] = listener.getsockname()[1]
    return ports


def hold_ports(host: str, wishes: Sequence[PortWish]) -> list[socket.socket]:
    """Bind one socket per wish to its port of ``host``, without listening.

    As long as it is open the kernel gives the port to no other process, while a server that sets SO_REUSEADDR, as all
    of ours do, may listen on it. Raises ConfigError naming the key if a configured port is taken.
    """
    held: list[socket.socket] = []
    for wish in wishes:
        held.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held[-1].bind((host, wish.port))
        except (OSError, OverflowError) as error:
            for other in held:
                other.close()
            place = f"{wish.key}: " if wish.key else ""
            raise ConfigError(f"{place}port {wish.port} for {wish.name} cannot be used on {host} ({error})") from error
    return held
