"""One trace for each episode, from its admission to its gradient, by OpenTelemetry's names for generative AI.

The queue chooses the episodes that have a trace when it leases them (``begins``), and a lease and the rows of the
episode say so. Queue, agent workers, gateway and trainer add spans by the episode's name alone (GROUP.SAMPLE.ATTEMPT):
the ids of trace and spans are hashes of it. Engines and reward models get them in the header ``traceparent`` (W3C).
Off, and for an episode without a trace, ``add`` returns at once; off, nothing is imported.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_async.errors import ConfigError

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
# Of OpenTelemetry's TraceIdRatioBased sampler.
SHARE = "OTEL_TRACES_SAMPLER_ARG"
INSTALL = "python -m pip install 'rl-async[otel]'"
# Spans that have others within them.
EPISODE, AGENT = "episode", "invoke_agent"
HEADER = "traceparent"
# The episodes of a step begin at once, so that the traces of so many seconds may do so.
BURST_S = 60
FLUSH_MS = 10_000
# Spans in the queue and in one export: a step ends with one for each of its episodes at once.
WAITING, AT_ONCE = 1 << 17, 1 << 11

Value = str | int | float | list[str]

_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-01")

log = logging.getLogger("rl_async.tracing")


class TraceLimit:
    """A token bucket: ``per_s`` traces on average, up to BURST_S times as many at once. Pure: the time is passed in."""

    def __init__(self, per_s: float | None) -> None:
        """``per_s``: None for no limit."""
        self._per_s = per_s
        self._most = self._left = max(1.0, (per_s or 0) * BURST_S)
        self._refilled = 0.0

    def take(self, now: float) -> bool:
        """Whether one more trace may begin."""
        if self._per_s is None:
            return True
        self._left = min(self._most, self._left + (now - self._refilled) * self._per_s)
        self._refilled = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Spans:
    """Sends spans of one process to a collector, in the background; spans that the collector refuses are dropped.

    An empty ``endpoint`` leaves the collector's address to OpenTelemetry's variables. ``run`` tells runs apart. This
    process begins at most as many traces as ``limit`` allows, for the share of episodes that OpenTelemetry's variable
    OTEL_TRACES_SAMPLER_ARG asks for, by default 1.
    """

    def __init__(self, endpoint: str, run: str, role: str, limit: float | None = None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._run, self._sampled_below = run, _sampled_share() * 2**64
        self._limit = TraceLimit(limit)
        self._resource = Resource.create({"service.name": "rl-async", "rl_async.role": role})
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
        self._out = BatchSpanProcessor(exporter, max_queue_size=WAITING, max_export_batch_size=AT_ONCE)

    def begins(self, episode: str) -> bool:
        """Whether the episode, which begins now, has a trace."""
        # As TraceIdRatioBased does.
        sampled = int.from_bytes(self._trace(episode)[8:]) < self._sampled_below
        return sampled and self._limit.take(time.monotonic())

    def traceparent(self, episode: str, key: str) -> str:
        """Return the header under which another process adds spans below the one that ``key`` names."""
        context = _context(self._trace(episode), key)
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def _trace(self, episode: str) -> bytes:
        return hashlib.sha256(f"{self._run} {episode}".encode()).digest()[:16]

    def add(
        self,
        episode: str,
        name: str,
        key: str,
        parent: str,
        times: tuple[int, int],
        error: str,
        about: Mapping[str, Value],
    ) -> None:
        """Add a span; other spans refer to it by its ``key``, if it has one."""
        trace = self._trace(episode)
        above = _context(trace, parent) if parent else None
        self._send(name, _context(trace, key), above, times, error, about)

    def add_below(
        self, traceparent: str, name: str, times: tuple[int, int], error: str, about: Mapping[str, Value]
    ) -> None:
        """Add a span below that of another process; nothing if the header names none."""
        if found := _TRACEPARENT.fullmatch(traceparent):
            trace, parent = int(found[1], 16), int(found[2], 16)
            above, own = _numbered(trace, parent), _numbered(trace, int.from_bytes(os.urandom(8)))
            self._send(name, own, above, times, error, about)

    def _send(
        self, name: str, context: Any, parent: Any, times: tuple[int, int], error: str, about: Mapping[str, Value]
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Status, StatusCode

        self._out.on_end(
            ReadableSpan(
                name=name,
                context=context,
                parent=parent,
                resource=self._resource,
                instrumentation_scope=InstrumentationScope("rl_async"),
                attributes=dict(about),
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
                start_time=times[0],
                end_time=times[1],
            )
        )

    def close(self) -> None:
        """Send what is left, within FLUSH_MS."""
        self._out.force_flush(FLUSH_MS)
        self._out.shutdown()


def _context(trace: bytes, key: str) -> Any:
    span = hashlib.sha256(trace + key.encode()).digest() if key else os.urandom(8)
    return _numbered(int.from_bytes(trace), int.from_bytes(span[:8]))


def _numbered(trace: int, span: int) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _sampled_share() -> float:
    """Return the share of traces to send. Raises ConfigError if the variable holds no number from 0 to 1."""
    text = os.environ.get(SHARE) or "1"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{SHARE}={text}: give the share of traces to send, a number from 0 to 1")
    return share


_spans: Spans | None = None
_above: ContextVar[str] = ContextVar("above", default="")


def is_wanted(endpoint: str) -> bool:
    """Whether the run is traced; ``endpoint`` is ``tracking.otlp_endpoint``.

    Raises ConfigError if that asks for it, and the package for it is missing.
    """
    if not endpoint and not any(map(os.environ.get, VARIABLES)):
        return False
    if find_spec("opentelemetry") and find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter"):
        return True
    if endpoint:
        raise ConfigError(f"tracking.otlp_endpoint: OpenTelemetry's SDK is not installed; run `{INSTALL}`")
    log.warning("%s is set, but OpenTelemetry's SDK is not installed: no traces; run `%s`", VARIABLES[0], INSTALL)
    return False


@contextmanager
def traced(endpoint: str, folder: Path | None, role: str, limit: float | None = None) -> Iterator[None]:
    """Send the spans of this process while the block runs, if the run is traced.

    ``folder`` is the run's, or None in a process that only adds spans below those that requests name. With a ``limit``
    this process begins at most so many traces per second.
    """
    global _spans
    if not is_wanted(endpoint):
        yield
        return
    run = ""
    if folder is not None:
        # It differs for another run of the same name, and after --resume.
        began = (folder / "config.yaml").stat().st_mtime_ns
        run = f"{folder.resolve()} {began}"
    _spans = Spans(endpoint, run, role, limit)
    try:
        yield
    finally:
        _spans.close()
        _spans = None


def begins(episode: str) -> bool:
    """Whether an episode that begins now has a trace. The queue asks once, and tells the others."""
    return _spans is not None and _spans.begins(episode)


def traceparent(episode: str, key: str) -> str:
    """Return the header HEADER for a request made within the span that ``key`` names; empty without a trace."""
    return _spans.traceparent(episode, key) if _spans and episode else ""


def above() -> str:
    """Return the header HEADER for a request made within the innermost ``span`` that has a key; empty without one."""
    return _above.get()


def now() -> int:
    """Return the time as ``add`` wants it; 0 if nothing is traced."""
    return time.time_ns() if _spans else 0


def add(
    episode: str,
    name: str,
    began: int,
    about: Mapping[str, Value],
    *,
    key: str = "",
    parent: str = AGENT,
    error: str = "",
    ended: int = 0,
) -> None:
    """Add a span to the trace of an episode, unless its name is empty, from ``began`` until ``ended`` or now."""
    if _spans and began and episode:
        _spans.add(episode, name, key, parent, (began, ended or time.time_ns()), error, about)


def add_below(
    traceparent: str, name: str, began: int, ended: int, about: Mapping[str, Value], *, error: str = ""
) -> None:
    """Add a span below the one that a request's header HEADER names, unless that is empty."""
    if _spans and traceparent:
        _spans.add_below(traceparent, name, (began, ended), error, about)


@contextmanager
def span(
    episode: str, name: str, about: Mapping[str, Value], *, key: str = "", parent: str = AGENT
) -> Iterator[dict[str, Value]]:
    """Span the block, with the attributes ``about`` and those that the block adds to the dict it gets.

    Within it, requests are made with the header ``above``, if it has a ``key``. An ``error.type`` among the attributes
    marks the span as failed, and so does an exception.
    """
    if not (_spans and episode):
        yield {}
        return
    began, found = time.time_ns(), dict(about)
    outer = _above.set(_spans.traceparent(episode, key)) if key else None
    try:
        yield found
    except BaseException as error:
        found["error.type"] = type(error).__name__
        raise
    finally:
        if outer is not None:
            _above.reset(outer)
        add(episode, name, began, found, key=key, parent=parent, error=str(found.get("error.type", "")))
