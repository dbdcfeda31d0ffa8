"""Access to a run's HTTP servers, for programs with the token in a file of the run folder, and not for web pages.

    RUN/keys/engines.token    engines and the reward model; agent workers, trainer and launcher send it
    RUN/keys/gateway.token    the gateway; agent programs send it as their API key
    RUN/keys/metrics.token    ``GET /metrics`` of every process, and nothing else; Prometheus sends it
    RUN/keys/ranks.token      what trainer ranks tell each other to send to engines; no HTTP

A server takes a request only if it carries the token (``Authorization: Bearer``, or ``x-api-key`` as Anthropic's client
sends it), names an allowed host of the server, and has no ``Origin``, which only browsers send. Health
probes (``GET /health``) need no token. Servers that do not know the run folder find the file by the variable
TOKEN_FILE; the token itself is in no command line, environment or log.

vLLM and SGLang load this module into their own processes: it imports the standard library only.
"""

import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, Literal, get_args

from rl_async.errors import EXIT_USER, UserError

# Environment variables with the path of the token's file, and with further host names that a server answers to.
TOKEN_FILE = "RL_ASYNC_TOKEN_FILE"
HOSTS = "RL_ASYNC_HTTP_HOSTS"
HEALTH = "/health"
METRICS = "/metrics"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
UNAUTHORISED = 401, "the token is missing or wrong; it stands in a file in RUN/keys (docs/reference/security.md)"
_TOKEN = re.compile(r"[!-~]{32,}")
# The value of a Host header: a name or an address, one of IPv6 in brackets, and perhaps a port.
_HOST = re.compile(r"(\[[^\[\]\s]*:[^\[\]\s]*\]|[^:\[\]\s]+)(?::([0-9]{0,5}))?")

Audience = Literal["engines", "gateway", "metrics", "ranks"]
AUDIENCES: tuple[Audience, ...] = ("engines", "gateway", "metrics", "ranks")
# Roles of the queue's clients, by their keys (``transfer_queue/auth.py``).
Role = Literal["worker", "trainer", "operator", "reader", "shard"]
ROLES: tuple[Role, ...] = get_args(Role)
Headers = Iterable[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def token_file(run: Path, audience: Audience) -> Path:
    """Return where a run keeps the token of these servers."""
    return run / "keys" / f"{audience}.token"


def make_tokens(folder: Path) -> list[Path]:
    """Make the tokens that the key folder lacks, readable by this user only, and return their files.

    Raises UserError if they cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        missing = [path for audience in AUDIENCES if not (path := folder / f"{audience}.token").exists()]
        for path in missing:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        return missing
    except OSError as error:
        raise UserError(
            f"cannot write tokens into {folder}: {error.strerror}; see that there is room and that it can be written"
        ) from error


def read_token(path: Path) -> str:
    """Read a token. Raises UserError, naming the file, if it holds none."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the token in {path}: {error}; `rl-async queue keygen {path.parent}` makes it"
        ) from error
    if not _TOKEN.fullmatch(token):
        raise UserError(f"{path} does not hold a token: one word of at least 32 ASCII characters")
    return token


def run_token(run: Path, audience: Audience) -> str:
    """Read the run's token for these servers. Raises UserError if it is missing."""
    return read_token(token_file(run, audience))


def token_from_environment() -> str:
    """Read the token in the file that TOKEN_FILE names; empty if the variable is not set. Raises UserError."""
    path = os.environ.get(TOKEN_FILE)
    return read_token(Path(path)) if path else ""


def check_token() -> None:
    """End this process, with a line that says why, if the environment names no token."""
    try:
        Access.from_environment()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)


def bearer(token: str) -> dict[str, str]:
    """Return a client's headers for its token, if it has one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


class Access:
    """Decides which requests a server takes.

    ``names`` are allowed host names, besides the loopback ones and the address at which a request arrives. ``metrics``
    is an optional token for ``GET /metrics`` alone.
    """

    def __init__(self, token: str, names: Iterable[str] = (), *, metrics: str = "") -> None:
        if not token:
            raise ValueError("the token is empty")
        self._token, self._metrics = token.encode(), metrics.encode()
        self._names = {_bare(name) for name in (*LOOPBACK, *names) if name}

    @classmethod
    def from_environment(cls) -> "Access":
        """Make it for a server that does not know the run folder. Raises UserError without a token."""
        token = token_from_environment()
        if not token:
            raise UserError(
                f"this server takes requests with a token only: set {TOKEN_FILE} to its file, which is "
                "RUN/keys/engines.token for a server that joins a run"
            )
        metrics = Path(os.environ[TOKEN_FILE]).with_name("metrics.token")
        names = os.environ.get(HOSTS, "").split(",")
        return cls(token, names, metrics=read_token(metrics) if metrics.is_file() else "")

    @classmethod
    def of_run(cls, run: Path, audience: Audience, names: Iterable[str]) -> "Access":
        """Make it for a server of the run in ``run``. Raises UserError if a token is missing."""
        return cls(run_token(run, audience), names, metrics=run_token(run, "metrics"))

    def refusal(self, method: str, path: str, address: str | None, headers: Headers) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal, or None if the request may pass.

        ``address`` is the server's own, at which the request arrived; header names are in lower case.
        """
        hosts, offered = list[bytes](), list[bytes]()
        for name, value in headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                return 403, "requests of web pages are refused: remove the header Origin"
            elif name == b"authorization":
                scheme, _, word = value.partition(b" ")
                offered.append(word.strip() if scheme.lower() == b"bearer" else b"")
            elif name == b"x-api-key":
                offered.append(value)
        if len(hosts) != 1 or not self._is_known(hosts[0].decode("latin-1"), address):
            return 403, f"this server is not called by that name (Host); launcher.http_hosts or {HOSTS} may add it"
        if path == HEALTH and method in ("GET", "HEAD"):
            return None
        if any(hmac.compare_digest(word, self._token) for word in offered):
            return None
        if self._metrics and path == METRICS and method == "GET":
            return None if any(hmac.compare_digest(word, self._metrics) for word in offered) else UNAUTHORISED
        return UNAUTHORISED

    def _is_known(self, host: str, address: str | None) -> bool:
        written = _HOST.fullmatch(host.strip(" \t"))
        if written is None or int(written[2] or 0) > 65535:
            return False
        name = _bare(written[1])
        return name in self._names or (address is not None and name == _bare(address))


def _bare(host: str) -> str:
    """Return a host name without a port, an IPv6 address without brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


class RequireToken:
    """ASGI middleware that answers refused requests itself: 403 for a web page or a foreign host, 401 without a token.

    Without ``access`` the token comes from the environment: vLLM makes middlewares by ``--middleware``, without
    arguments.
    """

    def __init__(self, app: App, access: Access | None = None) -> None:
        self._app, self._access = app, access or Access.from_environment()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        server = scope.get("server")
        method = scope.get("method", "WEBSOCKET")
        refused = self._access.refusal(method, scope["path"], server[0] if server else None, scope["headers"])
        if refused is None:
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        status, reason = refused
        body, headers = answer(status, reason)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 412: "permission_error"}


def answer(status: int, reason: str) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return body and headers of a refusal, in a shape that OpenAI's and Anthropic's clients understand."""
    kind = _KINDS.get(status, "invalid_request_error")
    body = json.dumps({"type": "error", "error": {"type": kind, "message": reason, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return body, [*headers, (b"www-authenticate", b"Bearer")] if status == 401 else headers


def with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """Return a request's scope and messages with another body."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    left = [{"type": "http.request", "body": body}]

    async def replaced() -> Any:
        return left.pop() if left else await receive()

    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, replaced
