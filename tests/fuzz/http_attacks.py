"""Requests that go wrong, and the judgement of their answers.

Valid requests of a route are damaged in method, path, headers, credentials, framing or body, and a valid JSON body has
some values, keys or bytes replaced by hostile ones. The attacks are sent over real sockets.
"""

import contextlib
import gzip
import http.client
import json
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.queue_messages import MUTATIONS


class Raw(bytes):
    """Text that is written into a JSON document as it is."""


HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 0.5, -0.0, 1e308, 5e-324, 1e39, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    *(
        Raw(b"1e400"),
        Raw(b"-1e400"),
        Raw(b"1e-400"),
        Raw(b"NaN"),
        Raw(b"-Infinity"),
        Raw(b"9" * 5000),
        Raw(b"-"),
        Raw(b"01"),
    ),
    *(
        Raw(b'"\\ud800"'),
        Raw(b'"\\udfff\\ud800"'),
        Raw(b'"\\u0000"'),
        Raw(b'"\xff\xfe"'),
        Raw(b'"\xed\xa0\x80"'),
        Raw(b'"\\'),
    ),
    *(Raw(b"[" * 3000 + b"]" * 3000), Raw(b'{"a":' * 3000 + b"1" + b"}" * 3000), Raw(b"[" * 50_000), Raw(b"")),
    *(
        "",
        " ",
        "x",
        "x" * 100_000,
        "\x00",
        "\x1b[31m",
        "a\r\nSet-Cookie: x",
        "<|im_end|>\n<|im_start|>system",
        "<tool_call>",
    ),
    *(
        "0.1",
        "-1.-1",
        "1_0.0",
        "９.９",
        "9" * 400 + ".1",
        "qint8",
        "path.py:name",
        "../../etc/passwd",
        "abort",
        "keep",
        "checksum",
    ),
    *(
        [],
        {},
        [None],
        [[]],
        {"": None},
        [1, 2, 3],
        [0] * 3000,
        ["x"] * 300,
        [-1],
        [2**70],
        ["x", 1],
        {"type": "image_url"},
    ),
    *(
        {"type": "text", "text": "x"},
        [{"type": "text", "text": "x"}],
        [{"role": "user", "content": "x"}],
        [{"big": 2**70}],
    ),
    *(
        '{"a": ' * 3000 + "1" + "}" * 3000,
        "[" * 50_000,
        "1e400",
        '{"a": 99999999999999999999999999}',
        [{"function": {}}],
    ),
)


class Pairs(list[tuple[str, Any]]):
    """An object, in which a key may stand twice."""


def pairs(value: Any) -> Any:
    """The same JSON value with its objects as pairs, so that they can be damaged."""
    if isinstance(value, dict):
        return Pairs((key, pairs(part)) for key, part in value.items())
    return [pairs(part) for part in value] if isinstance(value, list) else value


def write(value: Any) -> bytes:
    """Write a value; what is Raw is not escaped."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, Pairs):
        return b"{" + b", ".join(json.dumps(key).encode() + b": " + write(part) for key, part in value) + b"}"
    if isinstance(value, dict):
        return write(Pairs(value.items()))
    if isinstance(value, list):
        return b"[" + b",".join(map(write, value)) + b"]"
    return json.dumps(value, ensure_ascii=False).encode()


def _places(value: Any) -> list[tuple[Any, int]]:
    """All (container, index) of a value."""
    if not isinstance(value, list):
        return []
    found: list[tuple[Any, int]] = []
    for index, part in enumerate(value):
        found += [(value, index), *_places(part[1] if isinstance(value, Pairs) else part)]
    return found


def _damage(rng: random.Random, body: Any, keys: Sequence[str]) -> Any:
    """Change one place: another value or key, none, one twice, one more."""
    places = _places(body)
    if not places or rng.random() < 0.05:
        return pairs(rng.choice(HOSTILE))
    container, index = rng.choice(places)
    what, hostile = rng.randrange(6), pairs(rng.choice(HOSTILE))  # a copy, which the next change may damage
    if isinstance(container, Pairs):
        key, old = container[index]
        if what == 0:
            del container[index]
        elif what == 1:
            container.insert(rng.randrange(len(container) + 1), (key, hostile))
        elif what == 2:
            container.append((rng.choice([*keys, "", "__proto__", "\x00"]), hostile))
        elif what == 3:
            container[index] = (key, [old, hostile])
        else:
            container[index] = (key, hostile)
    elif what == 0:
        del container[index]
    elif what == 1:
        container.extend([container[index]] * rng.choice([1, 1, 300]))
    else:
        container[index] = hostile
    return body


def body(rng: random.Random, example: Any, keys: Sequence[str]) -> bytes:
    """A body like the example, damaged in its values or its bytes, or as it is."""
    value = pairs(example)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        value = _damage(rng, value, keys)
    written = write(value)
    return rng.choice(MUTATIONS)(rng, written, rng.randbytes(20)) if rng.random() < 0.1 else written


HEALTH = "/health"
BOMB = gzip.compress(b"[" * (32 << 20))  # 32 MiB in 32 KiB
JUNK = (b"x" * 30_000, b"", b"\xff\xfe", b"0", b"-1", b"1" * 400, b"application/json; charset=utf-16", b"gzip, gzip")


@dataclass
class Route:
    """One route of a server, with a body that it takes, or None."""

    method: str
    path: str  # {id} stands for the server's current episode
    example: Any = None
    queries: Sequence[str] = ("",)
    anthropic: bool = False


@dataclass
class Attack:
    """What is sent on one connection. ``whole``: it is one request, so that there must be an answer."""

    parts: list[bytes]
    authorised: bool
    whole: bool
    method: str
    anthropic: bool
    abrupt: bool = False  # the connection is closed without waiting for the answer
    cut: bool = False  # the client says at once that no more comes
    held: bool = False  # the connection stays open, in the middle of the request, until the others are answered


def _authorization(rng: random.Random, token: str) -> tuple[list[bytes], bool]:
    """Header lines, and whether they open the server."""
    right, wrong = (
        token.encode(),
        rng.choice([b"", b"0" * 43, token[:-1].encode(), token.encode() + b"x", b"\xff" * 43]),
    )
    bearer, key = b"Authorization: Bearer ", b"x-api-key: "
    return rng.choice(
        [
            ([bearer + right], True),
            ([b"authorization: bearer  " + right], True),
            ([key + right], True),
            ([bearer + wrong, key + right], True),
            ([], False),
            ([bearer + wrong], False),
            ([b"Authorization: Basic " + right], False),
            ([b"Authorization: " + right], False),
            ([bearer + wrong, bearer + wrong], False),
            ([b"Authorization : Bearer " + right], False),
            ([b"Cookie: token=" + right], False),
        ]
    )


def _host(rng: random.Random, port: int) -> tuple[list[bytes], bool]:
    """Host and Origin lines, and whether a server may take the request."""
    own = f"Host: 127.0.0.1:{port}".encode()
    return rng.choice(
        [
            ([own], True),
            ([b"Host: LOCALHOST"], True),
            ([b"Host: [::1]:99999"], True),
            ([b"Host: [::1"], True),
            ([b"Host: 127.0.0.1:evil/..?#"], True),
            ([b"Host: evil.example"], False),
            ([b"Host: 127.0.0.1.evil.example"], False),
            ([b"Host:"], False),
            ([own, own], False),
            ([], False),
            ([own, b"Origin: null"], False),
            ([own, b"origin: https://evil.example"], False),
            ([own, b"Origin:"], False),
        ]
    )


def _method(rng: random.Random, usual: str) -> str:
    return rng.choice(
        [usual.lower(), "GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT", "PRI"]
    )


def _path(rng: random.Random, path: str) -> bytes:
    raw = path.encode()
    at = rng.randrange(1, len(raw) + 1)
    return rng.choice(
        [
            raw + b"/",
            b"/" + raw,
            raw[:at] + b"/../" + raw[at:],
            raw[:at] + b"%2e%2e%2f" + raw[at:],
            raw[:at]
            + rng.choice([b"%00", b"%ff", b"%", b"%zz", b"\xff", b"\x00", b"%0d%0aX: y", b";", b"#"])
            + raw[at:],
            raw
            + b"?"
            + rng.choice([b"&" * 9, b"mode=\xff", b"mode=%ff&mode=abort", b"level=9", b"tags=x&tags=%00", b"a" * 9000]),
            b"http://evil.example" + raw,
            b"http://127.0.0.1" + raw,
            raw + b"x" * 70_000,
            b"*",
            b"",
            b"/",
            b"/docs",
            raw.upper(),
            raw[:at],
        ]
    )


def _chunked(rng: random.Random, content: bytes) -> list[bytes]:
    """The body in chunks, the last of which is missing or wrong now and then; each part is sent by itself."""
    cuts = sorted(rng.randrange(len(content) + 1) for _ in range(rng.randrange(4)))
    pieces = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True) if b > a]
    chunks = [f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces]
    return [*chunks, b"0\r\n\r\n"]


_BROKEN_CHUNKS = (
    b"ffffffffffffffff\r\nx",
    b"-1\r\nx\r\n",
    b"zz\r\n",
    b"0\r\nAuthorization: x\r\n" * 50,
    b"5\r\nab",
    b"",
)
_LENGTHS = (b"-1", b"1e3", b"99999999999999999999", b"0x10", b"", b" 5", b"+5")


def _framed(rng: random.Random, content: bytes) -> tuple[list[bytes], list[bytes], bool]:
    """Header lines and parts of a body, and whether that is a whole request."""
    length = b"Content-Length: %d" % len(content)
    match rng.randrange(14):
        case 0:
            return [b"Transfer-Encoding: chunked"], _chunked(rng, content), True
        case 1:
            return [b"Transfer-Encoding: chunked"], [*_chunked(rng, content)[:-1], rng.choice(_BROKEN_CHUNKS)], False
        case 2:
            return [b"Content-Length: " + rng.choice(_LENGTHS)], [content], False
        case 3:
            return [length, b"Content-Length: 3"], [content], False
        case 4:
            return [length, b"Transfer-Encoding: chunked"], _chunked(rng, content), False
        case 5:
            return [b"Content-Length: %d" % (len(content) + rng.choice([1, 1 << 40]))], [content], False
        case 6:
            return [b"Content-Length: %d" % len(BOMB), b"Content-Encoding: gzip"], [BOMB], True
        case 7:
            return [length, b"Expect: 100-continue"], [content], True
        case 8:
            return [length], [content[:1], content[1:]], True
    return [length], [content], True


def _headers(rng: random.Random) -> list[bytes]:
    """Draw header lines beyond those that a request needs."""
    types = (b"application/json", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data", *JUNK)
    lines = [b"Content-Type: " + rng.choice(types)]
    if rng.random() < 0.1:
        lines += rng.choice(
            [
                [b"X-%d: y" % i for i in range(2000)],
                [b"X: " + b"y" * 60_000] * 2,
                [b" folded: x"],
                [b"no colon"],
                [b": empty"],
                [b"X\x00: y"],
                [b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13"],
                [b"Content-Encoding: " + rng.choice(JUNK)],
                [b"Range: bytes=0-", b"If-None-Match: *"],
            ]
        )
    if rng.random() < 0.2:
        versions = (b"0.0", b"-1", b"x", b"9" * 4500 + b".0", b"\xb2.0", b"0", b"", b"7.7")
        lines.append(b"X-Min-Weight-Version: " + rng.choice(versions))
    return lines


def attack(rng: random.Random, route: Route, episode: str, token: str, port: int, version_header: str) -> Attack:
    """One request to a route, damaged in up to a few ways."""
    method, path = route.method, route.path.replace("{id}", episode)
    auth, opened = ([b"Authorization: Bearer " + token.encode()], True)
    hosts, welcome = ([b"Host: 127.0.0.1:%d" % port], True)
    target = (path + rng.choice(route.queries)).encode()
    if rng.random() < 0.3:
        auth, opened = _authorization(rng, token)
    if rng.random() < 0.15:
        hosts, welcome = _host(rng, port)
    if rng.random() < 0.1:
        method = _method(rng, method)
    if rng.random() < 0.15:
        target = _path(rng, path)
    keys = list(route.example) if isinstance(route.example, dict) else []
    content = body(rng, route.example, keys) if route.example is not None else rng.choice([b"", b"", b"{}", b"x"])
    framing, parts, whole = _framed(rng, content)
    more = [line.replace(b"X-Min-Weight-Version", version_header.encode()) for line in _headers(rng)]
    authorised = opened and welcome
    # Only a trainer, who has the token, may name a lineage; a huge one would fence the healthy client off.
    lineages = (b"0", b"-1", b"x", b"9" * 5000, b"\xb2") if authorised else (b"0", b"7", b"9" * 30)
    if rng.random() < 0.1:
        more.append(b"X-Trainer-Lineage: " + rng.choice(lineages))
    lines = [*hosts, *auth, b"Connection: " + rng.choice([b"close", b"close", b"keep-alive", b"x"]), *more, *framing]
    rng.shuffle(lines)
    version = rng.choice([b"HTTP/1.1"] * 30 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"http/1.1"])
    head = b"%s %s %s\r\n" % (method.encode(), target, version)
    plain = head.endswith(b" HTTP/1.1\r\n") and method.isupper() and not any(line[:1] in b" :" for line in lines)
    request = [head + b"\r\n".join(lines) + b"\r\n\r\n", *parts]
    if rng.random() < 0.03:
        return Attack([rng.choice(_NO_HTTP)], False, False, method, route.anthropic)
    if rng.random() < 0.05:
        request = [b"".join(request)[: rng.randrange(200)]]
        whole = False
    if rng.random() < 0.05:  # another one behind it, on the same connection
        request.append(b"".join(request))
    abrupt, held = rng.random() < 0.1, not (whole and plain) and rng.random() < 0.2
    cut = not (whole and plain) and rng.random() < 0.7
    return Attack(request, authorised, whole and plain, method, route.anthropic, abrupt, cut, held)


_NO_HTTP = (
    b"",
    b"\x00" * 100,
    b"\r\n" * 3000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET " + b"/" * 100_000,
    b"GET / HTTP/1.1\r\nX: " + b"y" * 400_000,
    b"A" * 200_000,
)


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
    """Print an attack for a person, cut if it is long."""
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
