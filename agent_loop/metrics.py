"""What agent workers and gateways tell Prometheus: samples, durations and failures of their parts, sampled tokens."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from rl_async.process.http_server import gauge
from rl_async.rollout_server.pool import EnginePool

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
OPERATION = ("operation", "name")  # invoke_agent, chat, execute_tool, reward; of a tool its name

SECONDS = Histogram(
    "rl_async_agent_seconds", "Duration of the parts of episodes.", OPERATION, buckets=BUCKETS_S, registry=None
)
ERRORS = Counter("rl_async_agent_errors", "Parts of episodes that failed.", OPERATION, registry=None)
CONVERSATIONS = Counter(
    "rl_async_agent_conversation_tokens",
    "Sampled tokens of agent programs, by conversation: main, other, left_out of training.",
    ["conversation"],
    registry=None,
)
TOKENS = Counter("rl_async_agent_tokens", "Tokens of prompts (input) and of answers (output).", ["kind"], registry=None)


@cache  # finding a child by its labels takes longer than counting
def _part(operation: str, name: str) -> tuple[Histogram, Counter]:
    return SECONDS.labels(operation, name), ERRORS.labels(operation, name)  # 0 errors: rates are known from the start


@cache
def _tokens(kind: str) -> Counter:
    return TOKENS.labels(kind)


def count(operation: str, name: str, seconds: float, failed: bool) -> None:
    """Count a part of an episode."""
    duration, errors = _part(operation, name)
    duration.observe(seconds)
    if failed:
        errors.inc()


def count_tokens(prompt: int, sampled: int) -> None:
    """Count the tokens of an answer and of its prompt."""
    _tokens("input").inc(prompt)
    _tokens("output").inc(sampled)


def count_conversations(sampled: Mapping[str, int]) -> None:
    """Count the sampled tokens of an agent program's episode: of its ``main`` conversation, others, those left out."""
    for kind, tokens in sampled.items():
        CONVERSATIONS.labels(kind).inc(tokens)


class Counts(Protocol):
    """Samples by how they ended."""

    put: int
    failed: int
    refused: int


class SamplesCollector:
    """The samples of one worker or gateway, ``held`` how many it has now, and requests replayed on another engine."""

    def __init__(self, counts: Counts, held: Callable[[], int], pool: EnginePool | None = None) -> None:
        self._counts, self._held, self._pool = counts, held, pool

    def collect(self) -> Iterator[Metric]:
        """Yield them as they are now, and the durations, failures and tokens of this process."""
        samples = CounterMetricFamily("rl_async_agent_samples", "Samples, by how they ended.", labels=["outcome"])
        for outcome in ("put", "failed", "refused"):
            samples.add_metric([outcome], getattr(self._counts, outcome))
        yield samples
        yield gauge("rl_async_agent_samples_held", "Samples that are leased and have not ended.", self._held())
        if self._pool is not None:
            replayed = "Requests replayed after an engine failed them."
            yield CounterMetricFamily("rl_async_agent_replayed_requests", replayed, self._pool.replayed)
        for instrument in (SECONDS, ERRORS, TOKENS, CONVERSATIONS):
            yield from instrument.collect()
