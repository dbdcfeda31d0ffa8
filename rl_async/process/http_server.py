"""What the HTTP servers of a run have in common, and ``GET /metrics`` of a process for Prometheus.

The token stands in front of every route, reads are bounded, and errors are JSON that OpenAI's and Anthropic's clients
understand. Metrics are numbers that the parts of a process count anyway, read when Prometheus asks; a thread of its
own answers. To add a metric, yield it in the collector of its role.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rl_async.concurrency import time_limit
from rl_async.errors import RequestRefused
from rl_async.process.http_auth import Access, App, RequireToken, answer, run_token
from rl_async.process.role import bind, heeded
from rl_async.process.run_files import Target, listed

# A request's head before its body. The parser itself has no bound, and reads before any check.
HEAD_BYTES = 1 << 17
# For a request's head, counted from the connection for the first request.
HEAD_S = 60.0
# A prompt of 2 million token ids.
BODY_BYTES = 1 << 24
# For a body to be complete, or the answer has status LATE.
BODY_S = 60.0
LATE = 408
Handler = Callable[[Request], Awaitable[Any]]


class BoundedHead(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which refuses a request whose head or trailers are longer than HEAD_BYTES, hangs up on
    one whose head takes longer than HEAD_S, and answers invalid HTTP in JSON."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._in_head, self._head_bytes = True, 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, self._hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._in_time()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        # Otherwise only a few bytes follow a request.
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None

    def data_received(self, data: bytes) -> None:
        """Parse what came, and hang up if a head does not end."""
        if self._in_head:
            if self._late is None:
                self._late = self.loop.call_later(HEAD_S, self._hang_up)
            # It may include a part of the body, at most as much as is received at once.
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the request's head has more than {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Start counting trailers, which the parser reports as headers."""
        self._in_head, self._head_bytes = False, 0
        self._in_time()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count trailers. Raises ValueError, which the parser reports, if there are too many."""
        if not self._in_head:
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > HEAD_BYTES:
                raise ValueError("the trailers are too long")
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        """Expect the head of the next request."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer in JSON, and close."""
        body, headers = answer(400, msg)
        lines = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in headers), b"connection: close"]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()


class _Server(uvicorn.Server):
    """A server that does not end by a signal that its process was started to ignore."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._heeded = heeded(signal.SIGINT, signal.SIGTERM)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the server on a signal."""
        if sig in self._heeded:
            super().handle_exit(sig, frame)


def server_of(app: App, access: Access, **settings: Any) -> uvicorn.Server:
    """Return the server of an application that only ``access`` opens. ``settings`` are uvicorn's."""
    config = uvicorn.Config(
        RequireToken(app, access),
        http=BoundedHead,
        ws="none",
        log_level="warning",
        # Logging has its own format.
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
        **{"lifespan": "off", **settings},
    )
    return _Server(config)


def application(routes: Mapping[str, Handler], **settings: Any) -> Starlette:
    """Return the application of these routes, written ``METHOD /path``. ``settings`` are Starlette's."""
    app = Starlette(
        routes=[Route(key.split()[1], handler, methods=[key.split()[0]]) for key, handler in routes.items()],
        exception_handlers={
            HTTPException: _no_route,
            RequestRefused: _refused,
            RecursionError: _too_deep,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
        **settings,
    )
    # A redirect would repeat the client's Host.
    app.router.redirect_slashes = False
    return app


async def read_body(request: Request, most: int = BODY_BYTES, key: str = "") -> bytes:
    """Receive a body.

    Raises RequestRefused, naming the config's ``key``, as soon as more than ``most`` bytes have come, if it is not
    complete within BODY_S, and if it is compressed; ClientDisconnect if the client hangs up before.
    """
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        told = f"Content-Encoding: {encoding[:80]} is not read; send the body as it is"
        raise RequestRefused(told, code="unsupported_encoding", param="Content-Encoding", status=415)
    received = bytearray()
    try:
        async with time_limit(BODY_S):
            async for chunk in request.stream():
                received += chunk
                if len(received) > most:
                    raise RequestRefused(
                        f"the body has more than {most} bytes{f' ({key})' if key else ''}",
                        code="body_too_large",
                        status=413,
                    )
    except TimeoutError:
        raise RequestRefused(
            f"the body was not complete within {BODY_S:g} s", code="body_too_slow", status=LATE
        ) from None
    return bytes(received)


def hang_up_if_late(response: Response) -> Response:
    """Let the connection of a request whose body is still coming end with the answer."""
    if response.status_code == LATE:
        response.headers["Connection"] = "close"
    return response


def _error(status: int, reason: str, more: Mapping[str, str] | None = None) -> Response:
    body, headers = answer(status, reason)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers} | dict(more or {}))


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return hang_up_if_late(_error(error.status, str(error)))


def _too_deep(request: Request, error: Exception) -> Response:
    return _error(400, "the body is nested too deeply")


def _failed(request: Request, error: Exception) -> Response:
    what = f"{request.method} {request.url.path}"
    return _error(500, f"{what} failed with {type(error).__name__}; the server's log says why")


def _gone(request: Request, error: Exception) -> Response:
    # The client is gone and does not read it.
    return Response(status_code=499)


HOST = "127.0.0.1"
STOP_S = 10.0


class Collector(Protocol):
    """Metrics that are read when Prometheus asks."""

    def collect(self) -> Iterable[Metric]:
        """Yield each metric with its samples; called in another thread than the one that counts."""
        ...


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a metric without labels, as it is now."""
    return GaugeMetricFamily(name, text, float(value))


def by_label(label: str, name: str, text: str, values: dict[str, float]) -> Metric:
    """Return a metric with one sample per value of a label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def metrics_text(*collectors: Collector) -> Callable[[], bytes]:
    """Return what writes these metrics, and memory, CPU time and open files of this process, as text."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    return lambda: generate_latest(registry)


def text_response(text: bytes) -> Response:
    """Return the answer to a scrape."""
    return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@contextlib.contextmanager
def exposed(wanted: bool, run: Path, role: str, name: str, *collectors: Collector) -> Iterator[None]:
    """Answer scrapes while the block runs, at an address that ``RUN/prometheus/NAME.json`` has; if that is ``wanted``.

    The port is a free one. Raises UserError if none can be had, or if the run has no token.
    """
    if not wanted:
        yield
        return
    with (
        answering(0, "tracking.prometheus", run_token(run, "metrics"), metrics_text(*collectors)) as taken,
        listed(True, run, Target(f"{HOST}:{taken}", role, name)),
    ):
        yield


@contextlib.contextmanager
def answering(port: int, key: str, token: str, render: Callable[[], bytes]) -> Iterator[int]:
    """Answer scrapes that carry ``token`` with the text of ``render``, on loopback while the block runs.

    Yields the port, a free one if ``port`` is 0. One scrape at a time calls ``render``, in a thread. Raises UserError,
    naming the config's ``key``, if the port cannot be had.
    """
    with bind(HOST, port, key) as listener:
        listener.listen()
        server = server_of(_application(render), Access(token))
        # Consumes scrapes; produces their answers. Waits for a connection; unblocked by one, or by ``should_exit``.
        thread = threading.Thread(target=server.run, args=[[listener]], name="metrics", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(STOP_S)


def _application(render: Callable[[], bytes]) -> Starlette:
    one = asyncio.Semaphore()

    async def scrape(request: Request) -> Response:
        async with one:
            return text_response(await asyncio.to_thread(render))

    return application({"GET /metrics": scrape})
