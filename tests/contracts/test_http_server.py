"""What every HTTP server of a run does with requests that no client of ours sends, hostile ones among them.

``python -m tests.fuzz.http`` sends many more of the hostile ones.
"""

import contextlib
import json
import logging
import random
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from starlette.requests import Request
from starlette.responses import Response

from rl_async.process import http_server
from rl_async.process.http_auth import Access
from rl_async.process.http_server import HEAD_BYTES, application, read_body, server_of
from tests.conftest import make_model
from tests.fuzz.http import Attack, Fuzzer, HeardLogs, Served, Target, ask, judge, targets, tokenizer
from tests.support.seed import examples

TOKEN = "t" * 43
MOST = 1000
HEAD = f"POST /echo HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n".encode()


async def echo(request: Request) -> Response:
    msgspec.json.decode(body := await read_body(request, MOST, "some.key"))
    return Response(body, media_type="application/json")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    app = application({"POST /echo": echo})
    served = Served(lambda: (server_of(app, Access(TOKEN)), None))
    yield served.port
    served.stop()


def answer(port: int, *parts: bytes, more: Callable[[int], bytes] | None = None) -> tuple[int, dict[str, str]]:
    """The status of what raw bytes are answered with, and its error. ``more`` makes further parts, until the server
    hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
            for number in range(10_000 if more else 0):
                connection.sendall(more(number))
            assert more is None, "the server reads on and on"
        received = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n\r\n" not in received or not received.endswith(b"}"):
                if not (data := connection.recv(1 << 16)):
                    break
                received += data
    if not received:  # it was reset before it was read
        return 0, {}
    head, _, body = received.partition(b"\r\n\r\n")
    error, _ = json.JSONDecoder().raw_decode(body.decode())  # another answer may follow
    return int(head.split()[1]), error["error"]


def test_errors_are_json_in_the_shape_of_both_dialects(port):
    for method, path, status in (("GET", "/else", 404), ("GET", "/echo", 405), ("POST", "/echo/", 404)):
        found, error = ask(port, TOKEN, method, path)
        assert (found, error["type"], error["error"]["code"]) == (status, "error", status)
        assert error["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_a_body_that_is_too_long_is_refused_before_its_end(port):
    status, error = answer(port, HEAD + b"Content-Length: 99999999999\r\n\r\n", b"x" * (MOST + 1))
    assert status == 413 and "some.key" in error["message"]
    status, _ = answer(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"fffffff\r\n" + b"x" * (MOST + 1))
    assert status == 413


def test_a_compressed_body_is_refused_by_name(port):
    status, error = answer(port, HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n", b"{}")
    assert status == 415 and "gzip" in error["message"]


@pytest.mark.parametrize("begun", [b"", HEAD])
def test_a_head_that_does_not_end_in_time_is_hung_up_on(port, begun, monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(begun)
        assert connection.recv(1) == b""


def test_a_body_that_does_not_end_in_time_is_refused_and_hung_up_on(port, monkeypatch):
    monkeypatch.setattr(http_server, "BODY_S", 0.2)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    assert received.split()[1] == b"408"


def test_a_body_that_is_nested_too_deeply_is_refused(port):
    assert answer(port, HEAD + b"Content-Length: 999\r\n\r\n" + b"[" * 999)[0] == 400


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/9\r\n\r\n", HEAD + b"Content-Length: -1\r\n\r\n"]
)
def test_bytes_that_are_no_http_are_answered_in_json(port, junk):
    status, error = answer(port, junk)
    assert status == 400 and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("parts", "more"),
    [
        ((b"GET /" + b"x" * 9,), lambda _: b"x" * 9999),
        ((b"GET /echo HTTP/1.1\r\nX: ",), lambda _: b"x" * 9999),
        ((b"GET /echo HTTP/1.1\r\n",), lambda i: f"X-{i}: {'y' * 9999}\r\n".encode()),
        (
            (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",),
            lambda i: b"X: %d\r\n" % i * 999,
        ),
    ],
    ids=["path", "header", "headers", "trailers"],
)
def test_a_stranger_cannot_fill_the_memory_with_a_head(port, parts, more):
    assert answer(port, *parts, more=more)[0] in (0, 400, 401)
    assert ask(port, TOKEN, "POST", "/echo", [1]) == (200, [1])


def test_the_head_is_counted_anew_for_each_request_of_a_connection(port):
    request = HEAD + b"X: " + b"y" * (HEAD_BYTES // 3) + b"\r\nContent-Length: 2\r\n\r\n[]"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for _ in range(9):
            connection.sendall(request)
            received = b""
            while not received.endswith(b"[]"):
                received += connection.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_in_the_middle_is_no_error(port, caplog):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(HEAD + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")  # the handler waits for the body
    assert ask(port, TOKEN, "POST", "/echo", [1]) == (200, [1])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


NAMES = ("gateway", "engine", "reward model", "metrics")


@pytest.fixture(scope="module")
def heard() -> Iterator[HeardLogs]:
    with HeardLogs() as listening:
        yield listening


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, heard: HeardLogs) -> Iterator[dict[str, Target]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with targets(make_model(tmp_path_factory.mktemp("model")), tokenizer()) as found:
        yield {target.name: target for target in found}
    torch.set_num_threads(threads)


@pytest.mark.examples
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_hostile_requests_change_nothing_for_a_valid_client(
    served: dict[str, Target], heard: HeardLogs, name: str
) -> None:
    fuzzer = Fuzzer(served[name], heard)
    for number in range(examples(60)):
        try:
            fuzzer.round(random.Random(f"{name}.{number}"), at_once=5)
        except AssertionError as error:
            error.add_note(f"in round {number} at the {name}")
            raise
    assert sum(fuzzer.statuses.values()) >= examples(60)


ATTACK = Attack([b"POST /pause HTTP/1.1\r\n\r\n"], authorised=False, whole=True, method="POST", anthropic=False)
ERROR = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s"


def refused(status: int, body: bytes) -> bytes:
    return ERROR % (status, len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        refused(500, b'{"error": {"message": "x", "type": "y"}}'),
        refused(401, b"Unauthorized"),
        refused(401, b'{"error": {"message": "no sesame", "type": "y"}}'),
        refused(401, b'{"error": {"message": "Traceback (most recent call last)", "type": "y"}}'),
    ],
)
def test_what_it_is_there_to_notice_is_noticed(answer: bytes) -> None:
    assert judge(ATTACK, refused(401, b'{"error": {"message": "x", "type": "y"}}'), ["sesame"]) == 401
    with pytest.raises(AssertionError):
        judge(ATTACK, answer, ["sesame"])
