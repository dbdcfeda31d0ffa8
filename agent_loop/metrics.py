"""What agent workers and gateways tell Prometheus: samples, durations and failures of their parts, sampled tokens."""

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from rl_async.rollout_server.pool import EnginePool
from rl_async.telemetry.exposition import gauge

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
OPERATION = ("operation", "name")  # invoke_agent, chat, execute_tool, reward; of a tool its name

SECONDS = Histogram(
    "rl_async_agent_seconds", "Duration of the parts of episodes.", OPERATION, buckets=BUCKETS_S, registry=None
)
ERRORS = Counter("rl_async_agent_errors", "Parts of episodes that failed.", OPERATION, registry=None)
TOKENS = Counter("rl_async_agent_tokens", "Tokens of prompts (input) and of answers (output).", ["kind"], registry=None)


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
        for instrument in (SECONDS, ERRORS, TOKENS):
            yield from instrument.collect()
