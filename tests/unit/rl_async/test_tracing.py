"""Tracing that is off costs nothing, and one that cannot work is refused only where it was asked for."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rl_async import tracing
from rl_async.errors import ConfigError
from rl_async.tracing import VARIABLES


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No OpenTelemetry is installed, and no variable set."""
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_off_nothing_is_read_imported_or_kept(missing: None, tmp_path: Path) -> None:
    before = set(sys.modules)
    with tracing.traced("", tmp_path / "no such run", "queue"):
        assert tracing.now() == 0
        tracing.add("1.0.0", "chat", tracing.now(), {})
        with tracing.span("1.0.0", "chat", {}) as found:
            found["more"] = 1
    assert not {name for name in set(sys.modules) - before if name.startswith("opentelemetry")}


def test_an_endpoint_without_the_package_is_refused_and_names_the_key(missing: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.otlp_endpoint"):
        tracing.is_wanted("http://127.0.0.1:4318")


def test_a_variable_of_the_machine_without_the_package_is_no_error(
    missing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES[0], "http://127.0.0.1:4318")
    assert not tracing.is_wanted("")


otel = pytest.mark.skipif(
    find_spec("opentelemetry") is None, reason="no OpenTelemetry; install it with pip install 'rl-async[otel]'"
)


@otel
@pytest.mark.parametrize(
    ("share", "least", "most"), [("0", 0, 0), ("0.25", 150, 350), ("1", 1000, 1000), ("", 1000, 1000)]
)
def test_every_process_samples_the_same_share_of_traces(
    share: str, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.SHARE, share)
    sent = [sampled(role) for role in ("queue", "worker")]
    assert sent[0] == sent[1] and least <= len(sent[0]) <= most


@pytest.mark.parametrize("share", ["x", "-0.1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tracing.SHARE, share)
    with pytest.raises(ConfigError, match=tracing.SHARE):
        tracing._sampled_share()


def sampled(role: str) -> set[int]:
    """Return those of 1,000 episodes of which a process would begin a trace."""
    spans = tracing.Spans("http://127.0.0.1:1", "run", role)
    spans.close()
    return {episode for episode in range(1000) if spans.begins(f"{episode}.0.0")}


def test_traces_are_limited_to_a_rate_and_to_a_minute_of_it_at_once() -> None:
    limit, slow, none = tracing.TraceLimit(2.0), tracing.TraceLimit(0.001), tracing.TraceLimit(None)
    assert sum(limit.take(1000.0) for _ in range(500)) == 2 * tracing.BURST_S
    assert sum(limit.take(1000.0 + second / 10) for second in range(100)) == pytest.approx(20, abs=1)
    assert sum(limit.take(9000.0) for _ in range(500)) == 2 * tracing.BURST_S, "what is not used is not saved up"
    assert sum(slow.take(1.0) for _ in range(9)) == 1, "at any rate there is a first one"
    assert all(none.take(0.0) for _ in range(500))


class FakeSpans(tracing.Spans):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self._run, self.sent = "run", list[tuple[Any, Any]]()

    def _send(self, name: str, context: Any, parent: Any, *others: Any) -> None:
        self.sent.append((context, parent))


@otel
def test_a_span_below_a_header_is_in_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    with tracing.span("1.0.0", "chat", {}, key="1.0.0.0"):
        header = tracing.traceparent("1.0.0", "1.0.0.0")
        tracing.add_below(header, "decode", 1, 2, {})
    for refused in ("", "00-12-34-01", header.replace("00-", "ff-", 1), f"{header}-more"):
        tracing.add_below(refused, "decode", 1, 2, {})
    (below, parent), (chat, _) = fake.sent
    assert (parent.trace_id, parent.span_id) == (chat.trace_id, chat.span_id)
    assert below.trace_id == chat.trace_id and below.span_id != chat.span_id


@otel
def test_an_episode_without_a_trace_has_neither_spans_nor_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSpans()
    monkeypatch.setattr(tracing, "_spans", fake)
    with tracing.span("", "chat", {}):
        tracing.add("", "train", tracing.now(), {})
    assert tracing.traceparent("", "0") == "" and not fake.sent
