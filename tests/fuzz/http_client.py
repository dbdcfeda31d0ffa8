"""Sends attacks over real sockets and judges the answers."""

import contextlib
import http.client
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzz.http_requests import HEALTH, Attack

SETTLE_S = 0.1  # without an answer for this long, those that are missing may wait for a paused engine
ANSWER_S = 60.0
MOST = 4 << 20  # bytes of an answer


class Connection:
    """One attack on its way."""

    def __init__(self, attack: Attack, port: int) -> None:
        self.attack, self.received, self.ended = attack, bytearray(), False
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        with contextlib.suppress(OSError):  # a server may close before it has read everything
            for part in attack.parts:
                self._socket.sendall(part)
        if attack.abrupt:  # a reset: nothing that comes is read
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close()
        elif attack.cut and not attack.held:
            self.end()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> None:
        """Take what has come."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        self.received += data
        assert len(self.received) < MOST, "an answer without end"
        self.ended = not data or self._complete()

    def _complete(self) -> bool:
        """Whether a whole answer has come; the connection may stay open for the next one."""
        head, found, body = bytes(self.received).partition(b"\r\n\r\n")
        if not found or head.startswith(b"HTTP/1.1 100"):
            return False
        if self.attack.method == "HEAD":
            return True
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return len(body) >= int(line.split(b":")[1])
        return b"chunked" in head.lower() and body.endswith(b"0\r\n\r\n")

    def end(self) -> None:
        """Send no more; the server sees that."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        self.ended = True


def send(attacks: Sequence[Attack], port: int, release: Callable[[], None]) -> list[tuple[Attack, bytes]]:
    """Send all, and return what each was answered with. ``release`` makes the server answer whatever it holds back."""
    connections = [Connection(attack, port) for attack in attacks]
    try:
        awaited = [connection for connection in connections if not connection.attack.held]
        _read(awaited, SETTLE_S)
        release()
        for connection in awaited:
            if not connection.ended and not connection.attack.whole:
                connection.end()
        _read(awaited, ANSWER_S)
        for connection in awaited:
            assert connection.ended, f"no answer within {ANSWER_S:g} s to {shown(connection.attack)}"
    finally:
        for connection in connections:
            connection.close()
    return [(connection.attack, bytes(connection.received)) for connection in connections]


def _read(connections: Sequence[Connection], quiet_s: float) -> None:
    """Read until all have ended, or nothing came for ``quiet_s``."""
    while waiting := [connection for connection in connections if not connection.ended]:
        ready, _, _ = select.select(waiting, [], [], quiet_s)
        if not ready:
            return
        for connection in ready:
            connection.read()


def judge(attack: Attack, answer: bytes, secrets: Sequence[str]) -> int:
    """Check an answer; return its status, 0 if there was none."""
    where = f"{shown(attack)} -> {answer[:600]!r}"
    assert not any(secret.encode() in answer for secret in secrets), f"a secret is echoed: {where}"
    assert b"Traceback" not in answer, where
    while answer.startswith(b"HTTP/1.1 100"):
        answer = answer.partition(b"\r\n\r\n")[2]
    if not answer:
        assert attack.abrupt or not attack.whole, f"no answer: {where}"
        return 0
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    headers = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
    assert status < 500 or (status == 503 and attack.authorised), where
    if not attack.authorised:
        asked = attack.parts[0].split(b" ")
        probe = asked[0] in (b"GET", b"HEAD") and HEALTH.encode() in asked[1] if len(asked) > 1 else False
        assert status >= 400 or probe, f"a stranger was served: {where}"
    if status >= 400 and attack.method != "HEAD":
        size = int(headers.get(b"content-length", b"0"))
        try:
            error = json.loads(body[:size])
        except ValueError:
            raise AssertionError(f"an error that is not JSON: {where}") from None
        if status == 503 and error.keys() == {"finished"}:  # no episode now
            return status
        assert isinstance(error["error"]["message"], str), where
        assert isinstance(error["error"]["type"], str), where
        assert error.get("type") == "error" or not attack.anthropic, where
    return status


def shown(attack: Attack) -> str:
    """An attack for a person."""
    sent = b"".join(attack.parts)
    return f"{sent[:1500]!r}{'...' if len(sent) > 1500 else ''}"


def ask(port: int, token: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """A valid request: the status and the decoded answer. A server that is too busy to accept gets a little time."""
    until = time.monotonic() + ANSWER_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Authorization": f"Bearer {token}", **headers})
            response = connection.getresponse()
            raw = response.read()
            kind = response.headers.get("Content-Type", "")
            return response.status, json.loads(raw) if "json" in kind else raw.decode()
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        finally:
            connection.close()
