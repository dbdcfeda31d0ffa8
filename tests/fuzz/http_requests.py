"""Requests that go wrong: valid ones of a route, damaged in method, path, headers, credentials, framing or body."""

import gzip
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.http_values import body

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
    """Further header lines."""
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
