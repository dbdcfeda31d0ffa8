"""One trace for each episode, from its admission to its gradient, by OpenTelemetry's names for generative AI.

Queue, agent workers, gateway and trainer add spans by the episode's name alone (GROUP.SAMPLE.ATTEMPT): the ids of trace
and spans are hashes of it, so nothing travels between them. Off, ``add`` returns at once and nothing is imported.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_async.errors import ConfigError

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SHARE = "OTEL_TRACES_SAMPLER_ARG"  # of OpenTelemetry's TraceIdRatioBased sampler
INSTALL = "python -m pip install 'rl-async[otel]'"
EPISODE, AGENT = "episode", "invoke_agent"  # spans that have others within them
FLUSH_MS = 10_000
WAITING, AT_ONCE = 1 << 17, 1 << 11  # spans: a step ends with one for each of its episodes at once

Value = str | int | float | list[str]

log = logging.getLogger("rl_async.tracing")


class Spans:
    """Sends spans of one process to a collector, in the background; what the collector does not take is dropped.

    ``endpoint``: of the collector; empty: as OpenTelemetry's variables say. ``run`` tells runs apart. Of the traces,
    whole ones, those are sent that OpenTelemetry's variable OTEL_TRACES_SAMPLER_ARG asks for: a share, by default 1.
    """

    def __init__(self, endpoint: str, run: str, role: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._run, self._sampled_below = run, _sampled_share() * 2**64
        self._resource = Resource.create({"service.name": "rl-async", "rl_async.role": role})
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
        self._out = BatchSpanProcessor(exporter, max_queue_size=WAITING, max_export_batch_size=AT_ONCE)

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
        """Add a span, if its trace is sampled; ``key`` names it within the trace, empty: nobody refers to it."""
        trace = hashlib.sha256(f"{self._run} {episode}".encode()).digest()[:16]
        if int.from_bytes(trace[8:]) >= self._sampled_below:  # as TraceIdRatioBased: all processes choose the same
            return
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Status, StatusCode

        self._out.on_end(
            ReadableSpan(
                name=name,
                context=_context(trace, key),
                parent=_context(trace, parent) if parent else None,
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
    from opentelemetry.trace import SpanContext, TraceFlags

    span = hashlib.sha256(trace + key.encode()).digest() if key else os.urandom(8)
    ids = int.from_bytes(trace), int.from_bytes(span[:8])
    return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


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
def traced(endpoint: str, folder: Path, role: str) -> Iterator[None]:
    """Send the spans of this process while the block runs, if the run is traced."""
    global _spans
    if not is_wanted(endpoint):
        yield
        return
    began = (folder / "config.yaml").stat().st_mtime_ns  # another for a run of the same name, and after --resume
    _spans = Spans(endpoint, f"{folder.resolve()} {began}", role)
    try:
        yield
    finally:
        _spans.close()
        _spans = None


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
    """Add a span to the trace of an episode, from ``began`` until ``ended`` (0: now)."""
    if _spans and began:
        _spans.add(episode, name, key, parent, (began, ended or time.time_ns()), error, about)


@contextmanager
def span(
    episode: str, name: str, about: Mapping[str, Value], *, key: str = "", parent: str = AGENT
) -> Iterator[dict[str, Value]]:
    """Span the block, with the attributes ``about`` and those that the block adds to what it is given.

    An ``error.type`` among these marks the span as failed, and so does an exception.
    """
    if _spans is None:
        yield {}
        return
    began, found = time.time_ns(), dict(about)
    try:
        yield found
    except BaseException as error:
        found["error.type"] = type(error).__name__
        raise
    finally:
        add(episode, name, began, found, key=key, parent=parent, error=str(found.get("error.type", "")))
