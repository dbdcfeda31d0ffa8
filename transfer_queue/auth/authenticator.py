"""Authentication of clients: libzmq asks, on the queue's own thread, before a client may send (ZAP, RFC 27)."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq
from zmq.utils import z85

from rl_async.transfer_queue.auth.allow_list import AllowList
from rl_async.transfer_queue.auth.keys import ServerKeys

_ADDRESS = "inproc://zeromq.zap.01"
_DOMAIN = b"transfer-queue"


class Authenticator:
    """Answers libzmq's questions from the allow-list, and calls ``deny`` for each refused client.

    Make it before the ROUTER binds, and close it after that.
    """

    def __init__(self, context: "zmq.Context[Any]", allowed: AllowList, deny: Callable[[], None]) -> None:
        self._allowed, self._deny = allowed, deny
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close(0)

    def answer(self) -> None:
        """Answer all pending questions."""
        while self.socket.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
            self._allowed.refresh()
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            if key in self._allowed.roles:
                reply = [b"200", b"OK", key, b""]
            else:
                self._deny()
                reply = [b"400", b"this key is not allowed", b"", b""]
            self.socket.send_multipart([version, request, *reply])


def lock(socket: Any, keys: ServerKeys) -> None:
    """Make a ROUTER refuse everybody whom no ``Authenticator`` lets in, before it binds."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.zap_domain = _DOMAIN
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an authenticator, every client is refused
