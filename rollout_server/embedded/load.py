"""The embedded engine's load for Prometheus, under vLLM's names, so that clients and dashboards read both alike."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from rl_async.process.http_server import by_label, gauge
from rl_async.rollout_server.embedded.engine_thread import EngineThread


class EngineCollector:
    """Requests, cache, tokens and whether it sleeps, read while the engine works."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield them as they are now."""
        core = self._engine.core
        held = sum(len(sequence.tokens) for sequence in list(core.running)) / core.cache_tokens
        yield gauge("vllm:num_requests_running", "Sequences that are decoded.", len(core.running))
        yield gauge("vllm:num_requests_waiting", "Sequences that wait.", len(core.waiting) + len(core.held))
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", held)
        yield gauge("rl_async:kv_cache_bytes", "Bytes of the KV cache.", core.cache_bytes)
        yield CounterMetricFamily("vllm:generation_tokens", "Tokens sampled.", core.sampled_tokens)
        yield CounterMetricFamily("vllm:prompt_tokens", "Tokens of prompts.", core.prompt_tokens)
        yield CounterMetricFamily("vllm:num_preemptions", "Sequences whose cache was dropped.", core.preemptions)
        yield CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens looked up.", core.prompt_tokens)
        yield CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", core.cached_tokens)
        awake = {"awake": float(not self._engine.asleep)}
        yield by_label("sleep_state", "vllm:engine_sleep_state", "1 in the state that the engine is in.", awake)
