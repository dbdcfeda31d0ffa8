"""``GET /metrics`` of a process, in Prometheus' text format, answered by a thread of its own."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import uvicorn
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from rl_async.process.http_auth import Access, run_token
from rl_async.process.http_server import application, server_of
from rl_async.process.role import bind
from rl_async.telemetry.targets import Target, listed

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
def exposed(wanted: bool, run: Path, role: str, name: str, *collectors: Collector, port: int = 0) -> Iterator[None]:
    """Answer scrapes while the block runs, at an address that ``RUN/prometheus/NAME.json`` has; if that is ``wanted``.

    ``port`` is ``queue.metrics_port``; 0 takes a free one. Raises UserError if the port cannot be had, or if the run
    has no token.
    """
    if not wanted:
        yield
        return
    key = "queue.metrics_port" if port else "tracking.prometheus"
    with (
        answering(port, key, run_token(run, "metrics"), metrics_text(*collectors)) as taken,
        listed(True, run, Target(f"{HOST}:{taken}", role, name)),
    ):
        yield


@contextlib.contextmanager
def answering(port: int, key: str, token: str, render: Callable[[], bytes]) -> Iterator[int]:
    """Answer scrapes that carry ``token`` with what ``render`` returns, on loopback while the block runs.

    Yields the port, a free one if ``port`` is 0. One scrape at a time calls ``render``, in a thread. Raises UserError,
    naming the config's ``key``, if the port cannot be had.
    """
    with bind(HOST, port, key) as listener:
        listener.listen()
        server = server_of(_application(render), Access(token))
        thread = threading.Thread(target=_answer, args=[server, listener], name="metrics", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(STOP_S)


def _answer(server: uvicorn.Server, listener: socket.socket) -> None:
    """Consumes scrapes; produces their answers. Waits for a connection; unblocked by one, or by ``should_exit``."""
    server.run(sockets=[listener])


def _application(render: Callable[[], bytes]) -> Starlette:
    one = asyncio.Semaphore()

    async def scrape(request: Request) -> Response:
        async with one:
            return text_response(await asyncio.to_thread(render))

    return application({"GET /metrics": scrape})
