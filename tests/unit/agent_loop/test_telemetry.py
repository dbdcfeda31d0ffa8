"""What Prometheus hears of episodes: durations, failures and tokens of their parts, and samples by how they ended."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from rl_async.agent_loop import telemetry
from rl_async.agent_loop.telemetry import SamplesCollector
from rl_async.messages import Sampling
from rl_async.rollout_server.api import GenerateRequest, GenerateResult


@pytest.fixture(autouse=True)
def from_zero() -> None:
    for instrument in (telemetry.SECONDS, telemetry.ERRORS, telemetry.TOKENS):
        instrument.clear()
    telemetry._part.cache_clear()
    telemetry._tokens.cache_clear()


def value(sample: str, /, **labels: str) -> float | None:
    registry = CollectorRegistry()
    counts = SimpleNamespace(put=3, failed=1, refused=0, held=2)
    registry.register(SamplesCollector(counts))
    return registry.get_sample_value(sample, labels)


def tool(name: str, *, error: bool = False) -> None:
    with telemetry.of_tool("1.0.0", name, "") as about:
        about |= {"error.type": "tool_error"} if error else {}


def test_a_tool_counts_by_its_name_and_so_do_its_failures() -> None:
    tool("search")
    tool("search", error=True)
    tool("python")
    with pytest.raises(KeyError), telemetry.of_tool("1.0.0", "python", ""):
        raise KeyError
    for name, calls in (("search", 2), ("python", 2)):
        labels = {"operation": "execute_tool", "name": name}
        assert value("rl_async_agent_seconds_count", **labels) == calls
        assert value("rl_async_agent_errors_total", **labels) == 1


def test_what_is_cancelled_at_the_end_of_a_run_has_not_failed() -> None:
    with pytest.raises(asyncio.CancelledError), telemetry.of_tool("1.0.0", "search", ""):
        raise asyncio.CancelledError
    assert value("rl_async_agent_errors_total", operation="execute_tool", name="search") == 0


def test_tokens_of_an_answer_are_counted() -> None:
    request = GenerateRequest(request_id="r", token_ids=[1, 2, 3], sampling=Sampling(), max_tokens=8, stop_token_ids=[])
    with telemetry.of_chat("1.0.0", "models/m", request) as sampled:
        sampled(GenerateResult(token_ids=[4, 5], logprobs=[0.0, 0.0], versions=[], finish_reason="stop"))
    assert value("rl_async_agent_tokens_total", kind="input") == 3
    assert value("rl_async_agent_tokens_total", kind="output") == 2
    assert value("rl_async_agent_seconds_count", operation="chat", name="") == 1


def test_samples_are_those_of_the_worker() -> None:
    assert value("rl_async_agent_samples_total", outcome="put") == 3
    assert value("rl_async_agent_samples_total", outcome="failed") == 1
    assert value("rl_async_agent_samples_held") == 2
