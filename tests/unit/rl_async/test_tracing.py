"""Tracing that is off costs nothing, and one that cannot work is refused only where it was asked for."""

import sys
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
