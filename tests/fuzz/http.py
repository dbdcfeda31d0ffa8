"""Hostile requests for every HTTP server of a run, over real sockets.

Whatever is sent: no status from 500 but 503, no traceback in an answer or in the log, an error is JSON in the client's
format, no secret is echoed or logged, a stranger changes nothing, memory does not grow, and a valid client then gets
what it got before.
    python -m tests.fuzz.http [--requests N] [--seed N] [--server NAME]
"""

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import http.client
import itertools
import json
import logging
import random
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import torch
import uvicorn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.server import GatewayServer, OpenEpisodes
from rl_async.agent_loop.tiny_tokenizer import train_tokenizer
from rl_async.configs.schema.data import DataConfig, ModelConfig
from rl_async.configs.schema.reward import RewardConfig
from rl_async.configs.schema.rollout import AgentConfig, GatewayConfig, RolloutConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineRejected
from rl_async.messages import Done, Leased, LeasedGroup, Renewed, SampleKey, Task, Trajectory, Version, VersionRun
from rl_async.process.http_auth import Access
from rl_async.process.http_server import server_of
from rl_async.process.role import bind
from rl_async.reward_loop.server.app import Application, Batcher, score
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, Heard
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.server import EngineServer
from rl_async.rollout_server.vllm.client import MIN_VERSION_HEADER
from rl_async.transfer_queue.telemetry import serve_metrics
from rl_async.weight_sync.buckets import Piece
from tests.conftest import make_model
from tests.fuzz.queue import MUTATIONS, LiveQueue
from tests.support.ports import free_port
from tests.support.weights import make_buckets

# Requests that go wrong, and the judgement of their answers.
#
# Valid requests of a route are damaged in method, path, headers, credentials, framing or body, and a valid JSON body
# has some values, keys or bytes replaced by hostile ones. The attacks are sent over real sockets.


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


# The HTTP servers of a run, each on a thread of this process with the settings that its own process gives it.
#
# The gateway's queue never ends, and its engine says what a model may say.


START_S = 60.0


class Served:
    """uvicorn on a thread. ``make`` builds the server on its event loop; ``beside`` runs there too."""

    def __init__(self, make: Callable[[], tuple[uvicorn.Server, Any]]) -> None:
        self._make = make
        self._listener = bind("127.0.0.1", 0, "port")
        self.port = int(self._listener.getsockname()[1])
        self.crashed: list[BaseException] = []
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._main, name="served")
        self._thread.start()
        if not self._ready.wait(START_S):
            raise RuntimeError("the server did not start")
        if self.crashed:
            raise self.crashed[0]

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.crashed.append(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._server, beside = self._make()
        self._listener.listen(1024)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(beside()) if beside else None
            self._ready.set()
            await group.create_task(self._server.serve(sockets=[self._listener]))
            if task is not None:
                task.cancel()

    def stop(self) -> None:
        """End it. Raises what it died of."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(START_S)
        if self._thread.is_alive():
            raise RuntimeError("the server hangs")
        if self.crashed:
            raise self.crashed[0]


PROMPT = [{"role": "user", "content": "what is 2+3?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
# A template takes tools and calls for what they should be.
PRINTS_TOOLS = "{% for tool in tools or [] %}{{ 'tool ' + tool.function.name }}{{ tool | tojson }}{% endfor %}"
PRINTS_CALLS = """\
{%- for message in messages %}{% for call in message.tool_calls or [] %}{{ 'call ' + call.function.name }}
{%- for key, value in call.function.arguments | items %}{{ key ~ value }}{% endfor %}{% endfor %}{% endfor %}"""
# What a model may write. Numbers and nesting in a call are the model's, not the client's.
SAYS = (
    "5",
    '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 99999999999999999999999999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": 1e400}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 50 + "1" + "}" * 50 + "}</tool_call>",
    "<tool_call>" * 3,
    "",
)


class EndlessQueue:
    """Has a group whenever one is asked for, and forgets what comes."""

    def __init__(self) -> None:
        self._groups = 0
        self.put_rows = self.failures = 0

    async def lease(self, max_groups: int, wait_s: float, *, idle_s: float | None = None) -> Leased:
        if not max_groups:
            await asyncio.sleep(3600)
        self._groups += 1
        task = Task(task_id="t", data_source="test", prompt=PROMPT, ground_truth="5")
        group = LeasedGroup(
            group_id=self._groups, partition="train", attempt=1, samples=[0], task=task, min_version=Version()
        )
        return Leased(groups=[group])

    async def renew(self, held: list[SampleKey]) -> Renewed:
        return Renewed()

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done:
        self.put_rows += len(rows)
        return Done()

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done:
        self.failures += 1
        return Done()


class TalkingEngine:
    """Says something that depends on the prompt alone; rejects some prompts."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._usual = renderer.prompt(PROMPT)

    async def generate(self, request: GenerateRequest, *, session: str, heard: Heard | None = None) -> GenerateResult:
        digest = hashlib.sha256(repr(request.token_ids).encode()).digest()
        if digest[0] == 0:
            raise EngineRejected("this engine rejects this prompt")
        says = "5" if request.token_ids == self._usual else SAYS[digest[1] % len(SAYS)]
        spoken = [*self._renderer.encode(says), self._renderer.end_of_turn][: request.max_tokens]
        await asyncio.sleep(0)
        for size in range(1, len(spoken) if heard is not None else 0):
            heard(spoken[:size])
            await asyncio.sleep(0)
        return GenerateResult(
            token_ids=spoken,
            logprobs=[-0.5] * len(spoken),
            versions=[VersionRun(Version(), 0, len(spoken))],
            finish_reason="stop" if spoken[-1] == self._renderer.end_of_turn else "length",
        )


_CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}
_CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what is 2+3?"}]},
        {"role": "assistant", "content": "hm", "tool_calls": [{"id": "c", **_CALL}]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 20,
    "temperature": 1.0,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
}
_MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "what is 2+3?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "5"}]}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "max_tokens": 20,
    "stream": True,
}
_RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "in words"}]},
        {"type": "message", "role": "user", "content": "what is 2+3?"},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "aG0="},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "max_output_tokens": 20,
    "store": True,
    "include": ["reasoning.encrypted_content"],
}


def _called_with(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [*PROMPT, {"role": "assistant", "content": "", "tool_calls": [call]}, *PROMPT], "tools": [TOOL]}


class GatewayTarget:
    """The gateway with a queue that never ends and an engine that says what a model may say."""

    name = "gateway"
    token = "g" * 43
    routes = (
        Route("POST", "/episodes", {"wait_s": 0.1}),
        Route("GET", "/episodes"),
        Route("POST", "/episodes/give-back", {"episode": "0.0.1", "error": "x"}),
        Route("POST", "/episodes/{id}/heartbeat", {}),
        Route(
            "POST",
            "/episodes/{id}/reward",
            {"reward": 0.5, "parts": {"tidy": 1.0}, "reasons": {"tidy": "x"}, "error": ""},
        ),
        Route("POST", "/episodes/{id}/v1/chat/completions", _CHAT),
        Route("POST", "/episodes/{id}/v1/chat/completions", _CHAT | {"stream": True}),
        *(Route("POST", "/episodes/{id}/v1/chat/completions", _called_with(text)) for text in ("{", "[1]")),
        Route("POST", "/episodes/{id}/v1/responses", _RESPONSES),
        Route("POST", "/episodes/{id}/v1/responses", {"input": "what is 2+3?", "stream": True}),
        Route("POST", "/episodes/{id}/v1/messages", _MESSAGES, anthropic=True),
        Route("POST", "/episodes/{id}/v1/messages/count_tokens", _MESSAGES, anthropic=True),
        Route("POST", "/episodes/{id}/v1/completions", {"prompt": "2+3=", "max_tokens": 5, "stop": ["x"]}),
        Route("POST", "/episodes/{id}/v1/completions", {"prompt": [5, 6, 7], "stream": True}),
        Route("GET", "/episodes/{id}/v1/models"),
        Route("GET", "/episodes/{id}/v1/models/m"),
        Route("GET", "/health"),
    )

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._queue, self._current = EndlessQueue(), ""
        config = RunConfig(
            model=ModelConfig(path="none"),
            data=DataConfig(path="none"),
            agent=AgentConfig(
                max_tokens=3000,
                episode_timeout_s=300.0,
                gateway=GatewayConfig(max_body_bytes=300_000, max_answers=1000),
            ),
            rollout=RolloutConfig(max_tokens=100, max_model_len=4000),
        )
        template = f"{PRINTS_TOOLS}{PRINTS_CALLS}{tokenizer.chat_template}"
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, chat_template=template
        )
        renderer = ChatRenderer(made, cache_bytes=1 << 20)

        def make() -> tuple[uvicorn.Server, Any]:
            rewards = RewardService(RewardConfig())
            self._episodes = OpenEpisodes(config, renderer, TalkingEngine(renderer), self._queue, rewards)

            async def run() -> None:
                async with rewards:
                    await self._episodes.run()

            return server_of(GatewayServer(config, self._episodes).app, Access(self.token)), run

        self._served = Served(make)
        self.port, self.crashed = self._served.port, self._served.crashed

    def prepare(self, rng: random.Random) -> str:
        """Begin an episode, and return its id for the attacks."""
        self._current = self._begin()
        return self._current

    def _begin(self) -> str:
        status, answer = ask(self.port, self.token, "POST", "/episodes", {"wait_s": 60})
        assert status == 200, answer
        return str(answer["episode_id"])

    def release(self) -> None:
        """Nothing is held back for long."""

    def check(self) -> Any:
        """Play an episode."""
        episode = self._begin()
        chat = {"messages": PROMPT, "max_tokens": 20}
        status, answer = ask(self.port, self.token, "POST", f"/episodes/{episode}/v1/chat/completions", chat)
        assert status == 200, answer
        status, ended = ask(self.port, self.token, "POST", f"/episodes/{episode}/reward", {"reward": 0.5})
        assert status == 200, ended
        return answer["choices"], answer["usage"], ended

    def state(self) -> Any:
        """Requests of the newest episode, if it is still open, and rows that were handed over."""
        newest = self._episodes._open.get(self._current)
        return newest and newest._requests, self._queue.put_rows

    def close(self) -> None:
        """Stop the server, and wait for its thread."""
        self._served.stop()


LENGTH = 64


class Target(Protocol):
    """A server under attack. ``prepare`` brings it into some state and returns an episode's id, if it has episodes;
    ``state`` is what no stranger may change; ``release`` makes it answer what it holds back, and serve again; ``check``
    returns what a valid client gets then, the same each time."""

    name: str
    port: int
    token: str
    routes: tuple[Route, ...]
    crashed: list[BaseException]

    def prepare(self, rng: random.Random) -> str: ...
    def release(self) -> None: ...
    def check(self) -> Any: ...
    def state(self) -> Any: ...
    def close(self) -> None: ...


_GENERATE = {
    "token_ids": [1, 2, 3],
    "request_id": "r",
    "stream": False,
    "sampling_params": {
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "seed": 1,
        "n": 2,
        "stop_token_ids": [1],
        "logprobs": 0,
        "stream_interval": 1,
    },
}
_GLOO = {
    "init_info": {
        "backend": "gloo",
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 0.1,
        "group_name": "g",
    }
}
_UPDATE = {
    "update_info": {
        "names": ["lm_head.weight"],
        "dtype_names": ["float32"],
        "shapes": [[64, 32]],
        "checksum": "0",
        "shm_name": "none",
        "file": "none",
        "hold": "no",
        "version": "0.1",
        "index": 0,
        "count": 1,
        "kind": "full",
    }
}


_HELD = {"hold": "stage", "version": "0.1", "index": 0, "count": 1, "kind": "full"}


class EngineTarget:
    """The embedded engine with a tiny random model."""

    name = "engine"
    token = "e" * 43
    routes: tuple[Route, ...] = (
        *[Route("POST", "/inference/v1/generate", _GENERATE)] * 4,
        Route("POST", "/inference/v1/generate", _GENERATE | {"stream": True}),
        Route("POST", "/abort_requests", {"request_ids": ["r"]}),
        Route("POST", "/pause", queries=("?mode=keep", "?mode=wait", "?mode=abort", "?mode=x", "")),
        Route("POST", "/resume"),
        Route("GET", "/is_paused"),
        Route("POST", "/init_weight_transfer_engine", _GLOO),
        Route("POST", "/start_weight_update", queries=("", "?staged=true", "?staged=x")),
        Route("POST", "/update_weights", _UPDATE),
        Route("POST", "/finish_weight_update", {"weight_version": "0.1"}),
        Route("GET", "/weight_info"),
        Route("GET", "/get_world_size"),
        Route("POST", "/weight_checker", {"action": "checksum"}),
        Route("POST", "/sleep", queries=("?level=1", "?level=2", "?level=3", "?level=x", "")),
        Route("POST", "/wake_up", queries=("?tags=weights", "?tags=kv_cache", "?tags=x", "")),
        *(Route("GET", path) for path in ("/health", "/load", "/metrics")),
    )

    def __init__(self, model: Path) -> None:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.crashed: list[BaseException] = []
        self._engine = EngineThread(EngineCore(loaded.eval(), max_batch=4, max_length=LENGTH), self.crashed.append)
        bucket = make_buckets(loaded.named_parameters(), 1 << 24)[0]
        save_file({"bucket": bucket.data}, model / "bucket.safetensors")
        self._init = {"init_info": {"backend": "disk", "folder": str(model)}}
        update = msgspec.to_builtins(bucket.info) | {"file": "bucket.safetensors"}
        self.routes = (
            *self.routes,
            Route("POST", "/init_weight_transfer_engine", self._init),
            *[Route("POST", "/update_weights", {"update_info": update})] * 2,
            Route("POST", "/update_weights", {"update_info": update | _HELD}),
        )
        self._weights = [Piece(name, p.shape, 0, p.detach().clone().view(-1)) for name, p in loaded.named_parameters()]
        server = EngineServer(self._engine, "m")
        self._served = Served(lambda: (server_of(server.app, Access(self.token)), None))
        self.port = self._served.port

    def prepare(self, rng: random.Random) -> str:
        """Begin a weight update now and then."""
        if rng.random() < 0.3:
            self._control("/init_weight_transfer_engine", self._init)
            self._control("/pause?mode=keep")
            self._control("/start_weight_update")
        return ""

    def release(self) -> None:
        """Send the weights anew as a trainer does, after whatever state the engine was left in."""
        self._control("/wake_up")
        self._control("/pause?mode=abort")
        self._control("/start_weight_update")
        self._engine.load_weights(self._weights)
        self._control("/finish_weight_update", {"weight_version": "0.0"})
        self._control("/resume")

    def _control(self, path: str, body: Any = None) -> None:
        headers = {"X-Trainer-Lineage": "0"}  # refused if a stranger has named a newer one
        status, answer = ask(self.port, self.token, "POST", path, body, **headers)
        assert status == 200, (path, status, answer)

    def check(self) -> Any:
        """Sample greedily, and with a seed."""
        greedy = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0}}
        seeded = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "seed": 3}}
        found = []
        for body in (greedy, seeded):
            status, answer = ask(self.port, self.token, "POST", "/inference/v1/generate", body)
            assert status == 200, answer
            found.append([part["token_ids"] for part in answer["choices"]])
        return found, self.state()

    def state(self) -> Any:
        """What the control routes change, and whether the trainer of lineage 0 is still let in."""
        status, info = ask(self.port, self.token, "GET", "/weight_info", **{"X-Trainer-Lineage": "0"})
        return status, info, self._engine.paused, self._engine.asleep

    def close(self) -> None:
        """End the server, then the engine."""
        self._served.stop()
        self._engine.stop()


class RewardTarget:
    """The reward model's server with a tiny random classifier."""

    name = "reward model"
    token = "r" * 43
    routes = (
        Route("POST", "/classify", {"input": "what is 2+3?", "model": "m", "use_activation": True}),
        Route("POST", "/classify", {"input": ["a", "b c"], "add_special_tokens": False}),
        Route("POST", "/classify", {"input": [[1, 2], [3]]}),
        Route("POST", "/classify", {"input": [1, 2, 3]}),
        Route("GET", "/health"),
    )

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(1)
        shape = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_labels": 1, "pad_token_id": 0}
        config = Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=96, **shape, **heads)
        model = Qwen3ForSequenceClassification(config).eval()

        def make() -> tuple[uvicorn.Server, Any]:
            batcher = Batcher(lambda rows: score(model, rows), 4)
            app = Application(batcher, tokenizer, name="m", label=None, vocabulary=len(tokenizer), longest=96).app
            return server_of(app, Access(self.token), lifespan="on"), None

        self._served = Served(make)
        self.port, self.crashed = self._served.port, self._served.crashed

    def prepare(self, rng: random.Random) -> str:
        """Nothing is needed."""
        return ""

    def release(self) -> None:
        """Nothing is held back."""

    def check(self) -> Any:
        """Score a text and token ids."""
        found = []
        for given in ("what is 2+3?", [1, 2, 3]):
            status, answer = ask(self.port, self.token, "POST", "/classify", {"input": given})
            assert status == 200, answer
            found.append([round(item["probs"][0], 4) for item in answer["data"]])
        return found

    def state(self) -> Any:
        """It keeps none."""

    def close(self) -> None:
        """Stop the server, and wait for its thread."""
        self._served.stop()


class MetricsTarget:
    """The metrics of a queue."""

    name = "metrics"
    token = "m" * 43
    routes = (Route("GET", "/metrics"), Route("GET", "/metrics", queries=("?x=y",)), Route("GET", "/health"))

    def __init__(self) -> None:
        self.crashed: list[BaseException] = []
        self._stack = ExitStack()
        self._queue = LiveQueue()
        self._stack.callback(self._queue.stop)
        self.port = free_port()
        self._stack.enter_context(serve_metrics(self.port, self._queue.address, self.token))

    def prepare(self, rng: random.Random) -> str:
        """Nothing is needed."""
        return ""

    def release(self) -> None:
        """Nothing is held back."""

    def check(self) -> Any:
        """Scrape the names of the metrics."""
        status, text = ask(self.port, self.token, "GET", "/metrics")
        assert status == 200, text
        return sorted({line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")})

    def state(self) -> Any:
        """Scraping changes nothing."""

    def close(self) -> None:
        """End both."""
        self._stack.close()


@contextmanager
def targets(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[Target]]:
    """All servers, with the model in ``folder``."""
    with ExitStack() as stack:
        found: list[Target] = []
        for make in (
            lambda: GatewayTarget(tokenizer),
            lambda: EngineTarget(folder),
            lambda: RewardTarget(tokenizer),
            MetricsTarget,
        ):
            found.append(make())
            stack.callback(found[-1].close)
        yield found


GROWTH_BYTES = 128 << 20
AT_ONCE = 24


class HeardLogs(logging.Handler):
    """Everything that is logged in this process, and what threads died of."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.wrong: list[str] = []
        self.secrets: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what should not be in a log."""
        text = logging.Formatter().format(record)
        if record.exc_info or record.levelno >= logging.ERROR or any(secret in text for secret in self.secrets):
            self.wrong.append(text[-3000:])

    def __enter__(self) -> "HeardLogs":
        logging.getLogger().addHandler(self)
        self._before = threading.excepthook
        threading.excepthook = lambda args: self.wrong.append(f"{args.thread}: {args.exc_value!r}")
        return self

    def __exit__(self, *_: object) -> None:
        threading.excepthook = self._before
        logging.getLogger().removeHandler(self)


class Fuzzer:
    """Attacks one server in rounds, and checks it after each."""

    def __init__(self, target: Target, heard: HeardLogs) -> None:
        self.target, self._heard = target, heard
        heard.secrets.append(target.token)
        target.release()
        self._expected = target.check()
        self.statuses: Counter[int] = Counter()

    def round(self, rng: random.Random, at_once: int = AT_ONCE) -> None:
        """Up to ``at_once`` requests together, in some rounds all of a stranger. Raises AssertionError."""
        episode = self.target.prepare(rng)
        strangers = rng.random() < 0.3
        attacks = [self._attack(rng, episode, strangers) for _ in range(rng.randint(1, at_once))]
        before = self.target.state()
        answers = send(attacks, self.target.port, (lambda: None) if strangers else self.target.release)
        for sent, answer in answers:
            self.statuses[judge(sent, answer, [self.target.token])] += 1
        if strangers:
            after = self.target.state()
            assert after == before, f"strangers changed {before} to {after}: {_list(attacks)}"
            self.target.release()
        found = self.target.check()
        assert found == self._expected, f"{found} instead of {self._expected} after {_list(attacks)}"
        assert not self.target.crashed, f"{self.target.crashed} after {_list(attacks)}"
        wrong, self._heard.wrong = self._heard.wrong, []
        assert not wrong, f"the log has {wrong[0]} after {_list(attacks)}"

    def _attack(self, rng: random.Random, episode: str, stranger: bool) -> Attack:
        while True:
            route = rng.choice(self.target.routes)
            made = attack(rng, route, episode, self.target.token, self.target.port, MIN_VERSION_HEADER)
            if not (stranger and made.authorised):
                return made


def _list(attacks: Sequence[Attack]) -> str:
    return "\n".join(map(shown, attacks))


def tokenizer() -> PreTrainedTokenizerFast:
    """A tiny one with a chat template."""
    said = [{"role": "user", "content": "what is 2+3?"}, {"role": "assistant", "content": '5 {"x": [1, 2]} hm'}]
    return train_tokenizer([said] * 30, 100)


class Memory:
    """How far this process grows after a first quarter of the samples."""

    def __init__(self) -> None:
        self._process, self._resident = psutil.Process(), list[int]()

    def sample(self) -> None:
        """Note the resident memory."""
        self._resident.append(self._process.memory_info().rss)

    @property
    def warm(self) -> int:
        """Bytes after the first quarter."""
        return self._resident[len(self._resident) // 4]

    @property
    def grown(self) -> int:
        """Most bytes beyond that."""
        return max(self._resident) - self.warm


def attack_all(fuzzers: Sequence[Fuzzer], requests: int, seed: int, memory: Memory) -> None:
    """Rounds at each server in turn, until there were enough requests."""
    for number in itertools.count():
        for fuzzer in fuzzers:
            try:
                fuzzer.round(random.Random(f"{seed}.{number}"))
            except AssertionError:
                print(f"{fuzzer.target.name}, seed {seed}, round {number}:", file=sys.stderr)
                raise
        if number % 20 == 0:
            memory.sample()
            print(f"{total(fuzzers)} requests", file=sys.stderr, flush=True)
        if total(fuzzers) >= requests:
            return


def total(fuzzers: Sequence[Fuzzer]) -> int:
    """The number of requests so far."""
    return sum(sum(fuzzer.statuses.values()) for fuzzer in fuzzers)


def main() -> int:
    """Attack the servers; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.http", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, metavar="N", help="in all (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--server", default="", help="only the one whose name begins so")
    arguments = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # what matters is heard, not printed
    torch.set_num_threads(1)
    began, memory = time.monotonic(), Memory()
    with (
        tempfile.TemporaryDirectory() as folder,
        HeardLogs() as heard,
        targets(make_model(Path(folder)), tokenizer()) as found,
    ):
        fuzzers = [Fuzzer(target, heard) for target in found if target.name.startswith(arguments.server)]
        attack_all(fuzzers, arguments.requests, arguments.seed, memory)
    for fuzzer in fuzzers:
        statuses = dict(sorted(fuzzer.statuses.items()))
        print(f"{fuzzer.target.name}: {sum(statuses.values())} requests, by status (0: cut off) {statuses}")
    print(
        f"{total(fuzzers)} requests in {time.monotonic() - began:.0f} s, every server sound; memory grew by "
        f"{memory.grown / 1e6:.1f} MB from {memory.warm / 1e6:.0f} MB"
    )
    return int(memory.grown > GROWTH_BYTES)


if __name__ == "__main__":
    sys.exit(main())
