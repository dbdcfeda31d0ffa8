"""Tracing that is off costs nothing, and one that cannot work is refused only where it was asked for."""

import sys
from importlib.util import find_spec
from pathlib import Path

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


@pytest.mark.skipif(
    find_spec("opentelemetry") is None, reason="no OpenTelemetry; install it with pip install 'rl-async[otel]'"
)
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
    """Return the traces, of 1,000 episodes, of which a process sends spans."""
    spans = tracing.Spans("http://127.0.0.1:1", "run", role)
    spans.close()
    taken: list[int] = []
    spans._out.on_end = lambda span: taken.append(span.context.trace_id)
    for episode in range(1000):
        spans.add(f"{episode}.0.0", "chat", "", "", (1, 2), "", {})
    return set(taken)
