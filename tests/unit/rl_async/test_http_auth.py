"""Which requests an HTTP server of a run takes."""

import json
import stat
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from rl_async.errors import UserError
from rl_async.process.http_auth import (
    AUDIENCES,
    HOSTS,
    TOKEN_FILE,
    Access,
    RequireToken,
    answer,
    bearer,
    make_tokens,
    run_token,
    token_file,
)

TOKEN = "t" * 43
HERE = "10.0.0.5"
ACCESS = Access(TOKEN, ("engine-0.example.org",))
HOST, AUTHORIZATION = (b"host", b"127.0.0.1:8000"), (b"authorization", f"Bearer {TOKEN}".encode())


def status(*headers: tuple[bytes, bytes], method: str = "POST", path: str = "/pause") -> int:
    """200, or the status of the refusal."""
    refused = ACCESS.refusal(method, path, HERE, headers)
    return 200 if refused is None else refused[0]


@pytest.mark.parametrize(
    "credential",
    [AUTHORIZATION, (b"authorization", f"bearer  {TOKEN}".encode()), (b"x-api-key", TOKEN.encode())],
)
def test_the_token_opens_every_route(credential: tuple[bytes, bytes]) -> None:
    assert status(HOST, credential) == 200


@pytest.mark.parametrize(
    "credential",
    [
        (b"authorization", TOKEN.encode()),
        (b"authorization", f"Basic {TOKEN}".encode()),
        (b"authorization", f"Bearer {TOKEN}x".encode()),
        (b"authorization", b"Bearer "),
        (b"authorization", "Bearer ütüt".encode("latin-1")),
        (b"x-api-key", b""),
        (b"cookie", TOKEN.encode()),
    ],
)
def test_anything_else_is_no_token(credential: tuple[bytes, bytes]) -> None:
    assert status(HOST, credential) == 401


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LOCALHOST:65535", b"[::1]:8000", b"127.0.0.1", b"10.0.0.5:8000", b"Engine-0.example.org:8000"],
)
def test_names_and_addresses_of_the_server_are_known(host: bytes) -> None:
    assert status((b"host", host), AUTHORIZATION) == 200


@pytest.mark.parametrize(
    "host",
    [
        *(b"evil.example.org", b"10.0.0.6", b"", b"localhost.evil.org", b"engine-0.example.org.evil.org", b"[::2]"),
        *(
            b"localhost:65536",
            b"localhost:99999",
            b"[::1].evil.org",
            b"[::1]evil.org:80",
            b"[::1]:80.evil.org",
            b"[::1",
            b"[[::1]]",
            b"::1",
        ),
        *(
            b"localhost:80.evil.org",
            b"localhost:evil.org",
            b"localhost:80:80",
            b"localhost:80@evil.org",
            b"127.0.0.1:x",
        ),
        *(b"localhost:800000", b"localhost/evil.org", b"evil.org@localhost"),
        *(b"localhost\xa0", b"localhost\x0b", b"localhost:80\x85", b"[localhost]", b"[127.0.0.1]:80", b"[::1]\xa0:80"),
    ],
)
def test_a_foreign_host_is_refused_with_the_token_too(host: bytes) -> None:
    assert status((b"host", host), AUTHORIZATION) == 403
    assert status((b"host", host), path="/health", method="GET") == 403


def test_without_a_host_or_with_two_a_request_is_refused() -> None:
    assert status(AUTHORIZATION) == 403
    assert status(HOST, (b"host", b"evil.example.org"), AUTHORIZATION) == 403


@pytest.mark.parametrize("origin", [b"https://example.org", b"null", b"http://127.0.0.1:8000", b""])
def test_a_web_page_is_refused_with_the_token_too(origin: bytes) -> None:
    assert status(HOST, AUTHORIZATION, (b"origin", origin)) == 403
    assert status(HOST, (b"origin", origin), path="/health", method="GET") == 403


def test_only_health_probes_need_no_token() -> None:
    assert status(HOST, path="/health", method="GET") == status(HOST, path="/health", method="HEAD") == 200
    assert status(HOST, path="/health", method="POST") == status(HOST, path="/health/", method="GET") == 401
    assert status(HOST, path="/", method="OPTIONS") == 401


METRICS_TOKEN = (b"authorization", b"Bearer " + b"m" * 43)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [("GET", "/metrics", 200), ("POST", "/metrics", 401), ("GET", "/metrics/", 401), ("POST", "/pause", 401)],
)
def test_the_token_for_metrics_opens_nothing_else(method: str, path: str, expected: int) -> None:
    access = Access(TOKEN, metrics="m" * 43)
    refused = access.refusal(method, path, HERE, (HOST, METRICS_TOKEN))
    assert (200 if refused is None else refused[0]) == expected
    assert access.refusal(method, path, HERE, (HOST, AUTHORIZATION)) is None, "the server's own token opens everything"


def test_without_a_token_for_metrics_they_need_the_servers_own() -> None:
    assert status(HOST, METRICS_TOKEN, method="GET", path="/metrics") == 401
    assert status(HOST, (b"authorization", b"Bearer "), method="GET", path="/metrics") == 401


def test_a_server_outside_the_run_finds_the_token_for_metrics_beside_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokens(tmp_path / "keys")
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "engines")))
    token = (b"authorization", f"Bearer {run_token(tmp_path, 'metrics')}".encode())
    for access in (Access.from_environment(), Access.of_run(tmp_path, "engines", ())):
        assert access.refusal("GET", "/metrics", HERE, (HOST, token)) is None


def test_a_server_without_a_token_for_metrics_keeps_them_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokens(tmp_path / "keys")
    token_file(tmp_path, "metrics").unlink()
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "engines")))
    made: list[str] = []

    class Noted(Access):
        def __init__(self, token: str, names: Iterable[str] = (), *, metrics: str = "") -> None:
            made.append(metrics)
            super().__init__(token, names, metrics=metrics)

    Noted.from_environment()
    assert made == [""]


@pytest.mark.parametrize(
    ("code", "kind", "asks"), [(401, "authentication_error", True), (418, "invalid_request_error", False)]
)
def test_a_refusal_says_its_kind_and_asks_for_a_token_only_if_one_lacks(code: int, kind: str, asks: bool) -> None:
    body, headers = answer(code, "why")
    assert json.loads(body)["error"] == {"type": kind, "message": "why", "code": code}
    assert ((b"www-authenticate", b"Bearer") in headers) == asks


async def test_the_middleware_says_with_which_method_a_request_came() -> None:
    app = RequireToken(inner := Application(), Access(TOKEN, metrics="m" * 43))
    for method in ("GET", "POST"):
        scope = {"type": "http", "path": "/metrics", "method": method, "server": None, "headers": [HOST, METRICS_TOKEN]}
        await app(scope, no_body, ignored)
    assert inner.scopes == ["http"], "GET alone"


async def no_body() -> MutableMapping[str, Any]:
    raise AssertionError("a refused request's body is not read")


async def ignored(message: MutableMapping[str, Any]) -> None:
    """Discard a message of the middleware's answer."""


def test_an_empty_token_is_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        Access("")
    assert bearer("") == {}


class Application:
    """Keeps the kinds of what reaches it."""

    def __init__(self) -> None:
        self.scopes: list[str] = []

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self.scopes.append(scope["type"])


async def sent(app: RequireToken, kind: str, *headers: tuple[bytes, bytes]) -> list[MutableMapping[str, Any]]:
    """What the middleware itself answers."""
    messages: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    scope = {"type": kind, "path": "/x", "server": (HERE, 80), "headers": list(headers)}
    await app(scope | ({"method": "GET"} if kind == "http" else {}), no_body, send)
    return messages


async def test_the_middleware_refuses_requests_and_web_sockets() -> None:
    inner = Application()
    app = RequireToken(inner, ACCESS)
    start, body = await sent(app, "http", HOST)
    assert [start["type"], body["type"]] == ["http.response.start", "http.response.body"]
    assert start["status"] == 401 and (b"www-authenticate", b"Bearer") in start["headers"]
    error = json.loads(body["body"])
    assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
    assert [m["type"] for m in await sent(app, "websocket", HOST)] == ["websocket.close"]
    assert inner.scopes == []
    for kind, headers in (("http", [HOST, AUTHORIZATION]), ("websocket", [HOST, AUTHORIZATION]), ("lifespan", [])):
        assert await sent(app, kind, *headers) == []
    assert await sent(app, "http", (b"host", HERE.encode()), AUTHORIZATION) == [], "the address where it arrived"
    assert inner.scopes == ["http", "websocket", "lifespan", "http"]


def test_tokens_are_secret_files_that_are_kept(tmp_path: Path) -> None:
    made = make_tokens(tmp_path / "keys")
    assert made == [token_file(tmp_path, audience) for audience in AUDIENCES]
    tokens = {run_token(tmp_path, audience) for audience in AUDIENCES}
    assert len(tokens) == len(AUDIENCES) and min(map(len, tokens)) >= 43
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert make_tokens(tmp_path / "keys") == []
    assert {run_token(tmp_path, audience) for audience in AUDIENCES} == tokens


@pytest.mark.parametrize("content", ["", "short", "two words that are together long enough for a token", "ü" * 40])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").mkdir()
    file = token_file(tmp_path, "engines")
    with pytest.raises(UserError, match=str(file)):
        run_token(tmp_path, "engines")
    file.write_text(content)
    with pytest.raises(UserError, match=str(file)):
        run_token(tmp_path, "engines")


def test_a_server_takes_token_and_names_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    with pytest.raises(UserError, match=TOKEN_FILE):
        RequireToken(Application())
    make_tokens(tmp_path / "keys")
    monkeypatch.setenv(TOKEN_FILE, str(token_file(tmp_path, "engines")))
    monkeypatch.setenv(HOSTS, "a.example.org,b.example.org")
    access = Access.from_environment()
    token = (b"authorization", f"Bearer {run_token(tmp_path, 'engines')}".encode())
    assert access.refusal("GET", "/", None, [(b"host", b"b.example.org:1"), token]) is None
    assert access.refusal("GET", "/", None, [(b"host", b"c.example.org:1"), token]) is not None
