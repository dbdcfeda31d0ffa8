"""Forwards TCP connections, late, not at all for a while, or cut off: a network between two roles that needs no
namespaces."""

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

PIECE = 1 << 16
LATE_S = (0.05, 1.0)
CUT_S = 0.5


class Proxy:
    """Listens on ``host`` until it is closed; ``target`` returns the address of each new connection's other end."""

    def __init__(self, host: str, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        # Seconds by which each piece is late.
        self.late_s = 0.0
        self._open = threading.Event()
        self._open.set()
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def strike(self, kind: str, seconds: float, rng: random.Random) -> bool:
        """Be slow for that long: ``late`` delays each piece, ``hold`` all of them, ``cut`` ends connections.

        Return False at once if there is no connection now.
        """
        if not self._connections:
            return False
        end = time.monotonic() + seconds
        if kind == "late":
            self.late_s = rng.uniform(*LATE_S)
        elif kind == "hold":
            self._open.clear()
        while time.monotonic() < end:
            if kind == "cut":
                self.cut()
            time.sleep(min(CUT_S, max(0.0, end - time.monotonic())))
        self.late_s = 0.0
        self._open.set()
        return True

    def cut(self) -> None:
        """End all connections, in whatever they are."""
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and end all connections."""
        # A thread that waits in accept() would keep the port.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target())
        except OSError:
            # The other end does not listen now, and the client learns of it by this.
            near.close()
            return
        ends = {near, far}
        self._connections |= ends
        back = threading.Thread(target=self._forward, args=(far, near), daemon=True)
        back.start()
        self._forward(near, far)
        back.join()
        self._connections -= ends
        for end in ends:
            end.close()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while piece := one.recv(PIECE):
                time.sleep(self.late_s)
                self._open.wait()
                other.sendall(piece)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
