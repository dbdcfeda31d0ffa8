"""How vLLM is started: that it sends its spans where the run's go, and only then."""

import pytest

from rl_async import tracing
from rl_async.rollout_server.vllm import __main__ as started

ALL, TRACES = tracing.VARIABLES
DEFAULTS = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, None),
        ({ALL: "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({ALL: "http://c:4318", TRACES: "http://d/traces"}, "http://d/traces"),
    ],
)
def test_vllm_sends_its_spans_where_those_of_the_run_go(
    variables: dict[str, str], endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: "there")
    for name in (ALL, TRACES, *DEFAULTS):
        monkeypatch.setenv(name, variables.get(name, ""))
    assert started._tracing() == ([] if endpoint is None else ["--otlp-traces-endpoint", endpoint])
    for name, value in DEFAULTS.items():
        assert started.os.environ[name] == ("" if endpoint is None else value)


def test_a_users_sampler_of_vllms_spans_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: "there")
    monkeypatch.setenv(ALL, "http://c:4318")
    for name in DEFAULTS:
        monkeypatch.setenv(name, "mine")
    assert started._tracing()
    assert [started.os.environ[name] for name in DEFAULTS] == ["mine", "mine"]


def test_a_vllm_without_the_package_starts_without_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    monkeypatch.setenv(ALL, "http://c:4318")
    assert started._tracing() == []
